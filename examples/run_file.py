"""Answer a file of requests with ``sglang-batch run``.

python examples/run_file.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import demo

QUESTIONS = ["What is a batch?", "What is a prefix?", "What is a page of KV?"]

parser = argparse.ArgumentParser(description="Answer a file of requests.")
parser.add_argument("--model-path", help="default: a tiny random model")
options = parser.parse_args()

with (
    demo.model_flags(options.model_path) as flags,
    tempfile.TemporaryDirectory() as directory,
):
    requests = demo.write_requests(Path(directory) / "requests.jsonl", QUESTIONS)
    answers = Path(directory) / "answers.jsonl"
    command = [sys.executable, "-m", "sglang_batch", "run"]
    subprocess.run([*command, "-i", requests, "-o", answers, *flags], check=True)
    demo.print_answers(answers.read_bytes())
