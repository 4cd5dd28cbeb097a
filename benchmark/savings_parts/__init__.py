"""The parts of bench_savings.py."""
