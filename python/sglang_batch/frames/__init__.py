"""Rows of data frames as requests, and their answers as a column."""
