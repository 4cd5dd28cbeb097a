"""The decode server's side of the calls to prefill servers, against servers that are
made up here."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from fastapi import HTTPException
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.fleet.plan_bytes import plan_of, to_bytes
from sglang_batch.job import retrying_engine, traces
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.scheduling.job_plan import JobPlan, StepCost
from sglang_batch.srt.compat.support import (
    check_disaggregation,
    check_on_cpu,
    config_in_mode,
)
from sglang_batch.srt.disaggregation import pairing
from sglang_batch.srt.disaggregation.pairing import STICKY, Pairing
from sglang_batch.srt.disaggregation.prefill_calls import (
    CALL_PATH,
    JOBS_PATH,
    JobCall,
    PrefillCall,
    room_after,
)

RID = "batch_1-00000007"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "LOOK_S", 0.02)


class Fake:
    """A prefill server that answers each call with ``answer``."""

    def __init__(self) -> None:
        self.calls: list[PrefillCall] = []
        self.traces: list[str | None] = []
        self.jobs: list[JobCall] = []
        self.answer: Callable[[], Awaitable[web.Response]] = self.ok
        self.mode = "prefill"
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._transports: list[Any] = []

    async def ok(self) -> web.Response:
        return web.Response()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_post(CALL_PATH, self._call)
        app.router.add_post(JOBS_PATH, self._job)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """End like a process that is killed."""
        for transport in self._transports:
            if transport is not None:
                transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": 8998}
        )

    async def _call(self, request: web.Request) -> web.Response:
        self._transports.append(request.transport)
        body = await request.read()
        self.calls.append(msgspec.msgpack.decode(body, type=PrefillCall))
        self.traces.append(request.headers.get("traceparent"))
        return await self.answer()

    async def _job(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.jobs.append(msgspec.msgpack.decode(body, type=JobCall))
        return web.Response()


@asynccontextmanager
async def paired(
    count: int = 1,
) -> AsyncIterator[tuple[Pairing, list[Fake], list[str]]]:
    """A pairing, its prefill servers, and the ids that it has aborted."""
    fakes = [Fake() for _ in range(count)]
    for fake in fakes:
        await fake.start()
    aborted: list[str] = []
    manager = SimpleNamespace(abort_request=aborted.append)
    pairing = Pairing(manager, [fake.url for fake in fakes])
    pairing.servers.start()
    try:
        yield pairing, fakes, aborted
    finally:
        await pairing.servers.stop()
        for fake in fakes:
            await fake.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def message(rid: str = RID, **fields: Any) -> TokenizedGenerateReqInput:
    params = SamplingParams(temperature=0, max_new_tokens=8, stop=["x"], top_p=0.5)
    values = {
        "rid": rid,
        "input_text": None,
        "input_ids": array("q", [1, 2, 3]),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    return TokenizedGenerateReqInput(**values | fields)


def answering(
    pairing: Pairing, rid: str, output: RequestOutput
) -> Callable[[], Awaitable[RequestOutput]]:
    """An engine that sends one message and then has this output."""

    async def run() -> RequestOutput:
        pairing.pair(message(rid))
        await asyncio.sleep(0.05)
        return output

    return run


OK = RequestOutput(200, RID, b"{}")
FAILED = RequestOutput(500, RID, b'{"error": {"code": null}}')


def test_a_call_continues_the_trace_of_its_line() -> None:
    trace = f"00-{7:032x}-{8:016x}-01"

    async def scenario() -> None:
        async with paired() as (pairing, [fake], _):
            await pairing.servers.wait_for_one()
            pairing.pair(message())
            traces.enter({"traceparent": trace})
            pairing.pair(message())
            await until(lambda: len(fake.traces) == 2)
            assert fake.traces == [None, trace]

    asyncio.run(scenario())


def test_a_call_has_what_bears_on_the_first_token() -> None:
    sent = PrefillCall.of(RID, message(return_logprob=True), ("10.0.0.7", 8998, 5))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=PrefillCall)
    assert again == sent
    obj = again.request()
    assert obj.input_ids == [1, 2, 3] and obj.return_logprob is True
    assert (obj.bootstrap_host, obj.bootstrap_port, obj.bootstrap_room) == (
        "10.0.0.7",
        8998,
        5,
    )
    params = obj.sampling_params
    assert isinstance(params, dict)
    # SGLang's form of temperature 0.
    assert (params["top_k"], params["top_p"], params["max_new_tokens"]) == (1, 0.5, 8)
    assert "stop" not in params and "stop_strs" not in params


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_embeds": [[0.5]]}, "embeddings"),
        (
            {"return_logprob": True, "logprob_start_len": 0},
            "Log probabilities of prompts",
        ),
        ({"return_logprob": True, "token_ids_logprob": [4]}, "chosen tokens"),
        ({"return_hidden_states": True}, "hidden states"),
    ],
)
def test_what_the_decode_server_would_lack_is_refused(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PrefillCall.of(RID, message(**fields), ("h", 1, 2))


def some_plan() -> JobPlan:
    ints, floats = np.arange(3, dtype=np.int32), np.ones(3, np.float32)
    return JobPlan(
        policy="dfs",
        **dict.fromkeys(("number", "position", "node", "input_len", "read_len"), ints),
        **dict.fromkeys(("est_decode_steps", "est_decode_steps_sq"), floats),
        parent=ints - 1,
        **dict.fromkeys(("depth", "leaf_begin", "leaf_end"), ints),
        density=None,
        num_left=3,
        compute_s=0.5,
        kv_read_s=0.25,
        min_step_tokens=1,
        cost=StepCost(1.0, 2.0, 3.0, 4.0),
    )


def test_a_plan_survives_the_network_without_pickle() -> None:
    plan = some_plan()
    again = plan_of(to_bytes(plan))
    assert again.same_requests(plan) and again.cost == plan.cost
    assert again.est_decode_steps.dtype == np.float32 and again.density is None
    with_density = replace(plan, density=np.ones(3, np.float32))
    found = plan_of(to_bytes(with_density)).density
    assert found is not None and found.tolist() == [1.0, 1.0, 1.0]
    for bad in (b"", b"garbage", to_bytes(plan)[:50], plan.to_bytes()):
        with pytest.raises(ValueError, match="no JobPlan"):
            plan_of(bad)


async def _requests_wait() -> None:
    async with paired() as (pairing, [fake], aborted):
        await fake.stop()
        await until(lambda: not pairing.servers.servers[0].is_up)
        run = answering(pairing, RID, OK)
        task = asyncio.ensure_future(pairing.execute(RID, run))
        await asyncio.sleep(0.2)
        assert not task.done() and not fake.calls
        await fake.start()
        assert await task == OK
        assert not aborted
        assert fake.calls[0].rid.endswith(RID) and fake.calls[0].bootstrap_port == 8998


def test_requests_of_a_job_wait_for_a_prefill_server() -> None:
    asyncio.run(_requests_wait())


async def _lost() -> None:
    async with paired(2) as (pairing, fakes, aborted):
        await until(lambda: all(each.is_up for each in pairing.servers.servers))

        async def vanish() -> web.Response:
            await asyncio.sleep(2)
            return web.Response()

        for fake in fakes:
            fake.answer = vanish
        first = pairing.servers.choose()
        used = next(
            fake for fake in fakes if first is not None and fake.url == first.url
        )

        async def run() -> RequestOutput:
            pairing.pair(message(RID))
            await until(lambda: aborted)
            return FAILED

        task = asyncio.ensure_future(pairing.execute(RID, run))
        await until(lambda: used.calls)
        await used.stop()
        output = await task
        assert output.status_code == 503 and b'"prefill_lost"' in output.body
        assert aborted == [RID]
        # The next one goes to the server that is left.
        other = next(fake for fake in fakes if fake is not used)
        other.answer = other.ok
        again = f"{RID}.try000001"
        assert await pairing.execute(again, answering(pairing, again, OK)) == OK
        assert other.calls


def test_a_request_of_a_server_that_is_gone_is_told_apart_and_the_next_avoids_it() -> (
    None
):
    asyncio.run(_lost())


async def _refused() -> None:
    async with paired() as (pairing, [fake], aborted):

        async def refuse() -> web.Response:
            return web.Response(status=400, text="the prompt is too long")

        fake.answer = refuse
        parts = [f"{RID}.000001", f"{RID}.000002"]

        async def run() -> RequestOutput:
            for part in parts:
                pairing.pair(message(part))
            await until(lambda: len(aborted) == len(parts))
            return FAILED

        output = await pairing.execute(RID, run)
        assert output.status_code == 400
        assert b"the prompt is too long" in output.body
        assert sorted(aborted) == parts


def test_an_error_of_the_prefill_server_is_the_answer() -> None:
    asyncio.run(_refused())


async def _spread() -> None:
    async with paired(2) as (pairing, fakes, _):
        await until(lambda: all(each.is_up for each in pairing.servers.servers))
        forever = asyncio.Event()

        async def hold() -> web.Response:
            await forever.wait()
            return web.Response()

        for fake in fakes:
            fake.answer = hold
        for i in range(4 * STICKY):
            pairing.pair(message(f"batch_1-{i:08d}"))
            await asyncio.sleep(0)
        await until(lambda: sum(len(f.calls) for f in fakes) == 4 * STICKY)
        counts = sorted(len(fake.calls) for fake in fakes)
        assert counts[0] >= STICKY
        runs = [int(call.rid[-8:]) for call in fakes[0].calls]
        assert np.sum(np.diff(sorted(runs)) != 1) <= 4  # long runs of neighbours
        forever.set()


def test_neighbours_in_the_plan_go_to_the_same_server_and_all_get_work() -> None:
    asyncio.run(_spread())


async def _jobs() -> None:
    async with paired() as (pairing, [fake], _):
        await until(lambda: pairing.servers.servers[0].is_up)
        await pairing.open_job("batch_1", [some_plan()])
        await pairing.servers.set_priority("batch_1", 2)
        name = pairing.servers.name_of("batch_1")
        assert [(job.action, job.job_id) for job in fake.jobs] == [
            ("open", name),
            ("priority", name),
        ]
        # A server that was started again knows no jobs.
        await fake.stop()
        pairing.servers.servers[0].is_gone("test")
        fake.jobs.clear()
        await fake.start()
        await until(lambda: pairing.servers.servers[0].is_up)
        assert [job.action for job in fake.jobs] == ["open", "priority"]
        await pairing.servers.close_job("batch_1")
        assert fake.jobs[-1].action == "close"


def test_a_prefill_server_that_comes_back_learns_the_open_jobs() -> None:
    asyncio.run(_jobs())


async def _single() -> None:
    async with paired() as (pairing, [fake], _):
        fake.mode = "null"
        pairing.servers.servers[0].is_gone("test")
        await asyncio.sleep(0.1)
        pairing.servers.servers[0].port = None
        with pytest.raises(HTTPException) as raised:
            pairing.pair(message("online"))
        assert raised.value.status_code == 503 and fake.url in raised.value.detail


def test_a_single_call_without_a_server_is_refused() -> None:
    asyncio.run(_single())


class _Losing:
    """An engine whose first ``losses`` attempts lose their prefill server."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.rids: list[str] = []

    async def prepare(self, request: Any, rid: str, *, tokenize: bool) -> Any:
        return SimpleNamespace(rid=rid)

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        self.rids.append(prepared.rid)
        if len(self.rids) <= self.losses:
            return RequestOutput(503, RID, b'{"error": {"code": "prefill_lost"}}')
        return OK


