"""SGLang's attention with shared prefixes read once: ``--attention-backend shared_prefix``.

The backend is one of SGLang's own with another way to run some steps. Before a forward
the scheduler leaves here which requests share what (:mod:`.prefix_groups`); the plan of
``sgl_kernel_ext.shared_prefix_attention`` then says whether reading each shared prefix
once pays. Where it does not, and for prompts that nobody decodes beside, the step runs
as SGLang would run it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    SharedReadEnds,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel

from sgl_kernel_ext.shared_prefix_attention import (
    Plan,
    Planner,
    TooLarge,
    run,
    run_reference,
)

from ..errors import ConfigError, EngineError
from .attention_checks import check_model
from .prefix_groups import PrefixGroups

logger = logging.getLogger(__name__)

# Modelled time without sharing over that with it, from which on a plan is taken.
MIN_GAIN = 1.05
# Nodes of the forest per request, at most; more are read without sharing.
NODES_PER_REQUEST = 4

NO_GROUPS = PrefixGroups(*(np.zeros(0, np.int32) for _ in range(4)))


def make_backend(model_runner: Any) -> Any:
    """SGLang's factory: the platform's own backend, which learns to share.

    Raises:
        ConfigError: the model's attention is of a kind that the kernels do not have.
    """
    check_model(model_runner)
    stock = "triton" if model_runner.device == "cuda" else "torch_native"
    backend = ATTENTION_BACKENDS[stock](model_runner)
    kind = type(backend)
    backend.__class__ = type(f"Shared{kind.__name__}", (SharedPrefixMixin, kind), {})
    backend.set_up_sharing(model_runner)
    return backend


def _implementation(model_runner: Any) -> Callable[..., None]:
    chosen = model_runner.server_args.offline_config.attention
    on_gpu = model_runner.device == "cuda"
    if chosen == "triton" and not on_gpu:
        raise ConfigError(
            f'attention="triton" needs a GPU, and this is a {model_runner.device}; '
            'leave "auto".'
        )
    implementation: Callable[..., None]
    implementation = run if on_gpu and chosen != "torch" else run_reference
    logger.info("Shared prefixes are read once, by %s.", implementation.__module__)
    return implementation


class SharingCounts:
    """What sharing has brought so far.

    steps, shared_steps: forwards that could have shared, and those that did.
    kv_bytes, kv_bytes_unshared: read from the KV cache in them, in all layers, and
        what that would have been with every request reading all of its own.
    """

    def __init__(self) -> None:
        self.steps = self.shared_steps = 0
        self.kv_bytes = self.kv_bytes_unshared = 0

    def count(self, unshared: int, saved: int) -> None:
        """One forward; bytes in all layers."""
        self.steps += 1
        self.shared_steps += saved > 0
        self.kv_bytes += unshared - saved
        self.kv_bytes_unshared += unshared


class SharedPrefixMixin(AttentionBackend):  # type: ignore[misc]
    """In front of one of SGLang's backends: takes the steps in which sharing pays.

    Attributes:
        groups: of the next forward; the scheduler sets it.
        counts: what was read and saved.
    """

    shares_prefixes = True
    # Plans are made from the lengths on the host.
    needs_cpu_seq_lens = True
    groups: PrefixGroups = NO_GROUPS

    def set_up_sharing(self: Any, model_runner: Any) -> None:
        config = model_runner.model_config
        tp_size = get_parallel().attn_tp_size
        pool = model_runner.token_to_kv_pool
        self._slots = model_runner.req_to_token_pool.req_to_token
        self._kv = model_runner.token_to_kv_pool
        self._num_layers = int(pool.layer_num)
        self._most_requests = int(self._slots.shape[0])
        self.counts = SharingCounts()
        self._plan: Plan | None = None
        self._planned: PrefixGroups | None = None
        self._grid: int | None = None
        self._run = _implementation(model_runner)

        num_kv_heads = config.get_num_kv_heads(tp_size)
        token_bytes = 2 * num_kv_heads * config.head_dim * pool.dtype.itemsize
        self._token_bytes = token_bytes * self._num_layers

        def planner(max_tokens: int, max_tile: int) -> Planner:
            return Planner(
                num_q_heads=config.get_num_attention_heads(tp_size),
                num_kv_heads=num_kv_heads,
                head_dim=config.head_dim,
                dtype=pool.dtype,
                page_size=1,  # req_to_token names the slot of each token
                device=self._slots.device,
                max_requests=self._most_requests,
                max_tokens=max_tokens,
                max_nodes=NODES_PER_REQUEST * self._most_requests,
                max_tile=max_tile,
            )

        self._decode_planner = planner(self._most_requests, 64)
        # Prompts come in chunks beside the decodes.
        max_mixed = self._most_requests + int(
            model_runner.server_args.chunked_prefill_size or 0
        )
        self._mixed_planner: Planner | None = None
        if model_runner.server_args.enable_mixed_chunk:
            self._mixed_planner = planner(max_mixed, 128)

    # SGLang's interface ---------------------------------------------------------------

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Every layer reads ``req_to_token``, and a prefix through one request's row:
        that row must not be given away before the last layer has run."""
        return SharedReadEnds.UNKNOWN

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        self._plan, self._grid = None, None
        if mode.is_decode() or mode.is_mixed():
            self._plan = self._plan_step(forward_batch)
        self.groups = NO_GROUPS
        if self._plan is None:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]

    def init_forward_metadata_out_graph(
        self: Any, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """A captured graph has one way to attend: ours, whatever is shared."""
        self._plan, self._grid = None, None
        if not forward_batch.forward_mode.is_decode():
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture
            )
            return
        if self._run is run_reference:
            raise ConfigError(
                'attention="torch" cannot be captured in a CUDA graph; add '
                "--disable-cuda-graph."
            )
        groups, kv_len = self.groups, _host_lengths(forward_batch)
        self.groups = NO_GROUPS
        num_padding = int(getattr(forward_batch, "num_padding", 0) or 0)
        if in_capture:
            groups = _alone(np.zeros(len(kv_len), np.int32))
        elif len(groups.table_row) != len(kv_len) - num_padding:
            raise EngineError(
                f"the scheduler announced {len(groups.table_row)} rows for a decode "
                f"step of {len(kv_len) - num_padding}; add --disable-cuda-graph."
            )
        # Rows of padding are computed too, or what was there before would go on.
        groups = self._padded(groups, len(kv_len))
        self._plan = self._planned_again(groups, kv_len)
        if self._plan is None:
            self._plan = self._planned_again(_alone(groups.table_row), kv_len)
        assert self._plan is not None
        self._grid = self._decode_planner.fixed_grid
        if not in_capture:
            self._count(kv_len, self._plan)

    def forward_decode(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._plan is None:
            return super().forward_decode(  # type: ignore[misc]
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._plan is None:
            return super().forward_extend(  # type: ignore[misc]
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    # Ours -----------------------------------------------------------------------------

    def _attend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool
    ) -> Any:
        if save and k is not None:
            self._kv.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        shape = (-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty_like(q)
        options = {} if self._grid is None else {"grid": self._grid}
        self._run(
            self._plan,
            q.view(shape),
            self._kv.get_key_buffer(layer.layer_id),
            self._kv.get_value_buffer(layer.layer_id),
            self._slots,
            forward_batch.seq_lens,
            out.view(shape),
            layer.scaling,
            **options,
        )
        return out

    def _plan_step(self: Any, forward_batch: Any) -> Plan | None:
        """The plan of an eager step; None if the step is better off without one."""
        groups, kv_len = self.groups, _host_lengths(forward_batch)
        if len(groups.table_row) != len(kv_len):
            return None  # a batch that the scheduler did not make, at warm-up
        plan: Plan | None = None
        if len(groups.node_end):
            if forward_batch.forward_mode.is_decode():
                plan = self._planned_again(groups, kv_len)
            else:
                plan = self._plan_mixed(forward_batch, groups, kv_len)
        if plan is not None and plan.predicted_gain < MIN_GAIN:
            plan = None
        self._count(kv_len, plan)
        return plan

    def _padded(self: Any, groups: PrefixGroups, num_rows: int) -> PrefixGroups:
        """With rows behind that share nothing; the same object for the same groups."""
        missing = num_rows - len(groups.table_row)
        if not missing:
            return groups
        if self._padded_of is not groups or len(self._padded_to.table_row) != num_rows:
            self._padded_of = groups
            self._padded_to = groups._replace(
                table_row=np.pad(groups.table_row, (0, missing)),
                request_node=np.pad(
                    groups.request_node, (0, missing), constant_values=-1
                ),
            )
        return self._padded_to

    _padded_of = _padded_to = NO_GROUPS

    def _planned_again(self: Any, groups: PrefixGroups, kv_len: Any) -> Plan | None:
        """The last plan where the same requests have only grown, else a new one."""
        plan = self._last
        if plan is None or groups is not self._planned or not plan.still_good(kv_len):
            q_len = np.ones(len(kv_len), np.int32)
            plan = _plan(self._decode_planner, q_len, kv_len, groups)
            self._last, self._planned = plan, groups
        return plan

    _last: Plan | None = None

    def _plan_mixed(
        self: Any, forward_batch: Any, groups: PrefixGroups, kv_len: Any
    ) -> Plan | None:
        if self._mixed_planner is None:
            return None
        q_len = np.array(forward_batch.extend_seq_lens_cpu, np.int32)
        return _plan(self._mixed_planner, q_len, kv_len, groups)

    def _count(self: Any, kv_len: Any, plan: Plan | None) -> None:
        saved = 0
        if plan is not None:
            saved = (plan.kv_bytes_unshared - plan.kv_bytes) * self._num_layers
        self.counts.count(int(kv_len.sum()) * self._token_bytes, saved)


def _plan(
    planner: Planner, q_len: Any, kv_len: Any, groups: PrefixGroups
) -> Plan | None:
    """None if there is more of anything than the planner has room for."""
    try:
        return planner.plan(
            q_len,
            kv_len,
            groups.table_row,
            groups.node_parent,
            groups.node_end,
            groups.request_node,
        )
    except TooLarge as error:
        logger.warning("A step reads its shared prefixes alone: %s", error)
        return None


def _alone(table_row: Any) -> PrefixGroups:
    """Groups of requests that share nothing."""
    alone = np.full(len(table_row), -1, np.int32)
    return PrefixGroups(table_row, alone, NO_GROUPS.node_parent, NO_GROUPS.node_end)


def _host_lengths(forward_batch: Any) -> Any:
    lengths = forward_batch.seq_lens_cpu
    if lengths is None:  # a batch that exists to capture a graph
        return np.ones(forward_batch.batch_size, np.int32)
    return lengths.numpy().astype(np.int32)
