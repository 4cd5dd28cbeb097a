"""Parts of ``bench_costs.py``."""
