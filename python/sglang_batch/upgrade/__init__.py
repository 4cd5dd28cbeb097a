"""Compares the private functions of SGLang that we use with another release."""
