"""The number of examples on which a property is tried."""

from __future__ import annotations

import os

# `make test-nightly` sets it to 1. Examples are derandomized: fewer are the first of more.
SHARE = float(os.environ.get("SGLANG_BATCH_TEST_EXAMPLES", "0.25"))


def examples(nightly: int) -> int:
    """The examples of this run, of those of the nightly one: a share, but at least 20."""
    return max(min(nightly, 20), round(nightly * SHARE))
