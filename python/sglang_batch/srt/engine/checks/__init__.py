"""Checks of requests before they reach the engine."""
