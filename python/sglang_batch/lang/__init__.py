"""Batches from a user's program: SGLang's programs, streams of rows, and tables."""
