"""Answer one request per row of a DataFrame with ``sglang_batch.map_table``.

python examples/run_frame.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import contextlib

import demo
import pandas

import sglang_batch

PRODUCTS = pandas.DataFrame(
    {
        "name": ["Fire engine", "Tea set", "Tractor", "Kettle"],
        "maker": ["Red Brick", "Oak & Co.", "Red Brick", "Oak & Co."],
        "kind": ["vehicle", "kitchen", "vehicle", "kitchen"],
    }
)
# The lines of the block may change places, so that rows with the same maker and kind begin
# alike, and these beginnings are computed once.
QUESTION = """Is this a toy? Answer yes or no.
{{#fields}}Name: {{name}}
Maker: {{maker}}
Kind: {{kind}}{{/fields}}"""
TEMPLATE = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}

parser = argparse.ArgumentParser(description="Answer a request per row of a frame.")
parser.add_argument("--model-path", help="default: a tiny random model")
options = parser.parse_args()

path = options.model_path
with contextlib.nullcontext(path) if path else demo.model() as model_path:
    settings = {} if path else demo.ENGINE_OPTIONS
    answered = sglang_batch.map_table(
        PRODUCTS, TEMPLATE, model_path=model_path, **settings
    )
print(answered.to_string())
