"""``sglang-batch client`` and ``keys``: batches of a server that runs elsewhere."""
