"""Layers around our routes. They leave the other routes of the server alone."""
