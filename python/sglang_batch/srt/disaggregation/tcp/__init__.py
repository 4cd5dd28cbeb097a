"""KV between a prefill rank and a decode rank, over TCP."""
