"""Tasks of lm_eval: its models that call a server, on a task of a few rows."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="lm-eval-")

import checks as c
from checks import check
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = c.KEY
place = Path(os.environ["HF_DATASETS_CACHE"])
numbers = itertools.count()
ROWS = 12


def task(kind: str, texts: list[str], **fields: Any) -> str:
    """Write a task. Returns its name."""
    name = f"{kind}_{next(numbers)}"
    rows = [
        {"question": each, "answers": [" yes", " no"], "right": 0} for each in texts
    ]
    data = place / f"{name}.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    written = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{question}}",
        **fields,
    }
    # YAML has JSON in it.
    (place / f"{name}.yaml").write_text(json.dumps(written))
    return name


def evaluate(model: str, url: str, name: str, chats: bool = False, **more: Any) -> Any:
    at: Any = {"model": c.MODEL, "base_url": url, "max_retries": 1, **more}
    found: Any = simple_evaluate(
        model=model, model_args=at, tasks=[name], apply_chat_template=chats,
        task_manager=TaskManager(include_path=str(place)), bootstrap_iters=0,
    )  # fmt: skip
    return found["samples"][name]


def generates(texts: list[str]) -> str:
    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    metrics = [{"metric": "exact_match"}]
    more: Any = {"generation_kwargs": until, "metric_list": metrics}
    return task("generate_until", texts, doc_to_target="yes", **more)


QUESTIONS = [f"{i} + {i}?" for i in range(ROWS)]


def chats(texts: list[str], url: str = c.URL, **more: Any) -> None:
    model, url = "local-chat-completions", f"{url}/v1/chat/completions"
    found = evaluate(model, url, generates(texts), chats=True, **more)
    assert len(found) == len(texts), found


def completions(name: str, url: str = c.URL, **more: Any) -> Any:
    more = {"tokenizer": c.SETTINGS["model_path"], **more}
    return evaluate("local-completions", f"{url}/v1/completions", name, **more)


@check("chat")
def _() -> None:
    chats(QUESTIONS)
    chats(QUESTIONS, num_concurrent=ROWS)


@check("completions")
def _() -> None:
    ways: Any = {}, {"batch_size": ROWS}, {"num_concurrent": ROWS}
    for more in ways:
        assert len(completions(generates(QUESTIONS), **more)) == ROWS
    choices: Any = {"doc_to_choice": "{{answers}}", "doc_to_target": "right"}
    name = task("multiple_choice", QUESTIONS, **choices)
    found = completions(name, batch_size=ROWS)
    chances = [chance for each in found for [[chance, _]] in each["resps"]]
    assert len(chances) == 2 * ROWS and all(chance < 0 for chance in chances), found


def in_one_list(texts: list[str], url: str) -> None:
    completions(generates(texts), url, batch_size=len(texts))


def in_lists_of_one(texts: list[str], url: str) -> None:
    completions(generates(texts), url, num_concurrent=64)


def side_by_side(texts: list[str], url: str) -> None:
    chats(texts, url, num_concurrent=64)


c.check_plan(in_one_list)
c.check_plan(in_lists_of_one)
c.check_plan(side_by_side)
c.report("lm_eval")
