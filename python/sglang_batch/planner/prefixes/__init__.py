"""Shared prefixes: prompts sorted by token id, their prefix tree, and prefix groups."""
