"""Scenarios of stress tests. Each run has a process of its own.

``main`` prints its counts as one line of JSON, which the test checks.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from stress_engine import (
    POLICIES,
    Case,
    RunningJob,
    Stress,
    random_cases,
    stress,
    tokens,
)
from stress_runs import KV, STATES

from sglang_batch.job import live_plan
from sglang_batch.planner.costs.cost_model import StepExtras

ROWS, CHUNK = 8, 64
ARGS = (f"--max-running-requests={ROWS}", f"--chunked-prefill-size={CHUNK}")


# At random ----------------------------------------------------------------------------


def random_rounds(s: Stress, seed: int, rounds: int) -> dict[str, Any]:
    """Jobs of random shapes, some disturbed. After each round all must be idle."""
    total: Counter[str] = Counter()
    before = s.run(s.state())[0]
    live_plan.FIRST_REQUESTS = 6  # of 5 to 50
    for number in range(rounds):
        rng = random.Random(f"{seed}-{number}")
        # Prompts of jobs that are open together may share prefixes, too.
        shared = random_cases(rng, 60, KV // 3, 40) if rng.random() < 0.5 else []
        jobs = [
            s.job(
                f"batch_{number}_{j}{rng.choice(('', '_times10', '_times0.1'))}"
                f"{rng.choice(('', '_grows'))}{rng.choice(('', '', '_open'))}",
                random_cases(
                    rng,
                    rng.randint(5, 30),
                    rng.choice((20, 80, KV // 3, KV - 160)),
                    rng.choice((5, 40, 100)),
                )
                + rng.sample(shared, len(shared) // 3),
                rng.choice(POLICIES),
                rng.choice((0, 0, 0, 5)),
                max_inflight=rng.choice((None, 10)),
                # Aborted lines are errors at once, or are tried again.
                max_line_attempts=rng.choice((1, 3)),
            )
            for j in range(rng.randint(1, 3))
        ]
        aborted: set[str] = set()
        s.run(_round(s, rng, jobs, aborted))
        stopped = [one for one in jobs if one.stop.is_set()]
        for one in jobs:
            total["aborted"] += s.check_some(one, aborted)
            assert one in stopped or len(one.answers) == len(one.cases)
            total["lines"] += len(one.answers)
        total.update(s.run(s.idle()))
        if rng.random() < 0.3:
            assert s.run(s.flush())
    state = s.run(s.state())[0]
    return dict(total) | {
        name: state[name] - before[name]
        for name in ("offloaded", "resumed", "offload_recomputed")
    }


async def _round(
    s: Stress, rng: random.Random, jobs: list[RunningJob], aborted: set[str]
) -> None:
    work = asyncio.ensure_future(s.finish(*jobs))
    others = [_online(s, rng)]
    if rng.random() < 0.5:
        others.append(_abort_some(s, rng, jobs, aborted, work))
    if rng.random() < 0.3:
        others.append(_stop(rng, jobs[0]))
    if rng.random() < 0.3:
        others.append(_pause(s, rng))
    await asyncio.gather(work, *others)


async def _online(s: Stress, rng: random.Random) -> None:
    longest, most = rng.choice((20, KV // 3, KV - 160)), rng.choice((3, 30))
    cases = random_cases(rng, rng.choice((0, 1, 12)), longest, most)

    async def one(case: Case, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        s.check(case, await s.online(case))

    await asyncio.gather(*(one(case, rng.random() * 0.5) for case in cases))


async def _abort_some(
    s: Stress, rng: random.Random, jobs: list[RunningJob], aborted: set[str], work: Any
) -> None:
    while not work.done():
        await asyncio.sleep(rng.random() * 0.1)
        rid = rng.choice(rng.choice(jobs).rids)
        aborted.add(rid)
        await s.abort(rid)


async def _stop(rng: random.Random, job: RunningJob) -> None:
    await asyncio.sleep(rng.random() * 0.4)
    job.stop.set()


async def _pause(s: Stress, rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 0.3)
    mode = rng.choice(("retract", "in_place"))
    await s.pause(mode)
    if mode == "retract":
        assert await s.flush(), "nothing may hold KV while retracted"
    await s.go_on()


# One thing at a time ------------------------------------------------------------------


def _cases(seed: int, count: int, prompt: int, output: int, shared: int = 0) -> Any:
    rng = random.Random(seed)
    first = tokens(rng, shared)
    params = {"max_new_tokens": output, "ignore_eos": True}
    return [Case(first + tokens(rng, prompt), params) for _ in range(count)]


def too_long(s: Stress) -> Any:
    """Requests that do not fit together, and two that do not fit alone."""
    together = s.job("together", _cases(1, 6, KV // 2, 30), "dfs")
    s.run(s.finish(together))
    s.check_job(together)
    counts = s.run(s.idle())
    cases = _cases(2, 8, 40, 20)
    cases[3] = _cases(3, 1, KV + 50, 5)[0]
    cases[5] = _cases(4, 1, 100, 2 * KV)[0]
    alone = s.job("alone", cases, "fcfs")
    s.run(s.finish(alone))
    bad = alone.answers.pop(3)
    long = json.loads(alone.answers.pop(5).body)
    for index, output in alone.answers.items():
        s.check(cases[index], json.loads(output.body))
    s.check_tokens(cases[5].prompt, long["output_ids"])
    return counts | {
        "status": bad.status_code,
        "answered": len(alone.answers),
        "longest": len(cases[5].prompt) + len(long["output_ids"]),
    }


def aborts(s: Stress) -> dict[str, Any]:
    """One request aborted in every state, then jobs, then everything.

    Without further attempts, so that an abort is seen. :func:`random_rounds` has them.
    """
    found: dict[str, Any] = {}
    ranks = len(s.run(s.manager.get_internal_state()))
    for seed, state in enumerate(STATES, 100):
        # One prefix for all, computed in chunks. The last one leaves room in its step,
        # where others would join. Answers are longer than estimated.
        cases = _cases(seed, 10 * ranks, 12, 80, shared=3 * CHUNK - 50)
        name = f"job_times0.1_abort_{state}"
        job = s.job(name, cases, "dfs", max_line_attempts=1)
        s.run(s.finish(job))
        assert len(job.answers) == len(cases)
        ended = s.check_some(job, set(job.rids))
        s.run(s.abort(job.rids[0]))
        counts = s.run(s.idle())
        found[state] = [ended, counts.get(f"aborted_{state}", 0)]
        found.setdefault("answered", []).append(counts.get("answered_aborts", 0))
    # A request without KV for its next token, which SGLang ends.
    cases = _cases(10, 2, 30, 60, shared=40)
    job = s.job("job_starves", cases, "dfs", max_line_attempts=1, max_inflight=1)
    s.run(s.finish(job))
    found["starved"] = s.check_some(job, set(job.rids))
    s.run(s.idle())
    # Stopped before all its lines were sent: they still want the prefix.
    cases = _cases(11, 30, 30, 30, shared=100)
    job = s.job("stopped", cases, "dfs", max_inflight=10)
    s.run(_stop_and_open_again(s, job))
    found["stopped"] = len(job.answers)
    cases = _cases(12, 40, 30, 90, shared=100)
    everything = s.job("everything", cases, "dfs", max_line_attempts=1)
    s.run(_abort_all(s, everything))
    found["everything"] = s.check_some(everything, set(everything.rids))
    s.run(s.idle())
    return found


async def _stop_and_open_again(s: Stress, job: RunningJob) -> None:
    work = asyncio.ensure_future(s.finish(job))
    while not job.answers:
        await asyncio.sleep(0.01)
    job.stop.set()
    await work
    s.check_some(job, set())
    # SGLang refuses an id until it has ended the last request that had it.
    while not s.manager.rid_to_state.keys().isdisjoint(job.rids):
        await asyncio.sleep(0.01)
    again = s.job(job.name, job.cases, "dfs")
    await s.finish(again)
    s.check_job(again)
    await s.idle()


async def _abort_all(s: Stress, job: RunningJob) -> None:
    work = asyncio.ensure_future(s.finish(job))
    while not job.answers:
        await asyncio.sleep(0.01)
    s.manager.abort_request(abort_all=True)
    await work


def online(s: Stress) -> dict[str, Any]:
    """Online requests next to a full batch, and alone."""
    found: dict[str, Any] = {}
    for name, online_cases in {
        "short": _cases(20, 4, 20, 10),
        "long": _cases(21, 4, 5 * CHUNK, 10),
        "many": _cases(22, 20, 30, 10),
    }.items():
        for shape, batch in {
            "decodes": _cases(23, 24, 20, 70),
            "chunks": _cases(24, 12, 10 * CHUNK, 8),
        }.items():
            # Estimated too short, the batch takes every row.
            job = s.job(f"beside_{name}_{shape}_times0.1", batch, "dfs")
            at_once = len(online_cases) if name == "many" else 1
            found[f"{name}_{shape}"] = s.run(_beside(s, job, online_cases, at_once))
    s.run(_all_online(s, _cases(25, 30, 100, 20)))
    found["alone"] = s.run(s.idle())
    return found


async def _beside(
    s: Stress, job: RunningJob, cases: list[Case], at_once: int
) -> dict[str, Any]:
    work = asyncio.ensure_future(s.finish(job))
    # Every row decodes, or no more prompts fit with the one in chunks.
    while not job.answers and (await s.state())[1]["decoding"] < ROWS:
        await asyncio.sleep(0.005)
    before = (await s.state())[0]["offloaded"]
    for first in range(0, len(cases), at_once):
        await _all_online(s, cases[first : first + at_once])
    offloaded = (await s.state())[0]["offloaded"] - before
    unfinished = len(job.cases) - len(job.answers)
    await work
    s.check_job(job)
    counts: dict[str, Any] = await s.idle()
    return counts | {"unfinished": unfinished, "offloaded_for": offloaded}


async def _all_online(s: Stress, cases: list[Case]) -> None:
    for case, answer in zip(
        cases, await asyncio.gather(*map(s.online, cases)), strict=True
    ):
        s.check(case, answer)


def kinds(s: Stress) -> Any:
    """Lines with a grammar, of several answers and with logprobs among plain ones."""
    cases = _cases(40, 30, 20, 60, shared=40)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
    }
    schema |= {"required": ["a"], "additionalProperties": False}
    written = {"max_new_tokens": 40, "json_schema": json.dumps(schema)}
    for index in range(0, 30, 6):
        cases[index].sampling = written
        cases[index + 1].sampling = cases[1].sampling | {"n": 2}
        cases[index + 2].more = {"return_logprob": True, "logprob_start_len": 0}
    job = s.job("kinds_times0.1", cases, "dfs")
    online = [Case(case.prompt, written) for case in _cases(41, 6, 20, 40)]
    answers = s.run(_with_online(s, job, online))
    for index, output in job.answers.items():
        assert output.ok, output.body[:300]
        answer = json.loads(output.body)
        if cases[index].sampling is written:
            answers.append(answer)
        elif isinstance(answer, list):
            assert len(answer) == 2
        else:
            s.check(cases[index], answer)
    texts = {answer["text"].replace(" ", "").replace("\n", "") for answer in answers}
    return s.run(s.idle()) | {"texts": sorted(texts), "written": len(answers)}


async def _with_online(s: Stress, job: RunningJob, cases: list[Case]) -> list[Any]:
    answers = await asyncio.gather(s.finish(job), *map(s.online, cases))
    return list(answers[1:])


def between(s: Stress) -> Any:
    """The cache flushed, generation paused, requests of other kinds, while a job runs."""
    cases = _cases(30, 16, 20, 120, shared=40)
    for index in range(0, 16, 5):
        cases[index].more = {"return_logprob": True, "logprob_start_len": 0}
    job = s.job("paused_times0.1", cases, "dfs")
    found = s.run(_pauses(s, job))
    s.check_job(job)
    s.run(s.idle())
    found["flushed"] = s.run(s.flush())
    return found


async def _pauses(s: Stress, job: RunningJob) -> dict[str, Any]:
    work = asyncio.ensure_future(s.finish(job))
    while not (await s.state())[0]["offloaded_now"]:
        await asyncio.sleep(0.005)
    found: dict[str, Any] = {"flushed_busy": await s.flush()}
    await s.pause("in_place")
    found |= (await s.state())[0]
    found["flushed_paused"] = await s.flush()
    await s.go_on()
    await s.pause("retract")
    found["offloaded_retracted"] = (await s.state())[0]["offloaded_now"]
    found["flushed_retracted"] = await s.flush()
    await s.go_on()
    await work
    return found


def unmixed(s: Stress) -> Any:
    """Lines that search with beams among plain ones, and such requests online."""
    cases, beams = _cases(60, 48, 40, 24), _cases(61, 4, 20, 12)
    for case in [*cases[::12], *beams]:
        case.sampling = case.sampling | {"beam_width": 3}
    job = s.job("unmixed", cases, "fcfs")
    s.run(s.finish(job))
    counts = s.run(s.idle())
    s.run(_with_online(s, s.job("beside", cases, "dfs"), beams))
    for index, output in job.answers.items():
        assert output.ok, output.body[:300]
        if "beam_width" not in cases[index].sampling:
            s.check(cases[index], json.loads(output.body))
    lengths = {len(json.loads(job.answers[i].body)["output_ids"]) for i in range(48)}
    s.run(s.idle())
    return counts | {"lengths": sorted(lengths)}


def apart(s: Stress) -> Any:
    """By its plan's costs a mixed step takes longer than two: none is mixed."""
    machine = s.engine.machine
    slow = StepExtras(mixed_decode_s=machine.cost.extras.decode_s + 10.0)
    s.engine.learnt.machine = replace(machine, cost=replace(machine.cost, extras=slow))
    cases = [*_cases(90, 40, 30, 16), *_cases(91, 6, 3 * CHUNK, 8)]
    job = s.job("apart", cases, "dfs")
    s.run(s.finish(job))
    s.check_job(job)
    counts = s.run(s.idle())
    s.engine.learnt.machine = machine
    return counts


