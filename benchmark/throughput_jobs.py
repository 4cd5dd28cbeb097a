"""The five jobs that engines are compared on.

All prompts are token ids of the demo model's bytes, 0 to 255, drawn with a seed.
Decoding is greedy. Requests are shuffled, so siblings are far apart in the input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.prediction.workloads.traces import read_trace

NUM_IDS = 256
CHUNK = 512
TRACE_SCALE = 16
"""Lengths of the trace over lengths here; a block of 512 tokens becomes one of 32."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ThroughputJob:
    """Requests, and the arguments that every engine gets for them.

    output_len: tokens that each request really generates. None if it is its
        ``max_new_tokens``.
    """

    name: str
    prompts: list[list[int]]
    sampling_params: list[dict[str, Any]]
    kv_tokens: int
    max_running: int
    context_len: int | None = None
    output_len: list[int] | None = field(default=None)

    @property
    def server_arguments(self) -> list[str]:
        arguments = [
            "--dtype=float32",
            "--mem-fraction-static=0.8",
            f"--max-total-tokens={self.kv_tokens}",
            f"--max-running-requests={self.max_running}",
            f"--chunked-prefill-size={CHUNK}",
        ]
        if self.context_len is not None:
            override = json.dumps({"max_position_embeddings": self.context_len})
            arguments.append(f"--json-model-override-args={override}")
        return arguments

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_lens(self) -> list[int]:
        """Tokens that each request generates."""
        if self.output_len is not None:
            return self.output_len
        return [params["max_new_tokens"] for params in self.sampling_params]

    def tree(self) -> PrefixTree:
        """The prefix tree of all prompts."""
        return tree_of(self.prompts)


def tree_of(prompts: Sequence[Sequence[int] | Tokens]) -> PrefixTree:
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return build_prefix_tree(np.concatenate(prompts).astype(np.int32), offsets)


def groups(
    number: int, num_groups: int, shared: int, own: int, output: int,
    kv_tokens: int, max_running: int, seed: int, siblings: int = 8,
) -> ThroughputJob:  # fmt: skip
    """Groups of siblings, each with one prefix."""
    rng = np.random.default_rng([seed, number])
    prompts = []
    for _ in range(num_groups):
        prefix = _draw(rng, shared)
        prompts += [np.append(prefix, _draw(rng, own)) for _ in range(siblings)]
    rng.shuffle(prompts)
    return ThroughputJob(
        f"{number} groups {num_groups} x {siblings}, {shared}+{own}->{output}",
        [prompt.tolist() for prompt in prompts],
        [exactly(output)] * len(prompts),
        kv_tokens,
        max_running,
    )


def two_levels(
    seed: int, num_systems: int = 8, num_documents: int = 6
) -> ThroughputJob:
    """System prompt, document, question: synthetic, with the shape of a trace's job."""
    rng = np.random.default_rng([seed, 4])
    prompts, outputs = [], []
    for _ in range(num_systems):
        system = _draw(rng, int(rng.integers(32, 256)))
        for _ in range(num_documents):
            document = _draw(rng, int(rng.integers(256, 1024)))
            for _ in range(int(rng.integers(1, 9))):
                question = _draw(rng, int(rng.integers(16, 64)))
                prompts.append(np.concatenate([system, document, question]))
                outputs.append(int(rng.integers(4, 40)))
    return _two_level_job("4 two levels, synthetic", prompts, outputs, rng)


