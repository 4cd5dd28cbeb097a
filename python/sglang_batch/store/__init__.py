"""Durable state: results in append-only files, everything else in SQLite."""
