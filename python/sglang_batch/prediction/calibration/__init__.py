"""``sglang-batch calibrate``: timing the steps of a machine."""
