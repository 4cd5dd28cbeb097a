"""Parts of ``bench_fleet.py``."""
