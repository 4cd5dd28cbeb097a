"""Evaluations of inspect_ai, also with ``--batch``. It reads each answer strictly."""

from __future__ import annotations

import tempfile
from typing import Any

import checks as c
from checks import check
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

SAMPLES = 12
BATCH: Any = {"size": SAMPLES, "send_delay": 1, "tick": 0.2, "max_batches": 4}


def evaluate(provider: str, url: str, batch: Any = None, **arguments: Any) -> None:
    """All samples of a task have an answer."""
    config = GenerateConfig(max_tokens=16, temperature=0, batch=batch)
    at: Any = {"base_url": url, "api_key": c.KEY, "config": config}
    model = get_model(f"{provider}/{c.MODEL}", **at, **arguments)
    samples = [Sample(f"{i} + {i}?", target=str(2 * i)) for i in range(SAMPLES)]
    task = Task(samples, solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as logs:
        quiet: Any = {"log_dir": logs, "display": "none", "fail_on_error": False}
        (log,) = eval(task, model=model, **quiet)
        found = log.samples or []
        errors = [each.error.message for each in found if each.error is not None]
        assert log.status == "success" and not errors, [*errors, log.error][0]
        # A random model's answer may be empty.
        answers = [each for each in found if each.output.choices]
        assert len(answers) == SAMPLES, found


def openai(responses_api: bool, batch: Any = None) -> None:
    evaluate("openai", f"{c.URL}/v1", batch, responses_api=responses_api)


check("chat")(lambda: openai(False))
check("responses")(lambda: openai(True))
check("messages")(lambda: evaluate("anthropic", c.URL))
check("batch")(lambda: openai(False, BATCH))
check("batch")(lambda: openai(True, BATCH))
check("message batches")(lambda: evaluate("anthropic", c.URL, BATCH))
c.report("inspect_ai")
