"""Answer a file with a model that SGLang does not run: a BLOOM, by transformers.

python examples/other_model.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import demo
from transformers import AutoConfig, BloomConfig, BloomForCausalLM

from sglang_batch.run.demo_model import write_demo_model

QUESTIONS = ["What is a batch?", "What is a row?", "What is a column of KV?"]

parser = argparse.ArgumentParser(description="Answer a file with a BLOOM.")
parser.add_argument("--model-path", help="default: a tiny random BLOOM")
options = parser.parse_args()


def write_bloom(path: Path) -> None:
    """A random BLOOM with the demo model's tokenizer and chat template."""
    write_demo_model(path)
    ids = AutoConfig.from_pretrained(path)
    config = BloomConfig(
        vocab_size=ids.vocab_size, hidden_size=64, n_layer=2, n_head=4,
        bos_token_id=ids.bos_token_id, eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id, seq_length=2048,
    )  # fmt: skip
    BloomForCausalLM(config).save_pretrained(path)


with tempfile.TemporaryDirectory() as directory:
    model = options.model_path
    if model is None:
        model = str(Path(directory) / "bloom")
        write_bloom(Path(model))
    requests = demo.write_requests(Path(directory) / "requests.jsonl", QUESTIONS)
    answers = Path(directory) / "answers.jsonl"
    command = [sys.executable, "-m", "sglang_batch", "run", "--backend", "auto"]
    command += ["--model-path", model, "--served-model-name", "demo"]
    subprocess.run([*command, "-i", requests, "-o", answers], check=True)
    demo.print_answers(answers.read_bytes())
