"""Answer one request per row of a CSV file with ``sglang-batch run --template``.

python examples/run_table.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import demo

TABLE = """id,city
a,Lima
b,Oslo
c,Quito
"""
TEMPLATE = {
    "messages": [{"role": "user", "content": "Name a river near {{city}}."}],
    "max_tokens": 16,
}

parser = argparse.ArgumentParser(description="Answer one request per row of a table.")
parser.add_argument("--model-path", help="default: a tiny random model")
options = parser.parse_args()

with (
    demo.model_flags(options.model_path) as flags,
    tempfile.TemporaryDirectory() as directory,
):
    table = Path(directory) / "cities.csv"
    table.write_text(TABLE)
    answers = Path(directory) / "answers.jsonl"
    command = [sys.executable, "-m", "sglang_batch", "run"]
    template = ["--template", json.dumps(TEMPLATE), "--id-column", "id"]
    subprocess.run(
        [*command, "-i", table, "-o", answers, *template, *flags], check=True
    )
    demo.print_answers(answers.read_bytes())
