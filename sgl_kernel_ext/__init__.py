"""Kernels of sglang_batch. They need only torch, triton, numpy and numba.

This package imports neither ``sglang_batch`` nor ``sglang``. Each op has a folder with
its checks and its launch, a Triton kernel, and a reference in plain PyTorch:

- ``merge_state``: merges partial attention results by their log-sum-exp
- ``shared_prefix_attention``: attention of one engine step that reads a KV prefix once
  for all requests that share it

In plain PyTorch, for a CPU, are ``recurrent_layers`` (gated delta nets, Kimi Delta Attention
and Mamba-2) and ``draft_verification``.

Log-sum-exp values are natural logarithms, float32, ``[num_tokens, num_heads]``.
"""

__all__: list[str] = []
