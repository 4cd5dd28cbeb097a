"""Attention that reads shared prefixes once, in front of one of SGLang's backends.

The backend is SGLang's own with another way to run some steps. Before a forward the
scheduler leaves here which requests share what (:mod:`.prefix_groups`);
:mod:`.attention_plans` says whether reading each shared prefix once pays. Where it does
not, and for prompts that nobody decodes beside, the step runs as SGLang would run it.
Decodes in CUDA graphs are captured in both ways (:mod:`.graph_variants`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    SharedReadEnds,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_utils.capture_mode import (
    get_capture_attention_variant,
)
from sglang.srt.runtime_context import get_parallel, get_schedule

from sgl_kernel_ext.shared_prefix_attention import (
    Planner,
    run,
    run_reference,
    try_out,
)

from ..errors import ConfigError, EngineError
from .attention_checks import attention_layers
from .attention_plans import Step, StepPlans
from .cascade import Cascade
from .graph_variants import ALONE, SHARED
from .prefix_groups import NO_GROUPS, PrefixGroups

logger = logging.getLogger(__name__)

# Nodes of the forest per request, at most; more are read without sharing.
NODES_PER_REQUEST = 4


def share(backend: Any, model_runner: Any) -> None:
    """Have one of SGLang's attention backends share prefixes.

    Raises:
        ConfigError: the setting ``attention`` asks for what this machine does not have.
        EngineError: on this device the kernels fail, or compute something else; the
            model's heads are more than they take; there is no memory for them.
    """
    kind = type(backend)
    backend.__class__ = type(f"Shared{kind.__name__}", (SharedPrefixMixin, kind), {})
    try:
        backend.set_up_sharing(model_runner)
    except ConfigError:
        backend.__class__ = kind
        raise
    except Exception as error:
        backend.__class__ = kind
        raise EngineError(
            "shared prefixes cannot be read once on this machine"
            f" ({type(error).__name__}: {error}); choose another --attention-backend, "
            'or the setting "attention": "stock".'
        ) from error
    logger.info(
        "Prefixes that decodes share are read once, by %s, in front of SGLang's %s.",
        backend.implementation.name,
        kind.__name__,
    )


class Implementation(NamedTuple):
    """What executes plans.

    run: as ``sgl_kernel_ext.shared_prefix_attention.run``, once for each layer.
    prepare: with a step and the page table, once before its layers; None: not needed.
    capturable: whether a CUDA graph may hold it.
    """

    name: str
    run: Callable[..., None]
    prepare: Callable[..., None] | None = None
    capturable: bool = False


def _implementation(model_runner: Any, planner: Planner) -> Implementation:
    chosen = model_runner.server_args.offline_config.attention
    if chosen == "auto":
        chosen = "triton" if planner.device.type == "cuda" else "torch"
    if chosen == "torch":
        return Implementation(chosen, run_reference)
    if planner.device.type != "cuda":
        raise ConfigError(
            f'attention="{chosen}" needs a GPU, and this is a {planner.device.type}; '
            'leave "auto".'
        )
    if chosen == "triton":
        return Implementation(chosen, run, capturable=True)
    cascade = Cascade(
        num_q_heads=planner.num_q_heads,
        num_kv_heads=planner.num_kv_heads,
        head_dim=planner.head_dim,
        dtype=planner.dtype,
        # All layers have the same, or the cascade says so when it runs.
        scale=attention_layers(model_runner.model)[0].scaling,
        device=planner.device,
    )

    def prepare(step: Step, table: torch.Tensor) -> None:
        plan, q_len, kv_len, groups = step
        cascade.prepare(plan, q_len, kv_len, groups.table_row, groups.node_end, table)

    return Implementation(chosen, cascade.run, prepare)


class SharedPrefixMixin(AttentionBackend):  # type: ignore[misc]
    """In front of one of SGLang's backends: takes the steps in which sharing pays.

    Attributes:
        groups: of the next forward; the scheduler sets it.
        graph: of the next replay; :class:`.graph_variants.ShareVariants` sets it.
        implementation: what executes plans.
        plans: of the steps.
    """

    shares_prefixes = True
    # Plans are made from the lengths on the host.
    needs_cpu_seq_lens = True
    groups: PrefixGroups = NO_GROUPS
    graph: str = ALONE
    implementation: Implementation
    plans: StepPlans
    _step: Step | None = None
    _grid: int | None = None

    def set_up_sharing(self: Any, model_runner: Any) -> None:
        """Make the planners, and try the kernels out on this device.

        Raises:
            ConfigError, EngineError: see :func:`share`.
        """
        config = model_runner.model_config
        tp_size = get_parallel().attn_tp_size
        pool = model_runner.token_to_kv_pool
        self._kv = pool
        self._slots = model_runner.req_to_token_pool.req_to_token
        most_requests = int(self._slots.shape[0])
        num_kv_heads = config.get_num_kv_heads(tp_size)

        def planner(max_tokens: int, max_tile: int, **more: Any) -> Planner:
            return Planner(
                num_q_heads=config.get_num_attention_heads(tp_size),
                num_kv_heads=num_kv_heads,
                head_dim=config.head_dim,
                dtype=pool.dtype,
                page_size=1,  # req_to_token names the slot of each token
                device=self._slots.device,
                max_requests=most_requests,
                max_tokens=max_tokens,
                max_nodes=NODES_PER_REQUEST * most_requests,
                max_tile=max_tile,
                **more,
            )

        mixed = None
        if get_schedule().enable_mixed_chunk:
            # Prompts come in chunks beside the decodes. One step follows the other, so
            # both kinds have their partial results in the same place.
            chunk = max(0, int(get_schedule().chunked_prefill_size or 0))
            mixed = planner(most_requests + chunk, 128)
            decodes = planner(most_requests, 64, workspace=mixed.workspace)
        else:
            decodes = planner(most_requests, 64)
        self.implementation = _implementation(model_runner, decodes)
        if self.implementation.run is run:
            for each in filter(None, (decodes, mixed)):
                try_out(each, table_width=int(self._slots.shape[1]))
        token_bytes = 2 * num_kv_heads * config.head_dim * pool.dtype.itemsize
        self.plans = StepPlans(decodes, mixed, int(pool.layer_num), token_bytes)
        self._fixed_grid = decodes.fixed_grid

    # SGLang's interface ---------------------------------------------------------------

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """A step that shares reads ``req_to_token`` in every layer, and a prefix
        through one request's row: that row must not be given away before the last
        layer has run."""
        if len(self.groups.node_end) or self._step is not None:
            return SharedReadEnds.UNKNOWN
        return super().shared_read_ends(fm)

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        """A step that no graph runs, or a prompt whose attention is outside of one.

        SGLang runs a mixed batch as an extend; that its groups are known tells it
        from a batch of prompts alone.
        """
        groups, self.groups = self.groups, NO_GROUPS
        self._grid = None
        self._step = self.plans.eager(groups, forward_batch)
        if self._step is None:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        elif self.implementation.prepare is not None:
            self.implementation.prepare(self._step, self._slots)

    def init_forward_metadata_out_graph(
        self: Any, forward_batch: Any, in_capture: bool = False
    ) -> None:
        groups, self.groups = self.groups, NO_GROUPS
        graph, self.graph = self.graph, ALONE
        self._step = self._grid = None
        decodes = forward_batch.forward_mode.is_decode()
        if in_capture:
            graph = get_capture_attention_variant()
        if decodes and graph == SHARED:
            self._grid = self._fixed_grid
            if in_capture:
                self._step = self.plans.for_capture(forward_batch.batch_size)
            else:
                self._step = self.plans.for_graph(groups, forward_batch)
            return
        if decodes and not in_capture:
            self.plans.without_plan(len(groups.table_row), forward_batch)
        super().init_forward_metadata_out_graph(  # type: ignore[misc]
            forward_batch, in_capture
        )

    def forward_decode(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._step is None:
            return super().forward_decode(  # type: ignore[misc]
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._step is None:
            return super().forward_extend(  # type: ignore[misc]
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool,
        more: dict[str, Any],
    ) -> Any:  # fmt: skip
        wanted = [name for name, value in more.items() if not _is_off(value)]
        if wanted:
            raise EngineError(
                f"a layer of this model attends with {', '.join(wanted)}, which reading "
                'shared prefixes once does not know; set "attention": "stock".'
            )
        if save and k is not None:
            self._kv.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        shape = (-1, layer.tp_q_head_num, layer.qk_head_dim)
        q = q.reshape(shape)
        out = torch.empty_like(q)
        options = {} if self._grid is None else {"grid": self._grid}
        self.implementation.run(
            self._step.plan,
            q,
            self._kv.get_key_buffer(layer.layer_id),
            self._kv.get_value_buffer(layer.layer_id),
            self._slots,
            forward_batch.seq_lens,
            out,
            layer.scaling,
            **options,
        )
        return out.flatten(1)


def _is_off(value: Any) -> bool:
    """Whether an option of attention is not in use."""
    return value is None or value is False
