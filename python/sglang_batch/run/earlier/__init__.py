"""Modules under their earlier names, for one release: on the path of the package."""

NAMES = ("sglang_batch.run.earlier.demo_model",)
