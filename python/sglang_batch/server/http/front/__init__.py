"""A server without an engine: the front of other offline servers."""
