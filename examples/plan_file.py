"""Predict how long a file of requests takes. Nothing runs, no weights are loaded.

python examples/plan_file.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import demo

# Questions on four documents, in turn: in file order, a small cache has evicted a document
# before its next question.
DOCUMENTS = [f"Document {n} on pages of KV cache. " * 16 for n in range(4)]
QUESTIONS = [f"{text} Question {n}?" for n in range(10) for text in DOCUMENTS]

parser = argparse.ArgumentParser(description="Predict how long a file takes.")
parser.add_argument("--model-path", help="default: a tiny random model")
options = parser.parse_args()

with (
    demo.model_flags(options.model_path) as flags,
    tempfile.TemporaryDirectory() as directory,
):
    requests = demo.write_requests(Path(directory) / "requests.jsonl", QUESTIONS)
    command = [sys.executable, "-m", "sglang_batch", "plan", "-i", requests]
    # For a real model, leave the size of the cache to the model and the device.
    machine = ["--hardware", "cpu", "--kv-capacity-tokens", "1500"]
    compare = ["--policy", "dfs", "--compare", "fcfs", "dual-scan"]
    subprocess.run([*command, *machine, *compare, *flags], check=True)
