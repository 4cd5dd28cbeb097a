"""Measured values in the user's data directory."""
