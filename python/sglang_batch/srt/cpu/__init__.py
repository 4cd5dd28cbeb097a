"""PyTorch forms of SGLang's code for accelerators, for a CPU without SGLang's kernels."""
