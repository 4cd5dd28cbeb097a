"""``python -m sglang_batch`` is ``sglang-batch``."""

from .cli import command

command()
