"""The decode loop: how rows are asked, end and fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_runs import Run, generated, greedy, prompts
from tiny_models import MAX_POSITIONS, VOCAB, tiny_model
from transformers import AutoTokenizer

from sglang_batch.dense.model import LoadedModel, ModelOptions, load_model, wrap
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    LogprobsWanted,
    Sampling,
    Stopping,
)
from sglang_batch.dense.rows import SeparateRows

# A token that no greedy answer of these tests has.
BROKEN = 251
SETTINGS = DenseSettings(max_rows=4, shortest_shared=4)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> LoadedModel:
    return load_model(ModelOptions(str(demo_model), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def broken() -> LoadedModel:
    """Its embedding of one token is NaN, as after a broken download."""
    plain = tiny_model("llama")
    with torch.no_grad():
        plain.get_input_embeddings().weight[BROKEN] = torch.nan
    return wrap(plain)


def only(run: Run, request: DenseRequest) -> DenseAnswer:
    """The answer to a request that runs alone."""
    return run.add([request]).finish()[request.rid]


def others(count: int = 3, answer: int = 12) -> list[DenseRequest]:
    return [
        greedy(f"other-{number}", ids, answer)
        for number, ids in enumerate(prompts(count, seed=50))
    ]


def expected(model: LoadedModel, requests: Sequence[DenseRequest]) -> dict[str, Any]:
    return {
        request.rid: generated(
            model, request.input_ids, request.stopping.max_new_tokens
        )
        for request in requests
    }


class TestEnding:
    def test_an_ending_token_is_the_last_and_named(self, model: LoadedModel) -> None:
        (ids,) = prompts(1)
        full = generated(model, ids, 30)
        end = full[9]
        stopping = Stopping(30, token_ids=frozenset([end]))
        answer = only(Run(model, SETTINGS), DenseRequest("a", ids, stopping))
        assert list(answer.output_ids) == full[: full.index(end) + 1]
        assert (answer.reason, answer.matched) == ("stop", end)

    def test_the_end_of_the_model_counts_unless_it_is_ignored(self) -> None:
        plain = tiny_model("gpt2")
        (ids,) = prompts(1)
        full = generated(wrap(plain), ids, 20)
        plain.generation_config.eos_token_id = [full[5], 299]
        model = wrap(plain)
        run = Run(model, SETTINGS).add(
            [
                DenseRequest("ends", ids, Stopping(20)),
                DenseRequest("goes on", ids, Stopping(20, ignore_eos=True)),
            ]
        )
        answers = run.finish()
        assert list(answers["ends"].output_ids) == full[: full.index(full[5]) + 1]
        assert answers["ends"].matched == full[5]
        assert list(answers["goes on"].output_ids) == full
        assert answers["goes on"].reason == "length"

    def test_no_ending_token_comes_before_the_least_number(
        self, model: LoadedModel
    ) -> None:
        (ids,) = prompts(1)
        end = generated(model, ids, 1)[0]
        early = Stopping(30, token_ids=frozenset([end]))
        late = Stopping(30, min_new_tokens=8, token_ids=frozenset([end]))
        run = Run(model, SETTINGS).add(
            [DenseRequest("early", ids, early), DenseRequest("late", ids, late)]
        )
        answers = run.finish()
        assert list(answers["early"].output_ids) == [end]
        assert len(answers["late"].output_ids) >= 9 or (
            end not in answers["late"].output_ids
        )
        assert end not in list(answers["late"].output_ids)[:8]

    def test_a_stop_string_ends_the_answer_once_its_text_has_it(
        self, demo: LoadedModel, tokenizer: Any
    ) -> None:
        (ids,) = prompts(1, seed=4)
        full = generated(demo, ids, 40)
        text = tokenizer.decode(full)
        start = next(
            place for place in range(8, len(text) - 2)
            if text[place : place + 2].isascii()
        )  # fmt: skip
        string = text[start : start + 2]
        stopping = Stopping(40, ignore_eos=True, strings=(string,))
        run = Run(demo, SETTINGS, tokenizer=tokenizer)
        answer = only(run, DenseRequest("a", ids, stopping))
        assert (answer.reason, answer.matched) == ("stop", string)
        found = list(answer.output_ids)
        assert found == full[: len(found)]
        assert string in tokenizer.decode(found)
        assert string not in tokenizer.decode(found[:-1])

    def test_a_regex_ends_the_answer(self, demo: LoadedModel, tokenizer: Any) -> None:
        (ids,) = prompts(1, seed=4)
        stopping = Stopping(200, ignore_eos=True, regexes=("[A-Z]",))
        run = Run(demo, SETTINGS, tokenizer=tokenizer)
        answer = only(run, DenseRequest("a", ids, stopping))
        assert answer.reason == "stop"
        assert answer.matched == "[A-Z]"
        assert tokenizer.decode(list(answer.output_ids)[-1:]).isupper()

    def test_the_context_ends_an_answer(self, model: LoadedModel) -> None:
        (ids,) = prompts(1, shortest=MAX_POSITIONS - 6, longest=MAX_POSITIONS - 6)
        run = Run(model, SETTINGS).add([greedy("a", ids, 50), *others()])
        answers = run.finish()
        assert len(answers["a"].output_ids) == 6
        assert answers["a"].reason == "length"
        assert list(answers["a"].output_ids) == generated(model, ids, 6)

    def test_one_token_needs_no_step(self, model: LoadedModel) -> None:
        # More requests than rows, so that some wait when none runs.
        all_ids = prompts(9)
        requests = [greedy(str(place), ids, 1) for place, ids in enumerate(all_ids)]
        run = Run(model, SETTINGS).add(requests)
        run.finish()
        assert run.tokens() == expected(model, requests)
        assert run.loop.counts.steps == 0


class TestSeeds:
    def request(self, rid: str, seed: int | None) -> DenseRequest:
        (ids,) = prompts(1, seed=1)
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        return DenseRequest(rid, ids, Stopping(25, ignore_eos=True), sampling)

    def test_a_seed_gives_the_same_tokens_alone_and_among_others(
        self, model: LoadedModel
    ) -> None:
        alone = only(Run(model, SETTINGS), self.request("a", 11)).output_ids
        run = Run(model, SETTINGS).add(others(2)).steps(3)
        run.add([self.request("a", 11), self.request("b", 12), *others(5)[2:]])
        answers = run.finish()
        assert answers["a"].output_ids == alone
        assert answers["b"].output_ids != alone

    def test_a_seed_gives_the_same_tokens_after_a_preemption(
        self, model: LoadedModel
    ) -> None:
        alone = only(Run(model, SETTINGS), self.request("a", 11)).output_ids
        for host_cells in (1 << 20, 0):
            settings = DenseSettings(max_rows=1, host_cells=host_cells)
            run = Run(model, settings).add([self.request("a", 11)]).steps(6)
            run.add([greedy("high", [5, 6, 7], 4, priority=1)])
            assert run.finish()["a"].output_ids == alone
            assert run.loop.counts.preempted == 1

    def test_rows_without_a_seed_differ_and_runs_of_one_engine_seed_agree(
        self, model: LoadedModel
    ) -> None:
        found = []
        for seed in (0, 0, 1):
            settings = DenseSettings(max_rows=4, seed=seed)
            run = Run(model, settings)
            run.add([self.request("a", None), self.request("b", None)]).finish()
            found.append(run.tokens())
        assert found[0] == found[1] != found[2]
        assert found[0]["a"] != found[0]["b"]


class TestGrammar:
    SCHEMA = json.dumps(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["cat", "dog"]},
                "old": {"type": "boolean"},
            },
            "required": ["kind", "old"],
            "additionalProperties": False,
        }
    )

    def test_rows_with_and_without_a_grammar_share_a_batch(
        self, demo: LoadedModel, tokenizer: Any
    ) -> None:
        free = others()
        sampling = Sampling(grammar=("json_schema", self.SCHEMA))
        bound = [
            DenseRequest(f"bound-{number}", ids, Stopping(120), sampling)
            for number, ids in enumerate(prompts(3, seed=9))
        ]
        run = Run(demo, SETTINGS, tokenizer=tokenizer)
        mixed = [each for pair in zip(free, bound, strict=True) for each in pair]
        answers = run.add(mixed).finish()
        for request in bound:
            answer = answers[request.rid]
            assert answer.reason == "stop"
            assert answer.matched in demo.eos_token_ids
            value = json.loads(tokenizer.decode(list(answer.output_ids)[:-1]))
            assert value.keys() == {"kind", "old"}
        tokens = run.tokens()
        assert {rid: tokens[rid] for rid in expected(demo, free)} == expected(
            demo, free
        )

    def test_a_grammar_goes_on_after_a_preemption(
        self, demo: LoadedModel, tokenizer: Any
    ) -> None:
        (ids,) = prompts(1, seed=9)
        sampling = Sampling(grammar=("json_schema", self.SCHEMA))
        request = DenseRequest("bound", ids, Stopping(120), sampling)
        alone = only(Run(demo, SETTINGS, tokenizer=tokenizer), request)
        settings = DenseSettings(max_rows=1, host_cells=0)
        run = Run(demo, settings, tokenizer=tokenizer).add([request]).steps(5)
        run.add([greedy("high", [5, 6, 7], 4, priority=1)])
        assert run.finish()["bound"].output_ids == alone.output_ids
        assert run.loop.counts.recomputed_tokens > 0


class TestLogprobs:
    def test_they_equal_those_of_a_forward_pass(self, model: LoadedModel) -> None:
        (ids,) = prompts(1, shortest=20, longest=20)
        wanted = LogprobsWanted(top=3, token_ids=(7, 8), prompt_from=6)
        asked = greedy("asked", ids, 10, logprobs=wanted)
        answer = Run(model, SETTINGS).add([*others(), asked]).finish()["asked"]
        whole = [*ids, *answer.output_ids]
        with torch.inference_mode():
            logits = model.model(torch.tensor([whole])).logits[0]
        direct = logits.log_softmax(-1)
        assert [each.token for each in answer.logprobs] == list(answer.output_ids)
        assert [each.token for each in answer.prompt_logprobs] == ids[6:]
        assert answer.prompt_logprobs[0].of_token is None
        at = [*enumerate(answer.prompt_logprobs[1:], 6)]
        at += [*enumerate(answer.logprobs, len(ids) - 1)]
        assert len(at) == 13 + 10
        for place, found in at:
            of = direct[place]
            assert found.of_token == pytest.approx(float(of[found.token]), abs=1e-4)
            values = [value for _, value in found.top]
            assert values == pytest.approx(of.topk(3).values.tolist(), abs=1e-4)
            assert list(found.of_ids) == pytest.approx(of[[7, 8]].tolist(), abs=1e-4)

    def test_they_survive_a_preemption(self, model: LoadedModel) -> None:
        (ids,) = prompts(1, shortest=20, longest=20)
        asked = greedy("a", ids, 12, logprobs=LogprobsWanted(top=1, prompt_from=0))
        alone = only(Run(model, SETTINGS), asked)
        settings = DenseSettings(max_rows=1, host_cells=0)
        run = Run(model, settings).add([asked]).steps(4)
        answer = run.add([greedy("high", [5, 6], 3, priority=1)]).finish()["a"]
        assert answer.output_ids == alone.output_ids
        for name in ("logprobs", "prompt_logprobs"):
            found, before = getattr(answer, name), getattr(alone, name)
            assert len(found) == len(before)
            for one, other in zip(found, before, strict=True):
                assert one.of_token == pytest.approx(other.of_token, abs=1e-4)

    @pytest.mark.parametrize("begin", [19, 20, 500])
    def test_they_may_begin_at_or_behind_the_last_token_of_the_prompt(
        self, model: LoadedModel, begin: int
    ) -> None:
        (ids,) = prompts(1, shortest=20, longest=20)
        wanted = LogprobsWanted(prompt_from=begin)
        run = Run(model, SETTINGS).add([greedy("a", ids, 3, logprobs=wanted)])
        answer = run.add(others()).finish()["a"]
        assert answer.error is None
        assert [each.token for each in answer.prompt_logprobs] == ids[begin:]

    def test_cached_tokens_are_those_computed_for_another(
        self, model: LoadedModel
    ) -> None:
        stem, *leaves = prompts(4, seed=2, shortest=10, longest=10)
        requests = [
            greedy(str(place), [*stem, *leaf], 4, place=place)
            for place, leaf in enumerate(leaves)
        ]
        run = Run(model, SETTINGS).add(requests)
        answers = run.finish()
        # The stem was computed for the first.
        assert [answers[str(place)].cached_tokens for place in range(3)] == [0, 10, 10]
        assert run.rows.computed_tokens == 40


BAD = {
    "no tokens": DenseRequest("bad", [], Stopping(4)),
    "context": DenseRequest("bad", [5] * MAX_POSITIONS, Stopping(4)),
    "regex": DenseRequest("bad", [5], Stopping(4, regexes=("(",))),
    "tokenizer": DenseRequest("bad", [5], Stopping(4, strings=("a",))),
    "grammar": DenseRequest("bad", [5], Stopping(4), Sampling(grammar=("ebnf", "x"))),
    f"{VOCAB}": DenseRequest("bad", [5, VOCAB, 6], Stopping(4)),
    "-1": DenseRequest("bad", [5, -1, 6], Stopping(4)),
    "token 300": DenseRequest(
        "bad", [5, 6], Stopping(4), logprobs=LogprobsWanted(token_ids=(VOCAB,))
    ),
}


@pytest.mark.parametrize("named", BAD)
def test_a_request_that_cannot_run_is_the_only_one_with_an_error(
    model: LoadedModel, named: str
) -> None:
    good = others()
    run = Run(model, SETTINGS).add([good[0], BAD[named], *good[1:]])
    answers = run.finish()
    bad = answers.pop("bad")
    assert bad.reason == "abort"
    assert bad.error is not None
    assert named in bad.error
    assert list(bad.output_ids) == []
    assert all(answer.error is None for answer in answers.values())
    tokens = run.tokens()
    assert {rid: tokens[rid] for rid in answers} == expected(model, good)


@pytest.mark.parametrize(
    "grammar",
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("regex", "("),
        ("ebnf", "root ::="),
        ("structural_tag", "[]"),
        ("unknown", "a"),
    ],
    ids=lambda grammar: f"{grammar[0]}-{len(grammar[1])}",
)
def test_an_invalid_grammar_is_an_error_of_its_request_alone(
    demo: LoadedModel, tokenizer: Any, grammar: tuple[str, str]
) -> None:
    good = others(2)
    bad = DenseRequest("bad", [5], Stopping(4), Sampling(grammar=grammar))
    run = Run(demo, SETTINGS, tokenizer=tokenizer).add([bad, *good])
    answers = run.finish()
    assert answers["bad"].error
    tokens = run.tokens()
    assert {each.rid: tokens[each.rid] for each in good} == expected(demo, good)


def test_a_row_that_no_token_is_allowed_for_fails_alone(
    demo: LoadedModel, tokenizer: Any
) -> None:
    end = next(iter(demo.eos_token_ids))
    never = Sampling(grammar=("regex", "a"), logit_bias={ord("a"): float("-inf")})
    bad = DenseRequest("bad", [5, 6], Stopping(9), never)
    good = others(2)
    run = Run(demo, SETTINGS, tokenizer=tokenizer).add([bad, *good])
    answers = run.finish()
    assert "loosen" in str(answers["bad"].error)
    assert end not in answers["bad"].output_ids
    tokens = run.tokens()
    assert {each.rid: tokens[each.rid] for each in good} == expected(demo, good)


class TestRowsThatAreNotFinite:
    """The broken model, whose input embedding of one token is NaN."""

    def test_a_prompt_with_the_token_fails_and_no_other(
        self, broken: LoadedModel
    ) -> None:
        good = others(5)
        bad = greedy("bad", [*prompts(1)[0], BROKEN, 5], 6, place=-1)
        run = Run(broken, SETTINGS).add([*good[:2], bad, *good[2:]])
        answers = run.finish()
        assert "NaN" in str(answers.pop("bad").error)
        tokens = run.tokens()
        assert {rid: tokens[rid] for rid in answers} == expected(broken, good)

    @pytest.mark.parametrize("place", [0, 1, 3])
    def test_a_row_that_breaks_while_it_runs_fails_and_no_other(
        self, broken: LoadedModel, place: int
    ) -> None:
        good = [
            greedy(f"good-{number}", ids, 20)
            for number, ids in enumerate(prompts(3, seed=50, shortest=30))
        ]
        (ids,) = prompts(1, seed=77, shortest=60, longest=60)
        bad = DenseRequest(
            "bad", ids, Stopping(30, ignore_eos=True),
            Sampling(logit_bias={BROKEN: 1e4}),
        )  # fmt: skip
        mixed = [*good[:place], bad, *good[place:]]
        run = Run(broken, SETTINGS).add(mixed)
        run.steps(3)
        failed = run.answers["bad"]
        assert "NaN" in str(failed.error)
        assert list(failed.output_ids) == [BROKEN]
        # Shorter than the steps since: a dead cell of theirs is where the NaN was.
        later = [
            greedy(f"later-{number}", ids, 10)
            for number, ids in enumerate(prompts(2, seed=5, shortest=2, longest=4))
        ]
        run.steps(8).add(later).finish()
        tokens = run.tokens()
        del tokens["bad"]
        assert tokens == expected(broken, [*good, *later])


class TestAborts:
    def test_a_request_may_be_aborted_wherever_it_is(self, model: LoadedModel) -> None:
        settings = DenseSettings(max_rows=2)
        first, second, third, fourth = (
            greedy(name, ids, 30)
            for name, ids in zip("abcd", prompts(4, seed=6), strict=True)
        )
        run = Run(model, settings).add([first, second, third, fourth]).steps(4)
        high = [greedy("high", [9, 8, 7], 8, priority=1)]
        run.add(high).steps(2)
        (preempted,) = {"a", "b"} - set(run.loop.running())
        (running,) = {"a", "b"} & set(run.loop.running())
        for rid in (preempted, "c", running, "unknown"):
            run.loop.abort(rid)
        for rid in (preempted, "c", running):
            assert run.answers[rid].reason == "abort"
            assert run.answers[rid].error == "The request was aborted."
        assert len(run.answers[running].output_ids) == 7
        assert len(run.answers[preempted].output_ids) == 5
        # Its prompt was computed with the first two.
        assert len(run.answers["c"].output_ids) == 1
        run.finish()
        tokens = run.tokens()
        left = expected(model, [fourth, *high])
        assert {rid: tokens[rid] for rid in left} == left
        assert run.rows.allocated_cells == 0
        run.loop.abort("d")  # it has ended

    def test_an_aborted_row_gives_its_host_memory_back(
        self, model: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=1, host_cells=40)
        run = Run(model, settings)
        for number, ids in enumerate(prompts(3, shortest=25, longest=25)):
            run.add([greedy(f"low-{number}", ids, 30)]).steps(3)
            run.add([greedy(f"high-{number}", [4, 5], 2, priority=1)]).steps(1)
            run.loop.abort(f"low-{number}")
            run.finish()
        assert run.loop.counts.preempted == 3
        assert run.loop.counts.recomputed_tokens == 0


def test_a_row_that_a_limit_makes_too_long_is_told_so(model: LoadedModel) -> None:
    settings = DenseSettings(max_rows=4, max_cells=30)
    (ids,) = prompts(1, shortest=30, longest=30)
    good = [greedy("good", [5, 6, 7], 10)]
    run = Run(model, settings).add([greedy("long", ids, 5), *good])
    answers = run.finish()
    assert "31 tokens do not fit into the 30 cells" in str(answers["long"].error)
    assert list(answers["good"].output_ids) == generated(model, [5, 6, 7], 10)


def test_prompt_logprobs_of_an_encoder_are_refused_or_empty() -> None:
    model = wrap(tiny_model("mbart", encoder_decoder=True))
    asked = greedy("asked", [5, 6, 7, 8], 4, logprobs=LogprobsWanted(prompt_from=0))
    good = greedy("good", [9, 8, 7], 4)
    run = Run(model, SETTINGS, rows=SeparateRows(model)).add([asked, good])
    answers = run.finish()
    assert answers["asked"].error or not answers["asked"].prompt_logprobs
    assert list(answers["good"].output_ids) == generated(model, [9, 8, 7], 4)


@pytest.mark.parametrize("apart", [False, True])
def test_penalties_and_least_lengths_do_not_depend_on_company(
    demo: LoadedModel, apart: bool
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {40: 2.0, 41: -2.0}},
    ]
    requests = [
        DenseRequest(
            f"line-{i}",
            ids,
            Stopping(10 + 3 * i, min_new_tokens=i),
            sampling=Sampling(temperature=0.0, **kinds[i % len(kinds)]),
        )
        for i, ids in enumerate(prompts(12, seed=8))
    ]

    def run() -> Run:
        rows = SeparateRows(demo) if apart else None
        return Run(demo, SETTINGS, rows=rows)

    alone = {each.rid: list(only(run(), each).output_ids) for each in requests}
    assert len({tuple(ids) for ids in alone.values()}) > 10
    # Rows join where others end, and half of them while others run.
    together = run().add(requests[::2]).steps(7).add(requests[1::2])
    together.finish()
    assert together.tokens() == alone
