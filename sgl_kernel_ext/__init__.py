"""Kernels that run under sglang_batch; torch, triton, numpy and numba only.

This package knows nothing of ``sglang_batch`` or ``sglang``. Each op lives in a
folder of its own, with its checks and launch in ``__init__``, a plain PyTorch
``reference`` and a Triton ``kernel``:

- ``merge_state``: merges partial attention results by their log-sum-exp
- ``shared_prefix_attention``: attention of one engine step, in which a KV prefix that
  several requests share is read once

Log-sum-exp values are natural logarithms, float32, ``[num_tokens, num_heads]``.
"""

__all__: list[str] = []
