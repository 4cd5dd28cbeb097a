"""Answers of earlier jobs, kept on disk for requests that must have equal ones."""
