"""Vectors of texts, with the pooling that a model was trained for."""