def prompt_logprobs(s: Stress) -> Any:
    """Lines that want log probabilities of their prompts share only the tokens before."""
    cases = _cases(70, 18, 12, 8, shared=48)
    for index in range(0, 18, 2):
        start = (0, 20, 48)[index % 3]
        cases[index].more = {"return_logprob": True, "logprob_start_len": start}
    job = s.job("prompts", cases, "dfs")
    s.run(s.finish(job))
    s.check_job(job)
    answers = [json.loads(output.body) for output in job.answers.values()]
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    planned = job.job.prefix_sharing_ratio * sum(len(case.prompt) for case in cases)
    s.run(s.idle())
    return {"cached": cached, "planned": round(planned)}


def branch_points(s: Stress) -> dict[str, int]:
    """Prefixes on two levels, far before the ends of the prompts that compute them, and
    prompts that are sent several times."""
    rng = random.Random(80)
    params = {"max_new_tokens": 6, "ignore_eos": True}
    cases, least = [], 0
    copies, page = 3, int(s.run(s.state())[0]["page_size"])
    # EAGLE reads each token with the next one, in which prompts differ behind a prefix.
    ahead = int(any("=EAGLE" in each for each in sys.argv))

    def again(tokens: int) -> int:
        """Tokens of a prefix that each but the first request computes."""
        return tokens - (tokens - ahead) // page * page

    for _ in range(2):
        top = tokens(rng, 96)
        least += len(top) + again(96)
        for _ in range(2):
            middle = top + tokens(rng, 64)
            least += 64 + 2 * again(160)
            cases += [Case(middle + tokens(rng, 80), params) for _ in range(3)]
    least += 80 * len(cases)
    for _ in range(2):
        # Of each copy the last page is computed, or of a full one the last token.
        least += 90 + (copies - 1) * (1 + again(89))
        cases += [Case(tokens(rng, 90), params)] * copies
    rng.shuffle(cases)
    job = s.job("branches", cases, "dfs")
    s.run(s.finish(job))
    s.check_job(job)
    answers = [json.loads(output.body) for output in job.answers.values()]
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    s.run(s.idle())
    return {"computed": sum(len(x.prompt) for x in cases) - cached, "least": least}


