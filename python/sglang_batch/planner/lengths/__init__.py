"""Output lengths before they are known: a sample to run first, estimates from it."""
