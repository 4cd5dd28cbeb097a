"""Made-up jobs for ``sglang-batch simulate``, and those of traces."""
