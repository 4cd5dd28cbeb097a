"""Run a batch on a server with Anthropic's own client.

python examples/message_batches.py [--url http://localhost:30000]
"""

from __future__ import annotations

import argparse
import time

import demo
from anthropic import Anthropic

QUESTIONS = ["What is a batch?", "What is a prefix?", "What is a page of KV?"]

parser = argparse.ArgumentParser(description="Run a batch with Anthropic's client.")
parser.add_argument("--url", help="default: a server is started")
options = parser.parse_args()

with demo.server(options.url) as url:
    client = Anthropic(base_url=url, api_key="none")
    batch = client.messages.batches.create(
        requests=[
            {
                "custom_id": f"question-{number}",
                "params": {
                    "model": "demo",
                    "max_tokens": 16,
                    "messages": [{"role": "user", "content": question}],
                },
            }
            for number, question in enumerate(QUESTIONS)
        ]
    )
    while batch.processing_status != "ended":
        time.sleep(0.5)
        batch = client.messages.batches.retrieve(batch.id)
    print(batch.processing_status, batch.request_counts)
    for line in client.messages.batches.results(batch.id):
        assert line.result.type == "succeeded"
        (block,) = line.result.message.content
        assert block.type == "text"
        print(f"{line.custom_id}: {block.text[:60]!r}")
