"""Run programs in this process, without a server, and resume a named job.

python examples/engine.py [--model-path MODEL]
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext

import demo
import sglang as sgl

from sglang_batch.lang import BatchBackend

QUESTIONS = ["What is a batch?", "What is a prefix?", "What is a page of KV?"]


@sgl.function
def ask(s, question):
    s += question
    s += sgl.gen("answer", max_tokens=16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run programs without a server.")
    parser.add_argument("--model-path", help="default: a tiny random model")
    options = parser.parse_args()
    own = options.model_path is not None
    with (
        nullcontext(options.model_path) if own else demo.model() as path,
        tempfile.TemporaryDirectory() as jobs,
    ):
        engine = sgl.Engine(
            model_path=path,
            offline_batch=True,
            log_level="warning",
            **({} if own else demo.ENGINE_OPTIONS),
        )
        try:
            # Results of named jobs are kept, and never computed again.
            answer(engine, jobs, QUESTIONS[:2])
            answer(engine, jobs, QUESTIONS)
        finally:
            engine.shutdown()


def answer(engine: sgl.Engine, jobs: str, questions: list[str]) -> None:
    backend = BatchBackend(engine, job="examples", job_dir=jobs)
    arguments = [{"question": question} for question in questions]
    for state in ask.run_batch(arguments, backend=backend):
        if state.error() is not None:
            raise state.error()
        print(repr(state["answer"][:60]))


# SGLang's processes import this file again ("spawn").
if __name__ == "__main__":
    main()
