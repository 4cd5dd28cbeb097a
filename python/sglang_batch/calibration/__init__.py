"""``sglang-batch calibrate``: what planning must know of a device, measured on it."""
