"""KV on the device and on the host: the planned cache, and requests moved to the host."""
