"""Where the KV of prompts goes that prefill servers compute, and who waits there.

SGLang's queues of a decode server reserve a row and KV on the device for each request before
its prompt is computed. Here they reserve a part of the pool of host memory that offloaded
requests have, too. A request waits there among those of its job and joins when the plan says
so, like one that was offloaded. So prompts are computed ahead of the decodes, and policies that
batch requests by the length of their KV choose among all that are there.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVTransferDestination
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
from sglang.srt.disaggregation.utils import _is_fake_transfer, prepare_abort
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from ...errors import EngineError
from ..compat.scheduler_types import Req
from ..scheduler.engine_jobs import EngineJobs
from ..scheduler.kv.kv_manager import KvManager
from ..scheduler.kv.offloading import OffloadedRequest
from .tcp.tcp_manager import Indices


class Reception:
    """Requests whose prompts other servers compute, until they join.

    Raises:
        EngineError: there is no pool of host memory.
    """

    def __init__(self, jobs: EngineJobs, kv_manager: KvManager) -> None:
        offloader = jobs.offloader
        if offloader is None or not offloader.room.num_pages:
            raise EngineError(
                "A decode server that follows plans receives KV into host memory, and "
                "there is no pool for it (see the log above); set offload_bytes, or give "
                """--offline-batch-config '{"scheduler": "stock"}'."""
            )
        self._offloader = offloader
        self._kv_manager = kv_manager
        self._registry = jobs.registry
        self._page_size = jobs.page_size
        # The KV of online requests that wait.
        self.online: dict[str, OffloadedRequest] = {}

    @property
    def num_tokens(self) -> int:
        """Most tokens of KV that there is ever room for."""
        return self._offloader.room.num_pages * self._page_size

    def reserve(self, req: Req, num_tokens: int) -> Indices | None:
        """Pages ``[n]`` for a prompt, or None if it has to wait for room.

        Prompts of jobs take half of the pool at most, or all of it if nobody else has
        any. The rest is for requests that make room, and for online requests.
        """
        room = self._offloader.room
        pages = -(-num_tokens // self._page_size)
        used = room.num_pages - room.num_free
        if pages > room.num_free:
            return None
        if used and used + pages > room.num_pages // 2 and self._registry.of_job(req):
            return None
        runs = self._offloader.reserve(req.rid, num_tokens)
        numbers = [np.arange(first, first + length) for first, length in runs]
        return np.concatenate(numbers, dtype=np.int64)

    def release(self, req: Req) -> None:
        """The KV of a request does not come, or is not wanted any more."""
        self._offloader.forget(req.rid)
        self.gone(req)

    def gone(self, req: Req) -> None:
        """A request failed before its KV came."""
        planned = self._registry.planned(req)
        if planned is not None:  # it was to be computed again
            self._registry.skip(*planned)

    def arrived(self, req: Req, num_tokens: int) -> bool:
        """The KV of a request is on the host, where it waits. Whether it is of a job."""
        runs = self._offloader.room.runs(req.rid)
        kv = self._offloader.received(req, num_tokens, runs)
        if self._registry.enqueue(req):
            self._kv_manager.received(kv)
            return True
        self.online[req.rid] = kv
        return False

    def drop_online(self, req: Req) -> None:
        """An online request that waits was aborted."""
        self._offloader.drop(self.online.pop(req.rid))

    def give_up_online(self, req: Req) -> Req:
        """Drop an online request's KV, which is to be computed again."""
        return self._offloader.give_up(self.online.pop(req.rid))


class HostPreallocQueue(DecodePreallocQueue):  # type: ignore[misc]
    """Requests that wait for room on the host, in the order in which they came."""

    queue: list[Any]
    pending_reqs: list[Any]

    def pop_preallocated(self, **_: object) -> tuple[list[Any], list[Any]]:
        """Reserve room, and tell the prefill servers so.

        Returns:
            The requests whose KV comes from now on, and those that failed.
        """
        self._resolve_pending_reqs()
        self._update_handshake_waiters()
        failed = [
            each
            for each in self.queue
            if isinstance(each.req.finished_reason, FINISH_ABORT)
        ]
        for each in failed:
            self._answer_failed(each)
        reserved = self._reserve_in_order([e for e in self.queue if e not in failed])
        gone = {id(each) for each in (*failed, *reserved)}
        self.queue = [each for each in self.queue if id(each) not in gone]
        self.pending_reqs = [e for e in self.pending_reqs if id(e) not in gone]
        return reserved, failed

    def _reserve_in_order(self, queue: list[Any]) -> list[Any]:
        reserved = []
        jobs_wait = False
        for each in queue:
            if not each.waiting_for_input:
                continue
            if self.req_to_metadata_buffer_idx_allocator.available_size() <= 0:
                break
            of_job = self.scheduler.jobs.registry.of_job(each.req)
            if of_job and jobs_wait:
                continue
            tokens = self._rebootstrap_prefill_len(each.req)
            pages = self.scheduler.reception.reserve(each.req, tokens)
            if pages is None and not of_job:
                break
            if pages is None:
                jobs_wait = True  # online requests may still have room
                continue
            each.host_staged = True
            # Nothing comes for a health check.
            fake = _is_fake_transfer(each.req)
            to_host = {} if fake else {"destination": KVTransferDestination.HOST}
            # The pages are pages already, each of one.
            self._send_kv_metadata(each, pages, 1, None, decode_prefix_len=0, **to_host)
            reserved.append(each)
        return reserved

    def _submit_prefill_recompute(self, decode_req: Any) -> None:
        """SGLang's, and with the request's adapter, which it leaves out."""
        req = decode_req.req
        if req.lora_id is None or _is_fake_transfer(req):
            super()._submit_prefill_recompute(decode_req)
            return
        adapters = self.scheduler.tp_worker.model_runner.lora_manager.lora_refs
        payload = req.build_rebootstrap_payload()
        payload["lora_path"] = adapters[req.lora_id].lora_name
        # SGLang appends the id, which only this server has.
        payload["extra_key"] = req.extra_key.removesuffix(req.lora_id) or None
        self.kv_manager.submit_prefill_recompute(decode_req.kv_receiver, payload)

    def _transfer_page_indices(
        self, decode_req: Any, kv_indices: Indices, page_size: int
    ) -> Indices:
        return kv_indices.astype(np.int32)

    def _answer_failed(self, failed: Any) -> None:
        req = failed.req
        if not getattr(req, "finished_output", False):
            self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        failed.kv_receiver.clear()
        failed.kv_receiver = None
        self.scheduler.reception.gone(req)

    def _check_if_req_exceed_kv_capacity(self, req: Any) -> bool:
        """SGLang's, and for a prompt that the host pool cannot hold."""
        reception = self.scheduler.reception
        tokens, most = self._rebootstrap_prefill_len(req), reception.num_tokens
        if not super()._check_if_req_exceed_kv_capacity(req):
            if tokens <= most:
                return False
            message = (
                f"The prompt of request {req.rid} has {tokens} tokens, and the host pool "
                f"holds {most}; set a larger offload_bytes."
            )
            prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
            self.scheduler.output_streamer.stream_output([req], req.return_logprob)
        reception.gone(req)
        return True


class HostTransferQueue(DecodeTransferQueue):  # type: ignore[misc]
    """Requests whose KV is on its way to the host."""

    def _release_request(self, decode_req: Any) -> None:
        self.scheduler.reception.release(decode_req.req)
