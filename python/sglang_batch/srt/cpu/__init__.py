"""PyTorch stand-ins for what SGLang has no form of for a CPU without its own kernels."""
