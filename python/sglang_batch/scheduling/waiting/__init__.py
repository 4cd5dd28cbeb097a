"""Requests of a job that wait in the engine, and which of them is next."""
