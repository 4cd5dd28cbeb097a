"""Less is done for each running request, and the same comes out."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components import (
    batch_result_processor as results,
)
from sglang.srt.managers.scheduler_components import output_streamer as stock
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_batch.srt.scheduler.sglang_parts import (
    OfflineOutputStreamer,
    OfflineResultProcessor,
)

STEPS = 130


class Sent(list[Any]):
    """Stands for the socket to the detokenizer."""

    def send_output(self, payload: Any) -> None:
        self.append(
            (
                payload.rids,
                payload.output_ids,
                payload.decode_ids,
                payload.completion_tokens,
                payload.finished_reasons,
            )
        )


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's streamer asks its process for."""
    serving = SimpleNamespace(stream_interval=1, weight_version="default")
    parallel = SimpleNamespace(dp_rank=0, attn_tp_rank=0)
    monkeypatch.setattr(stock, "get_serving", lambda: serving)
    monkeypatch.setattr(stock, "get_parallel", lambda: parallel)
    monkeypatch.setattr(
        stock,
        "get_observability",
        lambda: SimpleNamespace(enable_request_time_stats_logging=False),
    )


def streamer(kind: Any, sent: Sent, *, online: bool = True) -> Any:
    made = kind(
        send_to_detokenizer=sent,
        tree_cache=None,
        server_args=None,
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_hicache_storage=lambda: False,
    )
    if kind is OfflineOutputStreamer:
        made.is_online = lambda req: online
    return made


def sent_by(kind: Any, *, online: bool = True) -> Sent:
    """All that is sent of requests of every kind while they decode."""
    chance = random.Random(0)
    sent = Sent()
    sender = streamer(kind, sent, online=online)
    reqs = []
    for i in range(40):
        params = SamplingParams(max_new_tokens=chance.randint(1, STEPS - 5))
        params.stream_interval = chance.choice([None, 1, 7])
        req = Req(str(i), "", array("q", [1, 2, 3]), params, stream=i % 3 == 0)
        req.output_ids.extend([5] * chance.choice([0, 0, 3]))  # some came before
        reqs.append(req)
    for step in range(STEPS):
        for req in reqs:
            if not req.finished():
                req.output_ids.append(step)
                if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                    req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        # Those that are done come once more: the next step had begun.
        skip = reqs[step % len(reqs)] if step % 5 == 0 else None
        sender.stream_output(reqs, False, skip)
    assert all(req.finished_output for req in reqs)
    return sent


def test_it_sends_what_sglang_sends() -> None:
    wanted = sent_by(stock.SchedulerOutputStreamer)
    assert len(wanted) > STEPS // 2
    assert sent_by(OfflineOutputStreamer) == wanted


def by_request(sent: Sent) -> dict[str, Any]:
    """What a request's messages come to, and whether it has several."""
    found: dict[str, Any] = {}
    for rids, ids, texts, counts, reasons in sent:
        each = zip(rids, ids, texts, counts, reasons, strict=True)
        for rid, output_ids, decode_ids, count, reason in each:
            before = found.get(rid, ([], [], None, None, 0))
            found[rid] = (
                [*before[0], *output_ids],
                [*before[1], *decode_ids],
                count,
                reason,
                before[4] + 1,
            )
    return found


def test_an_answer_of_a_batch_line_is_sent_once_and_whole() -> None:
    wanted = by_request(sent_by(stock.SchedulerOutputStreamer))
    found = by_request(sent_by(OfflineOutputStreamer, online=False))
    assert {rid: each[:4] for rid, each in found.items()} == {
        rid: each[:4] for rid, each in wanted.items()
    }
    streamed = {rid for rid in found if int(rid) % 3 == 0}
    assert {found[rid][4] for rid in found if rid not in streamed} == {1}
    assert all(found[rid][4] == wanted[rid][4] for rid in streamed)
    assert max(each[4] for rid, each in wanted.items() if rid not in streamed) > 1


@pytest.mark.parametrize(("online", "times"), [(True, 2), (False, 0)])
def test_requests_with_nothing_to_send_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, online: bool, times: int
) -> None:
    asked = []
    accept = stock._GenerationStreamAccumulator.accept

    def counted(self: Any, *, req: Any) -> None:
        asked.append(req.rid)
        accept(self, req=req)

    monkeypatch.setattr(stock._GenerationStreamAccumulator, "accept", counted)
    sender = streamer(OfflineOutputStreamer, Sent(), online=online)
    req = Req("a", "", array("q", [1]), SamplingParams(max_new_tokens=200))
    for token in range(120):
        req.output_ids.append(token)
        sender.stream_output([req], False)
    assert asked == ["a"] * times


def test_sglang_does_nothing_more_for_a_request_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ours leaves out: without customized info nothing changes by SGLang's."""
    off = SimpleNamespace(
        mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False),
        disaggregation_decode_enable_offload_kvcache=False,
    )
    monkeypatch.setattr(results, "get_exec", lambda: off)
    monkeypatch.setattr(results, "get_disagg", lambda: off)
    processor = object.__new__(OfflineResultProcessor)
    batch = SimpleNamespace(mamba_track_mask_cpu=None)
    info = SimpleNamespace(customized_info={"seen": [7]})
    handle = results.SchedulerBatchResultProcessor._handle_finish_state_updated_req

    def state(req: Req) -> dict[str, Any]:
        return {name: repr(value) for name, value in vars(req).items()}

    req = Req("a", "", array("q", [1]), SamplingParams(max_new_tokens=5))
    req.kv = SimpleNamespace(mamba_ping_pong_track_buffer=None)
    before = state(req)
    handle(processor, req, batch, None, 0, SimpleNamespace(customized_info=None))
    assert state(req) == before
    # With it, ours does the same as SGLang's.
    processor._handle_finish_state_updated_req(req, batch, None, 0, info)
    assert req.customized_info == {"seen": [7]}
