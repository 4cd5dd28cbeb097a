"""Lengths of answers: a sample that is answered first, and estimates for all requests."""
