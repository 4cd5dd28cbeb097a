"""Attention that reads shared prefixes once, in front of one of SGLang's backends.

Before a forward, the scheduler sets the prefixes that its requests share
(:mod:`.prefix_forest`), and :mod:`.attention_plans` decides whether reading each of them once
is faster. If it is not, or if the step has no decodes, SGLang's backend runs it. Drafts that
follow one another are verified like decodes.

For decodes in CUDA graphs, SGLang captures a graph for each label of :class:`ShareVariants`,
with and without shared prefixes, and has it choose one before each replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    SharedReadEnds,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVCache, KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import (
    get_capture_attention_variant,
)
from sglang.srt.runtime_context import get_schedule, get_spec

from sgl_kernel_ext import shared_prefix_attention as kernels
from sgl_kernel_ext.shared_prefix_attention import AttentionPlanner

from ...errors import ConfigError, EngineError
from .attention_plans import Step, StepPlans, sharing_backends
from .prefix_forest import NO_GROUPS, PrefixForest

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

SHARED, ALONE = "shared", "alone"


class ShareVariants:
    """SGLang's ``AttentionGraphVariants`` for one shared-prefix backend."""

    capture_labels = (ALONE, SHARED)

    def __init__(self, backend: SharedPrefixMixin) -> None:
        self._backend = backend

    def select(self, forward_batch: ForwardBatch) -> str:
        """The graph for the next decode batch, which is also set on the backend."""
        backend = self._backend
        # Once drafts are prepared for verification, SGLang asks again.
        if forward_batch.needs_forward_metadata_init():
            pays = backend.plans.pays(backend.groups, forward_batch)
            backend.graph = SHARED if pays else ALONE
        return backend.graph


def variants_for(
    original: Callable[..., object],
    model_runner: ModelRunner,
    capture_forward_mode: ForwardMode,
    *args: object,
    **kw: object,
) -> object:
    """AROUND hook on SGLang's choice of the variants of a model's decode graphs.

    Raises:
        ConfigError: the implementation of sharing cannot be captured in a graph.
    """
    found = original(model_runner, capture_forward_mode, *args, **kw)
    mode = capture_forward_mode
    backend = next(iter(sharing_backends(model_runner.attn_backend, mode)), None)
    if found is not None or backend is None or not backend.plans.width(mode):
        return found
    if not backend.implementation.capturable:
        raise ConfigError(
            f'attention="{backend.implementation.name}" cannot be captured in a CUDA '
            "graph; add --disable-cuda-graph."
        )
    return ShareVariants(backend)


logger = logging.getLogger(__name__)

# Most heads of a tile that read the same latents.
LATENT_HEADS = 64

# Most nodes of the forest per request. A step with more does not share.
NODES_PER_REQUEST = 4


class Layers(NamedTuple):
    """The attention layers of a model that read shared prefixes once, with heads of one
    shape, and why each of the others does not.

    latent: they read latents, in which K and V are together.
    """

    shared: list[RadixAttention]
    why_not: list[str]
    latent: bool = False


def heads_of(layer: RadixAttention) -> tuple[int, int, int, int]:
    """Query heads, KV heads, and the sizes of K's and V's, on this rank."""
    return (
        layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
    )  # fmt: skip


def share(backend: AttentionBackend, model_runner: ModelRunner, layers: Layers) -> None:
    """Make one of SGLang's attention backends read shared prefixes once, in these layers.

    Raises:
        ConfigError: this machine does not support the setting ``attention``.
        EngineError: on this device the kernels fail or compute wrong values, they do
            not support the number of heads, or there is no memory for them.
    """
    kind = type(backend)
    backend.__class__ = type(f"Shared{kind.__name__}", (SharedPrefixMixin, kind), {})
    sharing = cast("SharedPrefixMixin", backend)
    try:
        sharing.set_up_sharing(model_runner, layers)
    except Exception as error:
        backend.__class__ = kind
        if isinstance(error, ConfigError):
            raise
        raise EngineError(
            "shared prefixes cannot be read once on this machine"
            f" ({type(error).__name__}: {error}); choose another --attention-backend, "
            'or the setting "attention": "stock".'
        ) from error
    logger.info(
        f"Prefixes that decodes share are read once in {len(layers.shared)} of "
        f"{len(layers.shared) + len(layers.why_not)} layers, by {sharing.implementation.name}, in front of "
        f"SGLang's {kind.__name__}."
        + "".join(f" Not with {each}." for each in dict.fromkeys(layers.why_not))
    )


