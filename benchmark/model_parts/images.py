"""300 questions on 20 images: how often an image is encoded, and how much is shared.

A tiny random Qwen2.5-VL on a CPU. Encoder runs are counted where the model's vision tower
gets images. Beside it SGLang's own scheduler, with the lines in the order of the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from image_runs import run_images
from report import Figure, print_table
from tiny_vision import image_url, write_tiny_vision

ARGUMENTS = ("--max-running-requests=32", "--chunked-prefill-size=512")
STOCK = '--offline-batch-config={"scheduler":"stock"}'


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer lines, and the same targets."""
    number, images = (60, 5) if quick else (300, 20)
    rng = np.random.default_rng(0)
    urls = [image_url(seed) for seed in range(images)]
    order = rng.permutation(number)
    job = [
        (urls[i % images], f"Question {i}: what is it?", int(rng.integers(2, 16)))
        for i in map(int, order)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_tiny_vision(model)
        planned = run_images(model, job, *ARGUMENTS)
        stock = run_images(model, job, *ARGUMENTS, STOCK, policy="fcfs")
    possible = planned["ratio"] * planned["input"]
    rows = [
        [name, each["encoded"], each["cached"], f"{each['cached'] / possible:.1%}"]
        for name, each in (("planned", planned), ("SGLang's scheduler", stock))
    ]
    print_table(
        f"{number} questions on {images} images",
        ["", "images encoded", "tokens cached", "of the possible"],
        rows,
    )
    wrong = sum(a != b for a, b in zip(planned["texts"], stock["texts"], strict=True))
    note = f"stock {stock['encoded']}"
    share = planned["cached"] / possible
    return [
        Figure("images encoded", planned["encoded"], "", ("=", images), note),
        Figure("cached tokens, of all possible", share, "", (">=", 0.99)),
        Figure("answers unlike stock SGLang's", wrong, "", ("=", 0)),
    ]
