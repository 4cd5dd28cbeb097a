"""``sglang_batch.demo_model``, the earlier place of :mod:`sglang_batch.run.demo_model`."""

import warnings

from sglang_batch.run.demo_model import write_demo_model, write_real_model

__all__ = ["write_demo_model", "write_real_model"]

warnings.warn(
    "sglang_batch.demo_model is now sglang_batch.run.demo_model; the old name works for "
    "one release.",
    DeprecationWarning,
    stacklevel=2,
)