def drafted(s: Stress) -> dict[str, Any]:
    """How many drafts answers of 41 tokens took, of which the prompt yields the first."""
    job = s.job("drafted", _cases(95, 12, 30, 41, shared=40), "dfs")
    s.run(s.finish(job))
    s.check_job(job)
    answers = [json.loads(output.body)["meta_info"] for output in job.answers.values()]
    s.run(s.idle())
    return {"drafts": sorted({answer["spec_verify_ct"] for answer in answers})}


def shards(s: Stress) -> dict[str, Any]:
    """Families that share a prefix, each of which is computed once by a rank that has
    lines of it. Then one line, beside which the other ranks have none."""
    rng = random.Random(90)
    params = {"max_new_tokens": 12, "ignore_eos": True}
    families = [tokens(rng, 90) for _ in range(8)]
    cases = [Case(one + tokens(rng, 10), params) for one in families for _ in range(6)]
    job = s.job("shards", cases, "dfs")
    s.run(s.finish(job))
    s.check_job(job)
    infos = {i: json.loads(x.body)["meta_info"] for i, x in job.answers.items()}
    ranks = Counter(info.get("dp_rank") for info in infos.values())
    places = {(i // 6, info.get("dp_rank")) for i, info in infos.items()}
    cached = sum(info["cached_tokens"] for info in infos.values())
    alone = s.job("alone", cases[:1], "dfs")
    s.run(s.finish(alone))
    s.check_job(alone)
    s.run(s.idle())
    return {
        "ranks": sorted(ranks.values()),
        "places": len(places),
        "computed": sum(len(case.prompt) for case in cases) - cached,
        "least": 10 * len(cases) + 90 * len(places),
    }


FOCUSED = {
    "shards": shards,
    "branch_points": branch_points,
    "too_long": too_long,
    "aborts": aborts,
    "online": online,
    "kinds": kinds,
    "between": between,
    "drafted": drafted,
    "unmixed": unmixed,
    "apart": apart,
    "prompt_logprobs": prompt_logprobs,
}


def main() -> None:
    model, what, seed, rounds, *argv = sys.argv[1:]
    with stress(
        Path(model), f"--max-total-tokens={KV}", "--log-level=info", *ARGS, *argv
    ) as s:
        found = {
            name: random_rounds(s, int(seed), int(rounds))
            if name == "random"
            else FOCUSED[name](s)
            for name in what.split(",")
        }
        found["totals"] = s.run(s.state())[0]
    print(json.dumps(found))
