"""The KV of the rows of a dense batch, and how models see it."""
