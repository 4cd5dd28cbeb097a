"""Synthetic jobs by published statistics, and jobs from traces of lengths."""
