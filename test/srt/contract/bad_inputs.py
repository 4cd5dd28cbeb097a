"""Sends bad inputs to a server, and looks whether it answers each and stays well.

    python bad_inputs.py http://127.0.0.1:30000
    python bad_inputs.py http://127.0.0.1:30000 --cases 400 --seed 1

The server has to serve a text model as ``demo``. Prints one JSON object as the last
line: how many cases there were, what became of them, and what went wrong, which should
be nothing. The exit status is 1 if something did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections import Counter
from typing import Any

import openai
from bad_lines import BODIES, CHAT, condemned_lines, line, odd_bodies
from openai import OpenAI
from openai.types import Batch

ENDED = ("completed", "failed", "cancelled", "expired")
# Names of the request classes, of which the server's schema knows the keys.
CLASSES = {
    CHAT: "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/embeddings": "EmbeddingRequest",
    "/v1/messages": "AnthropicMessagesRequest",
    "/v1/score": "ScoringRequest",
    "/v1/rerank": "V1RerankReqInput",
    "/v1/classify": "ClassifyRequest",
}
# SGLang reads these bodies itself, so its schema has no class for them.
RESPONSES_KEYS = [
    *("include", "instructions", "max_output_tokens", "metadata", "reasoning", "store"),
    *("previous_response_id", "temperature", "text", "tool_choice", "tools", "top_p"),
    *("background", "top_logprobs", "truncation", "session_id", "stop", "top_k"),
    *("frequency_penalty", "repetition_penalty", "min_p", "routed_dp_rank"),
]
# A file has no more errors listed than this.
FILE_LINES = 100
PATIENCE_S = 120


class Trial:
    """One run: batches sent, and what was wrong with what came back."""

    def __init__(self, url: str) -> None:
        self.api = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.url = url
        self.num_cases = 0
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    def keys(self, url: str) -> list[str]:
        """What SGLang takes at an endpoint, by its own schema."""
        if url not in CLASSES:
            return RESPONSES_KEYS
        with urllib.request.urlopen(f"{self.url}/openapi.json") as answer:
            schemas = json.load(answer)["components"]["schemas"]
        return list(schemas[CLASSES[url]]["properties"])

    def start(self, url: Any, content: bytes) -> Batch:
        file = self.api.files.create(file=("bad.jsonl", content), purpose="batch")
        return self.api.batches.create(
            input_file_id=file.id, endpoint=url, completion_window="24h"
        )

    def ended(self, batch: Batch) -> Batch:
        deadline = time.monotonic() + PATIENCE_S
        while batch.status not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{batch.endpoint}: {batch.status}, {batch}")
            time.sleep(0.1)
            batch = self.api.batches.retrieve(batch.id)
        return batch

    def lines(self, batch: Batch) -> list[dict[str, Any]]:
        files = (batch.output_file_id, batch.error_file_id)
        contents = [self.api.files.content(f).read() for f in files if f]
        return [json.loads(text) for data in contents for text in data.splitlines()]

    # Files that cannot run -----------------------------------------------------------

    def condemn(self, url: str, most: int, seed: int) -> list[tuple[Batch, list[str]]]:
        """Batches of bad lines alone, each with the codes that it should fail with."""
        cases = condemned_lines(url, most, seed)
        self.num_cases += len(cases)
        started = []
        for begin in range(0, len(cases), FILE_LINES):
            some = cases[begin : begin + FILE_LINES]
            content = b"\n".join(data for _, data in some)
            started.append((self.start(url, content), [code for code, _ in some]))
        return started

    def check_condemned(self, batch: Batch, codes: list[str]) -> None:
        batch = self.ended(batch)
        found = (batch.errors and batch.errors.data) or []
        by_line = {error.line: error.code for error in found}
        self.outcomes[batch.status] += len(codes)
        for number, code in enumerate(codes, start=1):
            if by_line.get(number) != code:
                self.problems.append(
                    f"{batch.endpoint} line {number}: {by_line.get(number)}, not {code}"
                )

    # Lines that ask for nonsense -----------------------------------------------------

    def ask(self, url: str, most: int, seed: int) -> tuple[Batch, dict[str, str]]:
        """A batch of odd bodies, and what is odd by custom id."""
        cases = list(odd_bodies(url, self.keys(url), most, seed))
        self.num_cases += len(cases)
        odd = {f"l{i}": what for i, (what, _) in enumerate(cases)}
        texts = [line(f"l{i}", url, body) for i, (_, body) in enumerate(cases)]
        return self.start(url, "\n".join(texts).encode()), odd

    def check_answered(self, batch: Batch, odd: dict[str, str]) -> None:
        batch = self.ended(batch)
        if batch.status != "completed":
            self.problems.append(f"{batch.endpoint} {batch.status}: {batch.errors}")
            return
        lines = self.lines(batch)
        times = Counter(item["custom_id"] for item in lines)
        for name in odd.keys() | times.keys():
            if name not in odd or times[name] != 1:
                self.problems.append(f"{batch.endpoint} {name}: {times[name]} times")
        for item in lines:
            response = item["response"]
            status = response["status_code"] if response else item["error"]["code"]
            self.outcomes[f"{batch.endpoint} {status}"] += 1
            if response is None or status >= 500:
                what = odd.get(item["custom_id"])
                said = json.dumps(response["body"] if response else item["error"])
                self.problems.append(f"{batch.endpoint} {what}: {status} {said[:200]}")

    def good_answers(self) -> list[str]:
        """What a batch of good lines is answered with."""
        prompt = [{"role": "user", "content": "Why?"}]
        body = {"model": "demo", "messages": prompt, "max_tokens": 8, "temperature": 0}
        texts = [line(f"l{i}", CHAT, json.dumps(body)) for i in range(20)]
        batch = self.ended(self.start(CHAT, "\n".join(texts).encode()))
        return [
            item["response"]["body"]["choices"][0]["message"]["content"]
            for item in self.lines(batch)
        ]


def _all(trial: Trial, share: int, seed: int) -> None:
    """Everything, about ``share`` cases for each endpoint."""
    before = trial.good_answers()
    condemned = [
        batch for url in BODIES for batch in trial.condemn(url, share // 3, seed)
    ]
    asked = [trial.ask(url, share - share // 3, seed) for url in BODIES]
    for batch, codes in condemned:
        trial.check_condemned(batch, codes)
    for batch, odd in asked:
        trial.check_answered(batch, odd)
    if trial.good_answers() != before or len(before) != 20:
        trial.problems.append("good lines are answered otherwise than before")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, help="about so many; all by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    share = args.cases // len(BODIES) if args.cases else 10**9
    trial, began = Trial(args.url), time.monotonic()
    try:
        _all(trial, share, args.seed)
    except (openai.APIConnectionError, TimeoutError) as error:
        trial.problems.append(f"the server does not answer any more: {error!r}")
    report = {
        "cases": trial.num_cases,
        "outcomes": trial.outcomes,
        "problems": trial.problems,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    return int(bool(trial.problems))


if __name__ == "__main__":
    sys.exit(main())
