"""Calls of SGLang's own API that are planned as jobs."""
