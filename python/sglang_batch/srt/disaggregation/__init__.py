"""Prefill and decode apart: KV over TCP, and the servers that work together."""
