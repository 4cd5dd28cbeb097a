"""The parts of ``bench_doors.py``."""
