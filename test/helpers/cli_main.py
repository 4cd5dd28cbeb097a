"""The command ``sglang-batch``, for :mod:`forked_children`."""

from __future__ import annotations

from sglang_batch.__main__ import command


def main() -> None:
    command()
