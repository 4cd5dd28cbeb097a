"""The parts of ``bench_dense.py``."""