class Implementation(NamedTuple):
    """The kernels that execute plans.

    run: called for each layer, as ``sgl_kernel_ext.shared_prefix_attention.run``.
    capturable: whether it may be captured in a CUDA graph.
    """

    name: str
    run: Callable[..., None]
    capturable: bool = False


def _implementation(
    model_runner: ModelRunner, planner: AttentionPlanner
) -> Implementation:
    chosen = model_runner.server_args.offline_config.attention
    if chosen == "auto":
        chosen = "triton" if planner.device.type == "cuda" else "torch"
    if chosen == "torch":
        return Implementation(chosen, kernels.run_reference)
    if planner.device.type != "cuda":
        raise ConfigError(
            f'attention="{chosen}" needs a GPU, and this is a {planner.device.type}; '
            'set "auto".'
        )
    return Implementation(chosen, kernels.run, capturable=True)


def _drafts_in_a_row() -> int:
    """Tokens of each request that a step verifies, 0 without drafts and for trees of them."""
    spec = get_spec()
    # SGLang has the breadth of NGRAM there, too.
    if spec.speculative_algorithm is None or spec.speculative_eagle_topk != 1:
        return 0
    width = int(spec.speculative_num_draft_tokens)
    # A plan of one token each ends at SGLang's lengths, which do not count it.
    return width if width > 1 else 0