@pytest.mark.parametrize(
    ("losses", "status", "tries"),
    [(1, 200, 2), (5, 200, 6), (7, 200, 8), (100, 503, 8)],
)
def test_a_lost_prefill_server_costs_a_line_no_attempt_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, losses: int, status: int, tries: int
) -> None:
    monkeypatch.setattr(retrying_engine, "BACK_OFF_S", 0.0)
    engine: Any = _Losing(losses)
    retries = retrying_engine.RetryingEngine(
        engine, OfflineBatchConfig(max_line_attempts=3)
    )
    request = BatchRequestInput(7, "a", "/v1/completions", b"{}")

    async def run() -> RequestOutput:
        return await retries.execute(
            await retries.prepare(request, RID, tokenize=False)
        )

    assert asyncio.run(run()).status_code == status
    assert len(engine.rids) == len(set(engine.rids)) == tries


# Settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ({}, {"prefill_servers": ["http://a:1"]}, "add --disaggregation-mode decode"),
        ({"disaggregation_mode": "prefill"}, {}, "tcp only; add it"),
        (
            {
                "disaggregation_mode": "decode",
                "disaggregation_transfer_backend": "tcp",
                "enable_pd_role_switch": True,
            },
            {},
            "--enable-pd-role-switch does not work",
        ),
        (
            {"disaggregation_mode": "decode", "speculative_algorithm": "NGRAM"},
            {},
            "--speculative-algorithm NGRAM does not work with --disaggregation-mode decode",
        ),
        (
            {
                "disaggregation_mode": "decode",
                "disaggregation_transfer_backend": "tcp",
                "attn_dp_size": 2,
            },
            {},
            "--attn-dp-size 2 does not work .* --disaggregation-mode decode",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    values: dict[str, object], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_disaggregation(values, OfflineBatchConfig(**settings))


def test_the_host_pool_needs_an_accelerator() -> None:
    arguments = SimpleNamespace(
        device="cpu",
        disaggregation_mode="decode",
        disaggregation_decode_host_receive_threshold=1.0,
        speculative_use_rejection_sampling=False,
    )
    check_on_cpu(arguments)
    arguments.disaggregation_decode_host_receive_threshold = 0.0
    with pytest.raises(ConfigError, match="threshold 0 needs an accelerator"):
        check_on_cpu(arguments)
    arguments.disaggregation_mode = "null"
    arguments.speculative_use_rejection_sampling = True
    with pytest.raises(ConfigError, match="rejection-sampling needs an accelerator"):
        check_on_cpu(arguments)
    arguments.device = "cuda"
    check_on_cpu(arguments)


@pytest.mark.parametrize("value", ["http://a:1", ["a:1"], ["http://a:1/path"], [7]])
def test_prefill_servers_are_urls(value: Any) -> None:
    with pytest.raises(ConfigError, match="prefill_servers"):
        OfflineBatchConfig(prefill_servers=value)


def test_a_decode_server_with_another_backend_has_sglangs_scheduler() -> None:
    config = OfflineBatchConfig(prefill_servers=("http://a:1/",))
    assert config_in_mode(config, "decode", "mooncake").scheduler == "stock"
    assert config_in_mode(config, "decode", None).scheduler == "stock"
    assert config_in_mode(config, "decode", "tcp").scheduler == "offline"
    assert config_in_mode(config, "prefill", "tcp").scheduler == "offline"
    assert config_in_mode(config, None, None) == config


def test_a_request_that_is_computed_again_has_another_room_each_time() -> None:
    rooms = [1 << 62]  # the largest that there is
    for _ in range(1000):
        rooms.append(room_after(rooms[-1]))
    assert len(set(rooms)) == len(rooms)
    assert all(1 <= room <= 1 << 62 for room in rooms)
