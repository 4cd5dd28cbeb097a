"""Kernels that run under sglang_batch; torch and triton only.

This package knows nothing of ``sglang_batch`` or ``sglang``. Each op lives in a
folder of its own, with its checks and launch in ``__init__``, a plain PyTorch
``reference`` and a Triton ``kernel``. No op is here yet.
"""

__all__: list[str] = []
