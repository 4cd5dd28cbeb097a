"""Prompts of mixed lengths with shared prefixes, and what transformers answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 12
_DOCUMENTS = (
    "The tide comes in twice a day, and the harbour master writes it down. " * 6,
    "A list is a sequence; a tuple is one too, but it cannot change. " * 9,
    "Short.",
)


@dataclass(frozen=True)
class Case:
    """A prompt and the token ids that greedy decoding appends to it."""

    custom_id: str
    question: str
    prompt: str
    output_ids: list[int]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def questions(count: int) -> list[str]:
    """Questions of 10 to some 800 bytes, in an order that separates siblings."""
    return [
        f"{_DOCUMENTS[i % len(_DOCUMENTS)]}{'Why? ' * (i % 7)}Question {i}."
        for i in range(count)
    ]


def reference(model_path: Path, count: int) -> list[Case]:
    """Greedy float32 answers of ``transformers`` to rendered chat prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    cases = []
    for i, question in enumerate(questions(count)):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        input_ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        ids = output[0, input_ids.shape[1] :].tolist()
        cases.append(Case(f"case-{i}", question, prompt, ids))
    return cases
