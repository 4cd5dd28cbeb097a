"""Tokens of online calls, counted by the key of the call."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from builders import run
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_batch.server.access.keys import Allowance, Caller, Role, caller_of
from sglang_batch.server.access.usage import check_limits
from sglang_batch.server.http.authorization import AccessControl, current_caller
from sglang_batch.srt.engine.request_ids import set_rid
from sglang_batch.srt.plugin.client_keys import count_online_usage


def answer(prompt: int, output: int, **fields: Any) -> dict[str, Any]:
    """An answer of SGLang's tokenizer manager."""
    report = {"prompt_tokens": prompt, "completion_tokens": output, "cached_tokens": 1}
    return {"text": "", "meta_info": report, **fields}


class Counted(Counter[str]):
    """An access control that only counts."""

    def count(self, name: str, counts: Counter[str]) -> None:
        assert name == "ann"
        self.update(counts)

    def check_tokens(self, caller: Caller) -> None:
        """As of :class:`AccessControl`."""
        check_limits(caller.allowance, {"batches": 0, "lines": 0, "tokens": 10})


def usage_of(answers: list[Any], num_samples: int = 1, take: int = 99) -> Counter[str]:
    closed = []

    async def generate(obj: Any, request: Any = None) -> AsyncGenerator[Any]:
        try:
            for each in answers:
                yield each
        finally:
            closed.append(obj)

    async def call() -> None:
        current_caller.set(caller_of("ann", Role.CLIENT))
        obj = SimpleNamespace(parallel_sample_num=num_samples)
        stream = manager.generate_request(obj)
        got = []
        async for each in stream:
            got.append(each)
            if len(got) == take:
                break
        await stream.aclose()
        assert got == answers[:take]
        assert closed == [obj]

    counted = Counted()
    manager = SimpleNamespace(generate_request=generate)
    count_online_usage(cast(Any, manager), cast(AccessControl, counted))
    run(call())
    return counted


@pytest.mark.parametrize(
    ("answers", "num_samples", "expected"),
    [
        ([answer(5, 3)], 1, (1, 5, 3)),
        # A stream repeats its counts, which grow.
        ([answer(5, 1), answer(5, 2), answer(5, 3)], 1, (1, 5, 3)),
        # Two prompts, at once and as streams.
        ([[answer(5, 3), answer(7, 2)]], 1, (1, 12, 5)),
        (
            [answer(5, 1, index=0), answer(7, 2, index=1), answer(5, 3, index=0)],
            1,
            (1, 12, 5),
        ),
        # Two samples of each of two prompts.
        ([[answer(5, 1), answer(5, 2), answer(7, 3), answer(7, 4)]], 2, (1, 12, 10)),
        # An embedding, and a call that was refused in the engine.
        ([{"meta_info": {"prompt_tokens": 4}}], 1, (1, 4, 0)),
        ([], 1, (1, 0, 0)),
    ],
)
def test_a_call_counts_as_its_usage_tells(
    answers: list[Any], num_samples: int, expected: tuple[int, int, int]
) -> None:
    used = usage_of(answers, num_samples)
    counts = (used["calls"], used["input_tokens"], used["output_tokens"])
    assert counts == expected


def test_a_stream_that_is_left_counts_as_far_as_it_came() -> None:
    used = usage_of([answer(5, 1), answer(5, 2), answer(5, 3)], take=2)
    assert (used["input_tokens"], used["output_tokens"]) == (5, 2)


def test_lines_of_batches_are_passed_on_untouched() -> None:
    made = object()
    manager = SimpleNamespace(generate_request=lambda obj, request=None: made)
    count_online_usage(cast(Any, manager), cast(AccessControl, Counted()))
    assert cast(Any, manager.generate_request)("line") is made


def test_a_request_of_a_wave_is_refused_once_tokens_are_used_up() -> None:
    async def call(tokens: int) -> None:
        caller = Caller("ann", Role.CLIENT, allowance=Allowance(tokens=tokens))
        current_caller.set(caller)
        manager.generate_request(SimpleNamespace(rid=None))

    manager = SimpleNamespace(generate_request=lambda obj, request=None: None)
    count_online_usage(cast(Any, manager), cast(AccessControl, Counted()))
    run(call(11))
    with pytest.raises(ValueError, match=r"tokens per day .* limit 10, used 10"):
        run(call(10))


@pytest.mark.parametrize(
    ("caller", "rid"),
    [
        (caller_of("ann", Role.CLIENT), None),
        (caller_of("", Role.USER), None),  # --api-key next to --admin-api-key
        (caller_of("root", Role.ADMIN), "mine"),
        (None, "mine"),  # SGLang's own
    ],
)
def test_only_an_admin_chooses_the_id_of_a_request(
    caller: Caller | None, rid: str | None
) -> None:
    class Access(Counted):
        def check_tokens(self, caller: Caller) -> None:
            """None is used."""

    def sent(obj: Any) -> Any:
        current_caller.set(caller)
        manager.generate_request(obj)
        return obj.rid

    manager: Any = SimpleNamespace(generate_request=lambda obj, request=None: None)
    count_online_usage(manager, cast(AccessControl, Access()))
    assert contextvars.Context().run(sent, GenerateReqInput(rid="mine")) == rid
    # Lines of a wave run in the task of its call.
    line: Any = GenerateReqInput(text="x")
    set_rid(line, "wave_1-00000000")
    assert contextvars.Context().run(sent, line) == "wave_1-00000000"
