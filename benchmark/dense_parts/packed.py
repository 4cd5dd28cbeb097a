"""Linear layers on a CPU that are packed for oneDNN, and torch's own.

Microseconds of processor time of one layer by the number of rows, and milliseconds of an
encoder of the size of MiniLM with 8 texts of 100 tokens. Medians; both ways take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from report import Figure, print_table
from torch import nn
from transformers import BertConfig, BertModel

from sglang_batch.dense.model import pack_linears

IN_FEATURES, OUT_FEATURES = 1024, 4096
ROWS = (1, 4, 16, 256)
CALLS = 10


def measure(quick: bool = False, repeats: int = 3) -> list[Figure]:
    """The figures of this part, which have no target: they are a processor's."""
    repeats = 1 if quick else 3 * repeats
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False))
    packed = nn.Sequential(nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False))
    pack_linears(packed)
    table, figures = [], []
    for rows in ROWS:
        inputs = torch.randn(rows, IN_FEATURES)
        table.append(_compare(f"{rows} rows, us", plain, packed, inputs, repeats, 1e6))
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
    plain, packed = (BertModel(BertConfig(**sizes)).eval() for _ in range(2))
    pack_linears(packed)
    ids = torch.randint(0, 9000, (8, 100))
    table.append(_compare("encoder, ms", plain, packed, ids, repeats, 1e3))
    title = f"Layers of {IN_FEATURES} x {OUT_FEATURES}, and an encoder"
    print_table(title, ["", "torch's own", "packed"], table)
    for name, own, ours in table:
        figures.append(Figure(f"{name}: own over packed", own / ours, "x"))
    return figures


def _compare(
    name: str,
    plain: nn.Module,
    packed: nn.Module,
    inputs: torch.Tensor,
    repeats: int,
    unit: float,
) -> tuple[str, float, float]:
    turns = [
        [_seconds(partial(each, inputs)) for each in (plain, packed)]
        for _ in range(repeats)
    ]
    own, ours = (round(unit * median(each), 1) for each in zip(*turns, strict=True))
    return name, own, ours


def _seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    for _ in range(2):
        call()
    begin = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - begin) / CALLS
