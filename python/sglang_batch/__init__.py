"""Offline batch inference on SGLang."""

__version__ = "0.1.0"
