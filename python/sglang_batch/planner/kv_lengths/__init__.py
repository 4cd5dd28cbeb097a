"""Batches of requests with KV of similar length (AlignedServe), as compiled state machines."""
