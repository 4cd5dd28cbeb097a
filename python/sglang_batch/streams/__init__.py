"""Rows in, answers out as they finish: an iterable of any length, planned in windows."""
