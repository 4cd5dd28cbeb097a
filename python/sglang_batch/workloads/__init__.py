"""Test jobs: synthetic ones with published statistics, and traces of lengths."""
