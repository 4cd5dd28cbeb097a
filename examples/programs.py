"""Run SGLang frontend programs on a server as one job.

python examples/programs.py [--url http://localhost:30000]
"""

from __future__ import annotations

import argparse

import demo
import sglang as sgl

from sglang_batch.lang import BatchBackend

QUESTIONS = ["What is a batch?", "What is a prefix?", "What is a page of KV?"]


@sgl.function
def answer_and_check(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16))
    s += sgl.user("Is that right?")
    s += sgl.assistant(sgl.select("right", choices=["yes", "no"]))


parser = argparse.ArgumentParser(description="Run frontend programs as one job.")
parser.add_argument("--url", help="default: a server is started")
options = parser.parse_args()

with demo.server(options.url) as url:
    states = answer_and_check.run_batch(
        [{"question": question} for question in QUESTIONS],
        backend=BatchBackend(url, chat_template_name="chatml"),
    )
    for question, state in zip(QUESTIONS, states, strict=True):
        if state.error() is not None:
            raise state.error()
        print(f"{question} {state['answer'][:40]!r} {state['right']}")
