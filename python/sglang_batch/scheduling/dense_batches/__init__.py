"""Which rows are in a dense batch: admission by its KV, in order or by length."""