class SharedPrefixMixin(AttentionBackend):  # type: ignore[misc]
    """In front of one of SGLang's backends: runs the steps in which sharing is faster.

    groups: the shared prefixes of the next forward, set by the scheduler.
    graph: the label of the CUDA graph of the newest replay, set by :class:`ShareVariants`.
    """

    shares_prefixes = True
    groups: PrefixForest = NO_GROUPS
    graph: str = ALONE
    implementation: Implementation
    plans: StepPlans
    _kv: KVCache
    _layers: Layers
    _slots: torch.Tensor
    _step: Step | None = None
    _grid: tuple[int, ...] | None = None
    _scaled: bool = False

    def set_up_sharing(self, model_runner: ModelRunner, layers: Layers) -> None:
        """Make the planners, and test the kernels on this device. See :func:`share`."""
        self._layers = layers
        self._kv = pool = model_runner.token_to_kv_pool
        self._slots = model_runner.req_to_token_pool.req_to_token
        most_requests = int(self._slots.shape[0])
        num_q_heads, num_kv_heads, head_dim, v_head_dim = heads_of(layers.shared[0])
        if layers.latent:
            # All heads read the same latents, and no more of them together than fit a tile.
            num_kv_heads = next(
                number for number in range(1, num_q_heads + 1)
                if not num_q_heads % number and num_q_heads // number <= LATENT_HEADS
            )  # fmt: skip
        planner = partial(
            AttentionPlanner,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            latent=layers.latent,
            dtype=model_runner.dtype,
            kv_dtype=pool.dtype,
            page_size=1,  # req_to_token names the slot of each token
            device=self._slots.device,
            max_requests=most_requests,
            max_nodes=NODES_PER_REQUEST * most_requests,
        )
        schedule, drafts = get_schedule(), _drafts_in_a_row()
        tokens = most_requests * drafts
        # Of a step with prompts, SGLang's model chooses whether its layers read latents.
        if not drafts and schedule.enable_mixed_chunk and not layers.latent:
            # Steps compute chunks of prompts together with decodes.
            tokens = most_requests + max(0, int(schedule.chunked_prefill_size or 0))
        # Steps run one after the other, so both kinds share one workspace for partial results.
        chunks = planner(max_tokens=tokens) if tokens else None
        workspace = chunks.workspace if chunks else None
        decodes = planner(max_tokens=most_requests, workspace=workspace)
        self.implementation = _implementation(model_runner, decodes)
        if self.implementation.run is kernels.run:
            named = model_runner.model.named_parameters()
            sinks = next((each for name, each in named if name.endswith("sinks")), None)
            features = kernels.Features(layers.shared[0].logit_cap, sinks)
            for each in filter(None, (decodes, chunks)):
                kernels.try_out(each, int(self._slots.shape[1]), features)
        self.plans = StepPlans(decodes, chunks, len(layers.shared), drafts)
        self._scaled = decodes.quantised and not isinstance(
            self, TorchNativeAttnBackend
        )
        # Plans are made from lengths on the host. Some backends want none of drafts.
        self.needs_cpu_seq_lens = True

    # SGLang's interface ---------------------------------------------------------------

    def shared_read_ends(self, fm: object) -> SharedReadEnds:
        """Keep rows of ``req_to_token``, which a step that shares reads in every layer."""
        if len(self.groups.node_end) or self._step is not None:
            return SharedReadEnds.UNKNOWN
        return super().shared_read_ends(fm)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a step without a CUDA graph, or with its attention outside of one.

        SGLang runs a mixed batch, which has groups, as an extend.
        """
        groups, self.groups = self.groups, NO_GROUPS
        self._grid = None
        self._step = self.plans.eager(groups, forward_batch)
        if self._step is None or self._layers.why_not:
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        groups, self.groups = self.groups, NO_GROUPS
        graph = get_capture_attention_variant() if in_capture else self.graph
        self._step = self._grid = None
        if graph == SHARED and self.plans.width(forward_batch.forward_mode):
            self._step = self.plans.for_graph(groups, forward_batch)
            self._grid = self._step.plan.planner.fixed_grid
            if not self._layers.why_not:
                return
        elif len(groups.table_row):
            self.plans.without_plan(groups, forward_batch)
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _create_decode_wrappers(self, bs: int, num_tokens: int) -> Any:
        """FlashInfer's plans of a graph: one for both kinds of graph of a batch size.

        It finds them by the size, so the kind captured first would lose its own.
        """
        if get_capture_attention_variant() == SHARED:
            return self.decode_cuda_graph_metadata[bs]
        return super()._create_decode_wrappers(bs, num_tokens)

    def _create_prefill_wrappers(self, bs: int, use_custom_mask: bool = False) -> Any:
        """The same for drafts."""
        if get_capture_attention_variant() == SHARED:
            return self.prefill_cuda_graph_metadata[bs]
        return super()._create_prefill_wrappers(bs, use_custom_mask)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._share_or_leave(super().forward_decode, *args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._share_or_leave(super().forward_extend, *args, **kwargs)

    def _share_or_leave(
        self, stock: Callable[..., torch.Tensor],
        q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None,
        layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        if self._step is None or layer not in self._layers.shared:
            return stock(q, k, v, layer, forward_batch, save_kv_cache, **options)
        sinks = options.pop("sinks", None)
        q_rope = k_rope = None
        if self._layers.latent:
            # Some models hand in the rotary part of latents apart.
            q_rope, k_rope = options.pop("q_rope", None), options.pop("k_rope", None)
        wanted = [k for k, x in options.items() if x is not None and x is not False]
        if wanted:
            raise EngineError(
                f"a layer of this model attends with {', '.join(wanted)}, which the "
                "kernels that read shared prefixes once do not support; set "
                '"attention": "stock".'
            )
        # Of KV in fp8. SGLang's native backend writes and reads it without.
        scales: tuple[float, ...] = ()
        if self._scaled and layer.k_scale is not None:
            scales = layer.k_scale_float, layer.v_scale_float
        if save_kv_cache and k is not None:
            place = KVWriteLoc(forward_batch.out_cache_loc, None)
            if k_rope is None:
                self._kv.set_kv_buffer(layer, place, k, v, *scales)
            else:
                self._kv.set_mla_kv_buffer(layer, place, k, k_rope)
        k_scale, v_scale = scales or (1.0, 1.0)
        heads = layer.tp_q_head_num
        q = q.reshape(len(q), heads, -1)
        if q_rope is not None:
            q = torch.cat([q, q_rope.reshape(len(q), heads, -1)], -1)
        out = q.new_empty(len(q), heads, layer.v_head_dim)
        grid = {} if self._grid is None else {"grid": self._grid}
        features = kernels.Features(layer.logit_cap, sinks, v_scale)
        kv_heads = self._step.plan.planner.num_kv_heads
        caches = (
            each.expand(-1, kv_heads, -1)
            for each in self._kv.get_kv_buffer(layer.layer_id)
        )
        self.implementation.run(
            self._step.plan, q, *caches, self._slots, forward_batch.seq_lens, out,
            layer.scaling * k_scale, features=features, **grid,
        )  # fmt: skip
        return out.flatten(1)
