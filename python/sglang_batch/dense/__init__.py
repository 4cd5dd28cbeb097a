"""An engine for models that no serving engine runs: dense batches on transformers.

Rows of a dense KV tensor join and leave between decode steps, as in Baton (Zou et al.).
"""
