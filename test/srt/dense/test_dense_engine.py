"""SGLang's answers from dense batches, against ``generate`` of transformers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from forked_children import command

from sglang_batch.dense.admission import MAX_TICKS, ByLength
from sglang_batch.job.engine import GENERATE_URL
from sglang_batch.planner.kv_lengths.batch_state import TREE
from sglang_batch.request import (
    BatchRequestInput,
    Cuts,
    RequestOutput,
    engine_request_id,
)
from sglang_batch.run.backend_options import transformers_engine
from sglang_batch.scheduling.job_plan import JobPlan, unplanned
from sglang_batch.srt.dense.engine import DenseEngine, OpenPlans, why_not_sglang

# SGLang answers errors with a class that its web framework wants to drop.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Generated = Callable[[list[int], int], list[int]]
Engine = tuple[DenseEngine, asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def neo_engine(neo_model: Path) -> Iterator[Engine]:
    argv = ["--model-path", str(neo_model), "--dtype=float32", "--device=cpu"]
    _, start = transformers_engine(argv)
    with start() as (engine, loop):
        loop.run_until_complete(engine.connect())
        yield engine, loop


def answers(
    served: Engine, *bodies: dict[str, Any], url: str = COMPLETIONS
) -> list[RequestOutput]:
    """The outputs of requests that run together."""
    engine, loop = served

    async def one(index: int, body: dict[str, Any]) -> RequestOutput:
        request = BatchRequestInput(index, str(index), url, json.dumps(body).encode())
        rid = engine_request_id(f"batch_{next(_jobs)}", index)
        prepared = await engine.prepare(request, rid, tokenize=True)
        if isinstance(prepared, RequestOutput):
            return prepared
        return await engine.execute(prepared)

    async def every() -> list[RequestOutput]:
        return await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies)))

    return loop.run_until_complete(every())


def _numbers() -> Iterator[int]:
    yield from range(1_000_000)


_jobs = _numbers()


def body_of(output: RequestOutput) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(output.body)
    return body


def test_greedy_tokens_are_those_of_generate(
    neo_engine: Engine, generated: Generated
) -> None:
    prompts = [[7 + i, 50, 91 + i, *range(60, 60 + 3 * i)] for i in range(5)]
    sampling = {"max_new_tokens": 11, "temperature": 0}
    asked = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]
    outputs = answers(neo_engine, *asked, url=GENERATE_URL)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generated(prompt, 11)
        assert body_of(output)["output_ids"] == expected
        assert output.usage.input_tokens == len(prompt)
        assert output.usage.output_tokens == len(expected)


def test_a_chat_has_the_models_template_and_its_logprobs(
    neo_engine: Engine, reference: Any, generated: Generated
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (output,) = answers(
        neo_engine,
        {
            "messages": messages,
            "max_completion_tokens": 6,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        },
        url=CHAT,
    )
    tokenizer = neo_engine[0].manager.tokenizer
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    expected = generated(prompt, 6)
    assert output.ok, output.body
    content = body_of(output)["choices"][0]["logprobs"]["content"]
    assert len(content) == len(expected)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + expected])).logits[0].double()
    for i, (token, found) in enumerate(zip(expected, content, strict=True)):
        at = torch.log_softmax(logits[len(prompt) - 1 + i], -1)
        assert found["logprob"] == pytest.approx(float(at[token]), abs=1e-3)
        top = [each["logprob"] for each in found["top_logprobs"]]
        assert top == pytest.approx(at.topk(2).values.tolist(), abs=1e-3)


def test_an_echoed_prompt_has_the_logprobs_of_its_tokens(
    neo_engine: Engine, reference: Any
) -> None:
    prompt = [80, 81, 99, 104]
    (output,) = answers(
        neo_engine,
        {
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        },
    )
    found = body_of(output)["choices"][0]["logprobs"]["token_logprobs"]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0].double()
    each = torch.log_softmax(logits, -1)
    expected = [float(each[i, prompt[i + 1]]) for i in range(3)]
    assert found[0] == 0.0  # the clients' types have no null there
    assert found[1:4] == pytest.approx(expected, abs=1e-3)
    assert len(found) == 6


def test_scores_are_the_probabilities_of_the_token_that_is_dropped(
    neo_engine: Engine, reference: Any
) -> None:
    query, items, labels = [80, 81], [[99], [104, 60]], [70, 71, 200]
    body = {"query": query, "items": items, "label_token_ids": labels}
    (output,) = answers(neo_engine, body, url="/v1/score")
    assert output.ok, output.body
    assert output.cuts == Cuts()  # no answer is short of tokens
    with torch.no_grad():
        expected = [
            torch.softmax(reference(torch.tensor([query + item])).logits[0, -1], -1)
            for item in items
        ]
    for found, all_tokens in zip(body_of(output)["scores"], expected, strict=True):
        assert found == pytest.approx(all_tokens[labels].tolist(), rel=1e-3)
    # A prompt alone has no answer, and none is counted.
    nothing = {"input_ids": query, "sampling_params": {"max_new_tokens": 0}}
    (output,) = answers(neo_engine, nothing, url=GENERATE_URL)
    assert body_of(output)["output_ids"] == [] and output.usage.output_tokens == 0


def test_samples_of_one_seed_differ_and_are_the_same_again(neo_engine: Engine) -> None:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 1.0, "n": 3, "seed": 5}
    first, second = answers(neo_engine, body, body)
    texts = [choice["text"] for choice in body_of(first)["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in body_of(second)["choices"]]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (COMPLETIONS, {"max_tokens": 2}),
        (COMPLETIONS, {"max_tokens": 2, "n": 3}),
        (GENERATE_URL, {"sampling_params": {"max_new_tokens": 2}}),
        (GENERATE_URL, {"sampling_params": {"max_new_tokens": 2, "n": 3}}),
    ],
)
def test_prompts_are_computed_or_cached(
    neo_engine: Engine, url: str, fields: dict[str, Any]
) -> None:
    chance = np.random.default_rng(len(str(fields)) + len(url))
    shared = chance.integers(60, 100, 80).tolist()
    unlike = [[60 + i, *chance.integers(60, 100, 90).tolist()] for i in range(4)]
    alike = [[*shared, *chance.integers(60, 100, 20).tolist()] for _ in range(4)]
    for prompts, most in ((unlike, 0), (alike, 3 * 85)):
        name = "input_ids" if url == GENERATE_URL else "prompt"
        found = [
            output.usage
            for output in answers(
                neo_engine, *({name: ids, **fields} for ids in prompts), url=url
            )
        ]
        assert [usage.input_tokens for usage in found] == [len(ids) for ids in prompts]
        assert sum(usage.cached_tokens for usage in found) <= most


def test_a_stop_string_ends_an_answer_and_is_not_in_it(
    neo_engine: Engine, generated: Generated
) -> None:
    tokenizer = neo_engine[0].manager.tokenizer
    for start in range(60, 100):  # an answer of plain letters only
        text = tokenizer.decode(generated([start, 70], 10))
        if text.isascii() and text.isprintable() and len(text) == 10:
            break
    stop = text[4:6]
    (output,) = answers(
        neo_engine,
        {"prompt": [start, 70], "max_tokens": 10, "temperature": 0, "stop": stop},
    )
    choice = body_of(output)["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)


def test_a_stop_rule_ends_an_answer_within_its_last_token(neo_engine: Engine) -> None:
    body = {"prompt": [60, 70], "max_tokens": 60, "temperature": 0}
    number = {"regex": "-[1-9][0-9] [a-z]{50}", "stop_rules": {"json": True}}
    (output,) = answers(neo_engine, {**body, **number})
    choice = body_of(output)["choices"][0]
    assert re.fullmatch("-[0-9]{2}", choice["text"])
    assert (choice["finish_reason"], choice["matched_stop"]) == (
        "stop", "stop_rules.json"
    )  # fmt: skip
    assert output.cuts == Cuts(json=1)
    (output,) = answers(neo_engine, {**body, "stop_rules": {"regex": "("}})
    assert output.status_code == 400
    assert body_of(output)["error"]["param"] == "body.stop_rules"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [9] * 300, "max_tokens": 1}, "context length"),
        ({"prompt": "a", "max_tokens": 1, "custom_logit_processor": "x"}, "logit"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_reason(
    neo_engine: Engine, body: dict[str, Any], said: str
) -> None:
    (output,) = answers(neo_engine, body)
    assert output.status_code == 400
    assert said in body_of(output)["error"]["message"]


def test_a_cancelled_request_leaves_the_engine(neo_engine: Engine) -> None:
    engine, loop = neo_engine

    async def cancelled() -> dict[str, float]:
        body = {"prompt": "a", "max_tokens": 240, "ignore_eos": True}
        request = BatchRequestInput(0, "x", COMPLETIONS, json.dumps(body).encode())
        prepared = await engine.prepare(request, "batch_c-00000000", tokenize=True)
        assert not isinstance(prepared, RequestOutput)
        task = asyncio.ensure_future(engine.execute(prepared))
        while not await engine.running_s():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if not (running := await engine.running_s()):
                break
            await asyncio.sleep(0.01)
        return running

    assert loop.run_until_complete(cancelled()) == {}
    assert not engine.manager.rid_to_state
    (after,) = answers(neo_engine, {"prompt": "b", "max_tokens": 2})
    assert after.ok


def planned(neo_engine: Engine, numbers: list[int], positions: list[int]) -> JobPlan:
    n = len(numbers)
    return replace(
        unplanned(neo_engine[0].machine),
        number=np.array(numbers, np.int32),
        position=np.array(positions, np.int32),
        est_decode_steps=np.arange(n, dtype=np.float32) * 10,
    )


def test_requests_have_the_places_and_lengths_of_their_jobs_plan(
    neo_engine: Engine,
) -> None:
    plans = OpenPlans()
    plans.open("batch_j", planned(neo_engine, [2, 0], [1, 0]))
    plans.prioritize("batch_j", 4)
    assert plans.of("batch_j-00000002") == (1, 4, 1, None)
    assert plans.of("batch_j-00000000.000001") == (0, 4, 11, None)
    assert plans.of("batch_j-00000001") == (1, 4, None, None)  # in no plan
    plans.close("batch_j")
    assert plans.of("batch_j-00000002") == (2, 0, None, None)


@pytest.mark.parametrize(("limit", "ticks"), [(None, MAX_TICKS), (7, 7)])
def test_requests_join_by_length_as_their_plan_says(
    neo_engine: Engine, limit: int | None, ticks: int
) -> None:
    plan = replace(
        planned(neo_engine, [0], [0]),
        length_rule=TREE,
        length_key=np.array([5], np.int32),
        family=np.array([-1], np.int32),
        max_wait_steps=limit,
    )
    plans = OpenPlans()
    plans.open("batch_j", plan)
    assert plans.of("batch_j-00000000")[3] == ByLength(TREE, 5, -1, ticks)


def test_the_machine_has_the_engines_limits(neo_engine: Engine) -> None:
    limits = neo_engine[0].machine.limits
    assert limits.max_running == neo_engine[0].max_running_requests == 32
    assert limits.kv_capacity_tokens == 32 * 256


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return preloaded.run(command("cli_main", "run", *map(str, options)))


@pytest.mark.parametrize(
    "kind, said",
    [
        ("LlamaForCausalLM", None),
        ("BertModel", None),
        ("GPTNeoForCausalLM", "SGLang has no GPTNeoForCausalLM, and cannot run that"),
        ("DistilBertModel", "SGLang has no DistilBertModel, and DistilBertModel does"),
    ],
)
def test_auto_says_why_it_does_not_take_sglang(
    tmp_path: Path, kind: str, said: str | None
) -> None:
    import transformers

    config = getattr(transformers, kind).config_class(architectures=[kind])
    config.save_pretrained(tmp_path)
    reason = why_not_sglang(str(tmp_path))
    assert reason is None if said is None else str(reason).startswith(said)


def test_auto_runs_what_sglang_cannot_and_a_second_run_has_nothing_to_do(
    neo_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ["hello", "hello there", "good morning"]
    lines = [
        {
            "custom_id": text,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": text}],
                "max_completion_tokens": 5 + i,
                "temperature": 0,
                "logprobs": True,
            },
        }
        for i, text in enumerate(texts)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["-i", source, "-o", output, "--backend", "auto", "--device=cpu"]
    options += ["--model-path", neo_model, "--dtype=float32"]
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert "--backend transformers: SGLang has no GPTNeoForCausalLM" in done.stderr

    model: Any = AutoModelForCausalLM.from_pretrained(neo_model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(neo_model)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == texts
    for i, line in enumerate(found):
        prompt = tokenizer.apply_chat_template(
            lines[i]["body"]["messages"],  # type: ignore[index]
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**prompt, max_new_tokens=5 + i, do_sample=False)[0]
        expected = ids[prompt["input_ids"].shape[1] :].tolist()
        choice = line["response"]["body"]["choices"][0]
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert tokens == tokenizer.batch_decode([[token] for token in expected])

    again = run(*options)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stderr


def test_a_killed_run_is_continued_by_the_same_command(
    neo_model: Path, tmp_path: Path
) -> None:
    count = 3000
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    source.write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {"prompt": f"line {number}", **body},
                }
            )
            + "\n"
            for number in range(count)
        )
    )
    options = ["-i", source, "-o", output, "--backend", "transformers"]
    options += ["--model-path", neo_model, "--dtype=float32", "--device=cpu"]
    log = Path(f"{output}.job") / "results.jsonl"
    process = preloaded.Popen(
        command("cli_main", "run", *map(str, options)), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size > 10_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not output.exists()

    again = run(*options)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["completed"] == count
    assert 0 < summary["this_run"]["completed"] < count
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [str(n) for n in range(count)]
