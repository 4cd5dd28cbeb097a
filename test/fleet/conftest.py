"""Makes the simulated fleet of the benchmarks importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
