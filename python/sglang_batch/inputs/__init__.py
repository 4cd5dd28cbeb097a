"""Inputs of every kind, staged as one local file of batch lines."""
