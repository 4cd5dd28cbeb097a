"""Run a batch on a server with OpenAI's own client.

python examples/batch_api.py [--url http://localhost:30000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import demo
from openai import OpenAI

QUESTIONS = ["What is a batch?", "What is a prefix?", "What is a page of KV?"]
ENDED = ("completed", "failed", "cancelled", "expired")

parser = argparse.ArgumentParser(description="Run a batch with OpenAI's client.")
parser.add_argument("--url", help="default: a server is started")
options = parser.parse_args()

with demo.server(options.url) as url, tempfile.TemporaryDirectory() as directory:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    requests = demo.write_requests(Path(directory) / "requests.jsonl", QUESTIONS)
    file = client.files.create(file=requests, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    assert batch.output_file_id is not None
    demo.print_answers(client.files.content(batch.output_file_id).content)
