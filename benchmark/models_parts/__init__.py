"""The parts of ``bench_models.py``."""
