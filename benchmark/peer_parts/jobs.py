"""Jobs of real text, as token ids, for any engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEMO_LINES = Path(__file__).parents[1] / "data" / "demo_requests.jsonl"
TASKS, QUESTIONS = 8, 40
# Of a group: prompts, and tokens of its prefix and of a question. A sixteenth of the lengths
# that SGLang's benchmark has by default.
GROUPS, GROUP_PROMPTS, PREFIX, QUESTION = 8, 16, 128, 8

_PRODUCTS = (
    ("Kettle K3", "kitchen"), ("Toaster T2", "kitchen"), ("Blender B7", "kitchen"),
    ("Desk lamp D4", "office"), ("Office chair C9", "office"), ("Printer P5", "office"),
    ("Tent X2", "outdoor"), ("Sleeping bag S6", "outdoor"), ("Backpack R8", "outdoor"),
)  # fmt: skip
_OPINIONS = (
    ("It works as well as on the first day and was worth the money.", "positive"),
    ("It broke after a week, and nobody answered my letters.", "negative"),
    ("Better than the one I had before, and it looks good, too.", "positive"),
    ("The manual is useless and a part was missing from the box.", "negative"),
    ("My whole family uses it every day, and we are delighted.", "positive"),
    ("It arrived late, it was scratched, and I sent it back.", "negative"),
)
_PERIODS = ("a week", "a month", "half a year", "two years")
_BUYERS = (
    "for my mother",
    "for our house",
    "as a gift",
    "on sale",
    "after long thought",
)

SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"type": "string", "enum": ["positive", "negative"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "product": {"type": "string", "maxLength": 20},
    },
    "required": ["sentiment", "stars", "product"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Prompts that are decoded greedily.

    max_tokens: of each answer.
    schema: a JSON schema that every answer follows, or None.
    shares: whether prompts have prefixes in common, beyond a few tokens.
    """

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    schema: dict[str, Any] | None = None
    shares: bool = True

    @property
    def message(self) -> str:
        """A line for the process of a peer."""
        return json.dumps(asdict(self))


def make(name: str, tokenizer: Any, limit: int | None) -> PeerJob:
    """A job by its name in ``JOBS``, of at most ``limit`` requests."""
    job: PeerJob = JOBS[name](tokenizer)
    end = limit or len(job.prompts)
    prompts, max_tokens = job.prompts[:end], job.max_tokens[:end]
    return PeerJob(name, prompts, max_tokens, job.schema, job.shares)


def _demo(tokenizer: Any) -> PeerJob:
    """The lines of the demo: six questions on each of 40 documents, shuffled."""
    bodies = [json.loads(line)["body"] for line in DEMO_LINES.open()]
    prompts = [_chat(tokenizer, body["messages"]) for body in bodies]
    return PeerJob("demo", prompts, [body["max_tokens"] for body in bodies])


def _few_shot(tokenizer: Any) -> PeerJob:
    """Eight prompts with worked examples, each with 40 questions, shuffled."""
    rng = random.Random(0)
    reviews = list(_reviews(rng, TASKS * (QUESTIONS + 6)))
    labels = ("sentiment", "room", "product", "verdict")
    prompts = []
    for task in range(TASKS):
        label, mine = labels[task % len(labels)], reviews[task::TASKS]
        shown = "\n\n".join(
            f"Review: {review['text']}\nThe {label} is: {review[label]}"
            for review in mine[:6]
        )
        rule = f"You read reviews and write the {label}, in a word or two.\n\n{shown}"
        prompts += [
            _chat(tokenizer, [_said("system", rule), _said("user", review["text"])])
            for review in mine[6:]
        ]
    rng.shuffle(prompts)
    return PeerJob("few-shot", prompts, [16] * len(prompts))


def _table(tokenizer: Any) -> PeerJob:
    """A table of reviews, of each a JSON object."""
    rule = (
        "You read reviews of products. Answer with a JSON object that has the sentiment, "
        "a number of stars from 1 to 5, and the name of the product."
    )
    reviews = _reviews(random.Random(1), 160)
    prompts = [
        _chat(tokenizer, [_said("system", rule), _said("user", review["text"])])
        for review in reviews
    ]
    return PeerJob("table", prompts, [40] * len(prompts), SCHEMA)


def _no_sharing(tokenizer: Any) -> PeerJob:
    """A document each, to be continued. They begin with different words."""
    texts: dict[str, str] = {}
    for line in DEMO_LINES.open():
        text = json.loads(line)["body"]["messages"][-1]["content"]
        document = text.rpartition("\n\n")[0].partition("\n\n")[2]
        texts.setdefault(document.split()[0], document)
    prompts = [tokenizer(text)["input_ids"] for text in texts.values()]
    return PeerJob("no sharing", prompts, [32] * len(prompts), shares=False)


def _groups(tokenizer: Any) -> PeerJob:
    """SGLang's ``generated-shared-prefix``, of random words, scaled."""
    from sglang.benchmark.datasets.generated_shared_prefix import (
        GeneratedSharedPrefixDataset,
    )

    rows = GeneratedSharedPrefixDataset(
        num_groups=GROUPS, prompts_per_group=GROUP_PROMPTS, system_prompt_len=PREFIX,
        question_len=QUESTION, output_len=16, range_ratio=1.0, seed=0, fast_prepare=True,
        send_routing_key=False, num_turns=1, ordered=False,
    ).load(tokenizer)  # fmt: skip
    prompts = [tokenizer(row.prompt)["input_ids"] for row in rows]
    return PeerJob("groups", prompts, [16] * len(prompts))


JOBS = {
    "demo": _demo, "few-shot": _few_shot, "table": _table, "no sharing": _no_sharing,
    "groups": _groups,
}  # fmt: skip


def _reviews(rng: random.Random, number: int) -> Iterator[dict[str, str]]:
    for _ in range(number):
        (product, room), (opinion, sentiment) = map(rng.choice, (_PRODUCTS, _OPINIONS))
        verdict = "buy" if sentiment == "positive" else "do not buy"
        text = (
            f"{product}: I bought it {rng.choice(_BUYERS)} and have had it for "
            f"{rng.choice(_PERIODS)}. {opinion}"
        )
        yield {
            "text": text, "product": product, "room": room, "sentiment": sentiment,
            "verdict": verdict,
        }  # fmt: skip


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
