"""Anthropic's Message Batches API."""
