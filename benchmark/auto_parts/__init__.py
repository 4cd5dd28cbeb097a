"""The parts of ``bench_auto.py``."""
