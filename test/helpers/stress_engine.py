"""One real engine, many small jobs at once. Every answer is checked with transformers.

Answers are greedy: each token must be the one that the model gives the highest logit
after the tokens before it, so one forward pass per answer checks it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from job_names import note_name
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
)
from stress_scheduler import STATE, run_stress_scheduler_process
from transformers import AutoModelForCausalLM

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job import Job, JobOptions
from sglang_batch.request import (
    BatchRequestInput,
    RequestOutput,
    engine_request_id,
)
from sglang_batch.srt.compat.support import STATE_KEY
from sglang_batch.srt.engine import in_process
from sglang_batch.srt.engine.sglang_engine import SGLangEngine

ENDS = {257, 263}
# Two tokens this close may change places in a batch of another size.
TIE = 1e-3


class StressEngine(Engine):  # type: ignore[misc]
    run_scheduler_process_func = staticmethod(run_stress_scheduler_process)


@dataclass
class Case:
    """A prompt and its sampling."""

    prompt: list[int]
    sampling: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0, **self.sampling}
        return {"input_ids": self.prompt, "sampling_params": sampling, **self.more}


@dataclass
class RunningJob:
    """A job, and its answers so far by index."""

    name: str
    job_id: str
    cases: list[Case]
    job: Job
    answers: dict[int, RequestOutput]
    stop: asyncio.Event

    @property
    def rids(self) -> list[str]:
        return [engine_request_id(self.job_id, i) for i in range(len(self.cases))]


class Stress:
    """The engine, its event loop and the model that knows the right answers."""

    def __init__(self, engine: SGLangEngine, loop: Any, model: Path) -> None:
        self.engine = engine
        self.loop = loop
        self.manager = engine.manager
        # With SDPA, transformers leaves out caps of logits.
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self._checked: set[str] = set()
        self._counts: dict[str, Any] = {}
        self._online = 0

    def run(self, work: Any, timeout_s: float = 120.0) -> Any:
        """Run to the end, within a time limit in case the scheduler hangs."""
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    # Jobs -----------------------------------------------------------------------------

    def job(
        self,
        name: str,
        cases: list[Case],
        policy: str,
        priority: int = 0,
        **config: Any,
    ) -> Any:
        rows = [
            BatchRequestInput(i, f"line-{i}", "/generate", json.dumps(c.body).encode())
            for i, c in enumerate(cases)
        ]
        answers: dict[int, RequestOutput] = {}

        def sink(request: BatchRequestInput, output: RequestOutput) -> None:
            assert request.index not in answers, f"{request.index} was answered twice"
            answers[request.index] = output

        job_id = note_name(name)
        job = Job(
            job_id,
            rows,
            range(len(rows)),
            self.engine,
            OfflineBatchConfig(policy=policy, **config),
            sink,
            JobOptions(priority=priority),
        )
        return RunningJob(name, job_id, cases, job, answers, asyncio.Event())

    async def finish(self, *jobs: RunningJob) -> None:
        await asyncio.gather(*(one.job.run(one.stop) for one in jobs))

    async def online(self, case: Case) -> dict[str, Any]:
        self._online += 1
        body = case.body | {"rid": f"online{self._online:06d}"}
        request = GenerateReqInput(**body)
        answer: dict[str, Any] = await self.manager.generate_request(
            request, None
        ).__anext__()
        return answer

    async def abort(self, rid: str) -> None:
        self.manager.abort_request(rid)

    async def pause(self, mode: str) -> None:
        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def go_on(self) -> None:
        # Emptying torch's cache asks for CUDA.
        message = ContinueGenerationReqInput(torch_empty_cache=False)
        await self.manager.continue_generation(message)

    async def flush(self) -> bool:
        return bool((await self.manager.flush_cache()).success)

    # What is there --------------------------------------------------------------------

    async def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Counters of all schedulers, and their contents. The tests' own add up here."""
        states = await self.manager.get_internal_state()
        left: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for state in states:
            left.update(state[STATE].pop("left"))
            ours = state[STATE_KEY]
            total.update({k: v for k, v in ours.items() if type(v) is int})
            for name, value in state[STATE].items():
                before = self._counts.get(name, 0)
                most = name == "delay"
                self._counts[name] = max(before, value) if most else before + value
        page_size = states[0][STATE_KEY]["page_size"]
        return {**states[0][STATE_KEY], **total, "page_size": page_size}, left

    async def idle(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until nothing runs. Nothing may be held then but the cache.

        Returns the tests' counts since the last call.
        """
        end = time.monotonic() + timeout_s
        while True:
            left = (await self.state())[1]
            if not any(left.values()):
                counts, self._counts = self._counts, {}
                return counts
            held = {name: value for name, value in left.items() if value}
            assert time.monotonic() < end, f"still held: {held}"
            await asyncio.sleep(0.05)

    # Answers --------------------------------------------------------------------------

    def check_job(self, one: RunningJob) -> None:
        """Every line answered, and each answer is the model's."""
        assert set(one.answers) == set(range(len(one.cases)))
        for index, output in one.answers.items():
            assert output.ok, (one.job_id, index, output.body[:300])
            self.check(one.cases[index], json.loads(output.body))

    def check_some(self, one: RunningJob, aborted: set[str]) -> int:
        """Each answer is the model's, but for lines that may have been aborted.

        Returns how many were.
        """
        count = 0
        for index, output in one.answers.items():
            answer = json.loads(output.body)
            reason = answer.get("meta_info", {}).get("finish_reason") or {}
            if one.rids[index] in aborted and (
                not output.ok or reason.get("type") == "abort"
            ):
                count += 1
                continue
            assert output.ok, (one.job_id, index, output.body[:300])
            self.check(one.cases[index], answer)
        return count

    def check(self, case: Case, answer: dict[str, Any]) -> None:
        """An answer is greedy, and ends where it has to."""
        ids, sampling = answer["output_ids"], case.sampling
        most = sampling["max_new_tokens"]
        # With ignore_eos, SGLang ignores other tokens to stop at, too.
        stops = {*ENDS, *sampling.get("stop_token_ids", ())}
        stops = set() if sampling.get("ignore_eos") else stops
        assert 0 < len(ids) <= most, (len(ids), most)
        assert not stops & set(ids[:-1]), (ids, stops)
        assert len(ids) == most or ids[-1] in stops, (len(ids), most, ids[-1], stops)
        self.check_tokens(case.prompt, ids)
        if case.more.get("return_logprob"):
            self.check_logprobs(case, ids, answer["meta_info"])

    def check_logprobs(self, case: Case, ids: list[int], info: dict[str, Any]) -> None:
        """Each wanted log probability, of prompt and output, is the model's."""
        prompt, more = case.prompt, case.more
        tokens = prompt + ids
        logprobs = self._logits(tokens).log_softmax(1)
        start = more.get("logprob_start_len", -1)
        # SGLang gives none of the first token, as there may be nothing before it.
        of_prompt = range(start + 1, len(prompt)) if start >= 0 else range(0)
        of_output = range(len(prompt), len(tokens))
        for name, places in (("input", of_prompt), ("output", of_output)):
            found = {
                key: info.get(f"{name}_{key}") or []
                for key in ("token_logprobs", "top_logprobs", "token_ids_logprobs")
            }
            if name == "input":
                found = {key: value[1:] for key, value in found.items()}
            count = more.get("top_logprobs_num", 0)
            some = more.get("token_ids_logprob")
            wanted = (True, count > 0, some is not None)
            for each, here in zip(found.values(), wanted, strict=True):
                assert len(each) == (len(places) if here else 0), (name, more, found)
            for i, place in enumerate(places):
                before = logprobs[place - 1]
                value, token, _ = found["token_logprobs"][i]
                assert token == tokens[place]
                assert abs(value - before[token]) < TIE, (name, i, value)
                if count:
                    top = torch.tensor([x[0] for x in found["top_logprobs"][i]])
                    assert (top - before.topk(count).values).abs().max() < TIE
                if some is not None:
                    chosen = [x[:2] for x in found["token_ids_logprobs"][i]]
                    assert [token for _, token in chosen] == some
                    for value, token in chosen:
                        assert abs(value - before[token]) < TIE, (name, i, token)

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        """The model's logits after each token, ``[tokens, vocabulary]``."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits

    def check_tokens(self, prompt: list[int], ids: list[int]) -> None:
        key = str((prompt, ids))
        if key in self._checked:
            return
        logits = self._logits(prompt + ids)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        worse = (logits.max(1).values - chosen > TIE).nonzero()[:, 0].tolist()
        assert not worse, (
            f"token {worse[0]} of {len(ids)} is wrong; {len(prompt)} before"
        )
        self._checked.add(key)


@contextmanager
def stress(model: Path, *argv: str) -> Iterator[Stress]:
    """An engine with little KV. ``argv``: SGLang's arguments."""
    args = in_process.parse_server_args(
        [
            f"--model-path={model}",
            "--dtype=float32",
            "--mem-fraction-static=0.3",
            "--random-seed=1",
            # Whether steps are mixed must not depend on how fast they are here.
            '--offline-batch-config={"learn_costs": false}',
            *argv,
        ]
    )
    stock = StressEngine(server_args=args)
    try:
        engine = SGLangEngine(stock.tokenizer_manager, stock.template_manager)
        stock.loop.run_until_complete(engine.connect())
        yield Stress(engine, stock.loop, model)
    finally:
        stock.shutdown()


# Jobs of random shapes ----------------------------------------------------------------

POLICIES = ("dfs", "dual-scan", "fcfs", "prefix-groups", "random", "lof")


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(32, 127) for _ in range(count)]


def prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of one job: which prefixes they share is drawn, too."""
    shape = rng.choice(("none", "one", "two", "same", "nested"))
    if shape == "none":
        return [tokens(rng, rng.randint(1, longest)) for _ in range(count)]
    if shape == "same":
        return [tokens(rng, rng.randint(1, longest))] * count
    if shape == "nested":
        whole = tokens(rng, longest)
        return [whole[: rng.randint(1, longest)] for _ in range(count)]
    upper = [tokens(rng, rng.randint(1, longest // 2)) for _ in range(3)]
    if shape == "two":
        upper += [
            rng.choice(upper) + tokens(rng, rng.randint(1, longest // 4))
            for _ in range(6)
        ]
    return [
        rng.choice(upper) + tokens(rng, rng.randint(1, longest // 4))
        for _ in range(count)
    ]


def sampling(rng: random.Random, most: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, most),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        params["stop_token_ids"] = tokens(rng, 3)
    return params


def random_cases(rng: random.Random, count: int, longest: int, most: int) -> list[Case]:
    cases = [
        Case(p, sampling(rng, most), logprobs(rng, len(p)))
        for p in prompts(rng, count, longest)
    ]
    rng.shuffle(cases)
    return cases


def logprobs(rng: random.Random, prompt: int) -> dict[str, Any]:
    """For a sixth of the requests, which log probabilities they want."""
    if rng.random() > 1 / 6:
        return {}
    more: dict[str, Any] = {"return_logprob": True}
    if rng.random() < 0.5:
        more["logprob_start_len"] = rng.choice((0, rng.randrange(prompt)))
    if rng.random() < 0.5:
        more["top_logprobs_num"] = rng.randint(1, 3)
    if rng.random() < 0.3:
        more["token_ids_logprob"] = tokens(rng, 2)
    return more
