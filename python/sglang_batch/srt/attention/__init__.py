"""Attention that reads each shared prefix once per step."""
