"""Some of a job's requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import PROMPTS, Prompt, make_requests

from sglang_batch.planner.requests import PlanRequests


def prompts_of(requests: PlanRequests) -> list[Prompt]:
    return [
        tuple(requests.tokens[begin:end].tolist())
        for begin, end in zip(requests.offsets[:-1], requests.offsets[1:], strict=True)
    ]


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_taken_requests_are_those_asked_for(
    prompts: list[Prompt], data: st.DataObject
) -> None:
    n = len(prompts)
    requests = make_requests(prompts, list(range(5, 5 + n)), list(range(-1, n - 1)))
    assert (len(requests), prompts_of(requests)) == (n, prompts)
    wanted = data.draw(
        st.lists(st.integers(0, n - 1), max_size=n) if n else st.just([])
    )
    taken = requests.take(np.array(wanted, np.int64))
    assert len(taken) == len(wanted)
    assert prompts_of(taken) == [prompts[i] for i in wanted]
    assert taken.input_len.tolist() == [len(prompts[i]) for i in wanted]
    assert taken.max_new_tokens.tolist() == [5 + i for i in wanted]
    assert taken.known_output_len.tolist() == [i - 1 for i in wanted]
    for name in ("tokens", "offsets", "max_new_tokens", "known_output_len"):
        assert getattr(taken, name).dtype == getattr(requests, name).dtype, name


def test_taken_tokens_are_a_copy() -> None:
    requests = make_requests([(1, 2), (3,)])
    taken = requests.take(np.array([0, 1]))
    taken.tokens[:] = 9
    assert requests.tokens.tolist() == [1, 2, 3]