def from_trace(
    path: Path, seed: int, num_read: int = 4000, num_requests: int = 200
) -> ThroughputJob:
    """A part of a trace with prefixes, all lengths divided by ``TRACE_SCALE``.

    The part is one window of the depth-first order of the first ``num_read`` requests:
    whole families, so that it shares prefixes like the trace.
    """
    workload = read_trace(path, limit=num_read, seed=seed)
    requests = workload.requests
    # Every 16th token: equal prefixes stay equal, a whole block at a time.
    scaled = [
        requests.tokens[begin:end:TRACE_SCALE] % NUM_IDS
        for begin, end in zip(requests.offsets, requests.offsets[1:], strict=False)
    ]
    rng = np.random.default_rng([seed, 4])
    order = tree_of(scaled).order
    begin = int(rng.integers(max(len(order) - num_requests, 0) + 1))
    chosen = order[begin : begin + num_requests]
    return _two_level_job(
        f"4 two levels, {path.stem} / {TRACE_SCALE}",
        [scaled[index] for index in chosen],
        [max(int(workload.output_len[i]) // TRACE_SCALE, 1) for i in chosen],
        rng,
    )


def _two_level_job(
    name: str, prompts: list[Tokens], outputs: list[int], rng: np.random.Generator
) -> ThroughputJob:
    """KV for an eighth of the unique prompt tokens, but for the longest request."""
    longest = max(map(len, prompts)) + max(outputs)
    kv_tokens = max(tree_of(prompts).num_unique_tokens // 8, 2 * longest)
    order = rng.permutation(len(prompts))
    return ThroughputJob(
        name,
        [prompts[index].tolist() for index in order],
        [exactly(outputs[index]) for index in order],
        kv_tokens,
        max_running=64,
        context_len=1 << (2 * longest).bit_length(),
    )


# The blend -----------------------------------------------------------------------------

MOST_OUTPUT = 160


@dataclass(frozen=True, slots=True)
class BlendDraft:
    """Requests of the blend, more short ones than it needs, before they have stops.

    wanted: tokens that each should generate.
    is_long: whether its prompt is long and its output short, or the reverse.
    """

    prompts: list[list[int]]
    wanted: list[int]
    is_long: list[bool]

    @property
    def whole_answers(self) -> ThroughputJob:
        """The job whose answers show the tokens of each request without a stop."""
        params = [exactly(MOST_OUTPUT)] * len(self.prompts)
        return ThroughputJob("5 answers", self.prompts, params, 60_000, 64)


def blend_draft(seed: int, num_pairs: int) -> BlendDraft:
    """Two tasks in one file, each with its instructions of 16 tokens.

    Long: questions on documents, in groups of 8. A document has 192 tokens, a question
    48, and about 8 are generated. Short: 16 tokens, about 40 to 80 generated, twice as
    many requests as long ones.
    """
    rng = np.random.default_rng([seed, 5])
    requests: list[tuple[Tokens, int, bool]] = []
    ask, write = _draw(rng, 16), _draw(rng, 16)
    documents = [np.append(ask, _draw(rng, 192)) for _ in range(-(-num_pairs // 8))]
    for index in range(num_pairs):
        document = documents[index // 8]
        requests.append((np.append(document, _draw(rng, 48)), 8, True))
        for _ in range(2):
            wanted = int(rng.integers(40, 81))
            requests.append((np.append(write, _draw(rng, 16)), wanted, False))
    order = rng.permutation(len(requests))
    prompts, wanted_lens, is_long = zip(*(requests[i] for i in order), strict=True)
    return BlendDraft(
        [prompt.tolist() for prompt in prompts], list(wanted_lens), list(is_long)
    )


def blend(draft: BlendDraft, answers: list[list[int]]) -> ThroughputJob:
    """The blend whose lengths the engine cannot know: 160 declared, fewer generated.

    Each request gets one stop token: of its own answer, the last token up to the wanted
    length that is there for the first time. Requests that would stop earlier, at the
    model's end of text, are left out, and then short ones until there are as many as
    long ones.
    """
    lengths = [
        max(i + 1 for i in range(wanted) if answer[i] not in answer[:i])
        for wanted, answer in zip(draft.wanted, answers, strict=True)
    ]
    # Ids above those of bytes are the special tokens.
    usable = [
        index
        for index, (answer, length) in enumerate(zip(answers, lengths, strict=True))
        if max(answer[:length]) < NUM_IDS
    ]
    long = [index for index in usable if draft.is_long[index]]
    short = [index for index in usable if not draft.is_long[index]][: len(long)]
    chosen = sorted([*long, *short])
    params = {"max_new_tokens": MOST_OUTPUT, "temperature": 0}
    return ThroughputJob(
        f"5 blend, {len(long)} long + {len(short)} short, lengths unknown",
        [draft.prompts[index] for index in chosen],
        [
            {**params, "stop_token_ids": [answers[index][lengths[index] - 1]]}
            for index in chosen
        ],
        kv_tokens=4096,
        max_running=128,
        output_len=[lengths[index] for index in chosen],
    )


def _draw(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, NUM_IDS, length, dtype=np.int32)


def exactly(output_len: int) -> dict[str, Any]:
    """Greedy decoding of that many tokens."""
    return {"max_new_tokens": output_len, "temperature": 0, "ignore_eos": True}
