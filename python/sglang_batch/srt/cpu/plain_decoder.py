"""Steps of decoders like Llama's on a CPU, without SGLang's modules between the kernels.

A decode step of a small model spends much of its time in Python: SGLang's modules call one
another, and tensors are split, viewed and copied between them. Here the layers of such a model
are a list, and a step calls the same kernels one after the other. Whatever SGLang's
modules do besides (adapters, quantization, ranks, hooks, captured states) is left to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec, get_parallel

from sgl_kernel_ext import token_layers as kernels
from sgl_kernel_ext.block_attention import LANES, block_size
from sgl_kernel_ext.host_kernels import DTYPES, array

from ...errors import UnsupportedSGLang
from ..compat.sglang_release import installed_release
from . import packed_linears, token_layers
from .cpu_attention import FastAttention

# What a step here does in the place of: methods of SGLang's models, and the digests of their
# code. Subclasses that keep them are alike.
_METHODS = {
    "LlamaModel.forward": "008baf35e8",
    "LlamaDecoderLayer.forward": "bbd184d2c7",
    "LlamaAttention.forward": "981707d0d7",
    "LlamaAttention.forward_prepare_native": "4e896e618f",
    "LlamaMLP.forward": "e1318bd1f1",
    "Qwen2Model.forward": "fd70c137af",
    "Qwen2DecoderLayer.forward": "bbd184d2c7",
    "Qwen2Attention.forward": "e4e817af4a",
    "Qwen2MLP.forward": "902ea5d118",
    "Qwen3Model.forward": "5a0d9b2ac0",
    "Qwen3DecoderLayer.forward": "42d478cb59",
    "Qwen3Attention.forward": "e61fa85176",
    "Qwen3Attention.forward_prepare_native": "95bcb86ca0",
}
_LINEARS = {"QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear"}
_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED)


class _Linear(NamedTuple):
    """weight: in oneDNN's layout."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linears.multiply(x, self.weight, self.bias)


class _Norm(NamedTuple):
    weight: np.ndarray
    epsilon: float


class _Layer(NamedTuple):
    """A layer, and the norm that follows it.

    head_norms: as :func:`kernels.rotate_and_store` takes them.
    k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``.
    """

    qkv: _Linear
    head_norms: tuple[np.ndarray, np.ndarray, float]
    rotary: RotaryEmbedding
    attention: RadixAttention
    k_cache: np.ndarray
    v_cache: np.ndarray
    o: _Linear
    mlp_norm: _Norm
    gate_up: _Linear
    down: _Linear
    next_norm: _Norm


class _IsOther(Exception):
    """The model is not of the kind whose steps are known here."""


def _only(*conditions: object) -> None:
    if not all(conditions):
        raise _IsOther


@cache
def _is_same(method: Callable[..., Any]) -> bool:
    """Whether a method has the code that a step here replaces."""
    name, module = method.__qualname__, method.__module__
    in_sglang = module.startswith("sglang.srt.models.")
    if name not in _METHODS or not in_sglang or hasattr(method, "__wrapped__"):
        return False
    owner, _, bare = name.partition(".")
    try:
        found = installed_release().find(f"{module}:{owner}", bare)
    except (PackageNotFoundError, UnsupportedSGLang):
        return False
    return found.digest == _METHODS[name]


def _is_known(module: Any) -> bool:
    names = ("forward", "forward_prepare_native")
    methods = (getattr(type(module), name, None) for name in names)
    return all(_is_same(method) for method in methods if method is not None)


def _linear(layer: Any, dtype: torch.dtype) -> _Linear:
    _only(type(layer).__name__ in _LINEARS and not layer.skip_bias_add)
    packed = packed_linears.packed_weight(layer)
    if packed is None or packed.dtype != dtype:
        raise _IsOther
    return _Linear(packed, layer.bias)


def _norm(layer: Any, width: int) -> _Norm:
    _only(
        type(layer) is RMSNorm and token_layers.is_plain_norm(layer),
        layer.weight.shape == (width,),
        layer.weight.dtype in DTYPES,
    )
    return _Norm(kernels.values_of(layer.weight), layer.variance_epsilon)


def _layer(layer: Any, next_norm: Any, dtype: torch.dtype, pool: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    _only(*map(_is_known, (layer, attention, mlp)), type(mlp.act_fn) is SiluAndMul)
    reads, rotary = attention.attn, attention.rotary_emb
    heads, kv_heads, dim = reads.tp_q_head_num, reads.tp_k_head_num, reads.qk_head_dim
    _only(
        reads.attn_type == AttentionType.DECODER,
        not reads.is_cross_attention and not reads.logit_cap,
        reads.k_scale is None and reads.v_scale is None,
        reads.v_head_dim == rotary.head_size == dim,
        dim % 4 == 0 and heads <= LANES * kv_heads,
        type(rotary).forward is RotaryEmbedding.forward,
        token_layers.rotates_plainly(type(rotary)),
        not hasattr(rotary, "sin_cos_cache"),
        rotary.cos_sin_cache.dtype in DTYPES,
    )
    k_cache, v_cache = pool.get_kv_buffer(reads.layer_id)
    for kv in (k_cache, v_cache):
        _only(kv.dtype == dtype, kv.shape[1:] == (kv_heads, dim), kv.is_contiguous())
    none = np.empty(0, np.float32)
    head_norms = none, none, 0.0
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = _norm(attention.q_norm, dim), _norm(attention.k_norm, dim)
        _only(q_norm.epsilon == k_norm.epsilon)
        head_norms = q_norm.weight, k_norm.weight, q_norm.epsilon
    width = len(layer.input_layernorm.weight)
    return _Layer(
        qkv=_linear(attention.qkv_proj, dtype),
        head_norms=head_norms,
        rotary=rotary,
        attention=reads,
        k_cache=array(k_cache),
        v_cache=array(v_cache),
        o=_linear(attention.o_proj, dtype),
        mlp_norm=_norm(layer.post_attention_layernorm, width),
        gate_up=_linear(mlp.gate_up_proj, dtype),
        down=_linear(mlp.down_proj, dtype),
        next_norm=_norm(next_norm, width),
    )


class PlainDecoder:
    """The forward of a model's layers, from token ids to the states after the last norm.

    model: ``LlamaModel``, or one like it.
    backend: the attention of its steps.
    is_generation: the states are read where tokens are sampled only.
    """

    def __init__(
        self, model: Any, backend: FastAttention, *, is_generation: bool
    ) -> None:
        self._model, self._backend = model, backend
        self._is_generation = is_generation
        self._stock = partial(type(model).forward, model)
        self._parameters = list(model.parameters())
        # The memory that the layers were made of, and the layers, none if the model is of
        # another kind.
        self._made_of: object = None
        self._layers: list[_Layer] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """As the forward of SGLang's model.

        input_ids, positions: ``[num_tokens]``.

        Returns:
            ``[num_tokens, hidden_size]``. Of prompts whose other states nothing reads, those of
            their last tokens, and zeros.
        """
        is_plain = (
            not torch.compiler.is_compiling()
            and input_embeds is None
            and pp_proxy_tensors is None
        )
        if is_plain and self._is_plain_step(positions, forward_batch):
            self._make_layers()
            if self._layers:
                return self._run(input_ids, positions, forward_batch)
        return self._stock(
            input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
        )

    def _is_plain_step(self, positions: torch.Tensor, forward_batch: Any) -> bool:
        mode, pool = forward_batch.forward_mode, self._backend.token_to_kv_pool
        if mode not in _MODES or positions.dim() != 1 or not len(positions):
            return False
        if type(pool) is not MHATokenToKVPool:
            return False
        number = (
            len(forward_batch.seq_lens)
            if mode.is_decode()
            else sum(forward_batch.extend_seq_lens_cpu)
        )
        return (
            number == len(positions)  # else some only pad the step
            and get_attn_backend() is self._backend
            and pool.layer_transfer_counter is None
            and forward_batch.encoder_lens is None
            and not self._model.layers_to_capture
        )

    def _make_layers(self) -> None:
        """Make the layers, also again where weights or KV are in other memory."""
        pool = self._backend.token_to_kv_pool
        tensors = [*self._parameters, *pool.k_buffer, *pool.v_buffer]
        made_of = packed_linears.version(), [x.data_ptr() for x in tensors]
        if made_of == self._made_of:
            return
        self._made_of = made_of
        try:
            self._layers = self._known_layers()
        except (_IsOther, AttributeError):  # a part of another kind may lack something
            self._layers = []

    def _known_layers(self) -> list[_Layer]:
        model, pool = self._model, self._backend.token_to_kv_pool
        _only(
            get_parallel().tp_size == get_parallel().pp_size == 1,
            get_exec().deterministic.rl_on_policy_target is None,
            type(model.embed_tokens).__name__ == "VocabParallelEmbedding",
            pool.kv_cache_layout == "nhd" and not pool.is_quantized_kv_cache,
            pool.store_dtype == pool.dtype,
            not any(
                each._forward_hooks or each._forward_pre_hooks
                for each in model.modules()
            ),
        )
        dtype = model.embed_tokens.weight.dtype
        norms = [*(each.input_layernorm for each in model.layers), model.norm]
        _norm(norms[0], len(norms[-1].weight))
        return [
            _layer(layer, norm, dtype, pool)
            for layer, norm in zip(model.layers, norms[1:], strict=True)
        ]

    def _sampled(self, forward_batch: Any) -> torch.Tensor | None:
        """The rows at which a step with prompts samples, or None if all of its states count."""
        if (
            forward_batch.forward_mode.is_decode()
            or not self._is_generation
            or forward_batch.return_logprob
            or forward_batch.capture_hidden_mode.need_capture()
        ):
            return None
        return forward_batch.extend_seq_lens.cumsum(0) - 1

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        x = self._model.embed_tokens(input_ids)
        number, reads = len(x), self._layers[0].attention
        heads, dim = reads.tp_q_head_num, reads.qk_head_dim
        is_decode = forward_batch.forward_mode.is_decode()
        attention = self._backend.step_attention(
            self._backend.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            None if is_decode else forward_batch.extend_seq_lens,
            block_size(heads, reads.tp_k_head_num),
            x.dtype,
        )
        at = positions.to(torch.int64).contiguous().numpy()
        slots = forward_batch.out_cache_loc.to(torch.int64).contiguous().numpy()
        tables: dict[int, np.ndarray] = {}
        for layer in self._layers:
            if id(layer.rotary) not in tables:
                table = tables[id(layer.rotary)] = array(layer.rotary.cos_sin_cache)
                kernels.check_positions(at, table)

        sampled, last = self._sampled(forward_batch), self._layers[-1]
        stream, first = x, self._model.layers[0].input_layernorm
        residual = kernels.values_of(stream)
        x = kernels.rms_norm(x, first.weight, first.variance_epsilon)
        q = np.empty((number, heads, dim), residual.dtype)
        attended = torch.empty(number, heads * dim)
        by_head = attended.numpy().reshape(q.shape)
        out = attended if x.dtype == attended.dtype else attended.to(x.dtype)
        for layer in self._layers:
            angles = at, tables[id(layer.rotary)], layer.rotary.is_neox_style
            kv = layer.k_cache, layer.v_cache
            qkv = kernels.values_of(layer.qkv(x))
            kernels.rotate_and_store(qkv, layer.head_norms, angles, q, *kv, slots)
            options = layer.attention.scaling, layer.attention.sliding_window_size
            attention.attend_values(q, *kv, *options, by_head)
            if out is not attended:
                out.copy_(attended)
            if layer is last and sampled is not None:
                out, stream = out[sampled], stream[sampled]
                residual = kernels.values_of(stream)
            x = layer.o(out)
            kernels.add_rms_norm_values(kernels.values_of(x), residual, *layer.mlp_norm)
            x = layer.down(kernels.silu_and_mul(layer.gate_up(x)))
            kernels.add_rms_norm_values(
                kernels.values_of(x), residual, *layer.next_norm
            )
        if sampled is None:
            return x
        return x.new_zeros(number, x.shape[1]).index_copy_(0, sampled, x)


def use(model_runner: Any, backend: FastAttention) -> None:
    """Run the steps of a runner's model by a :class:`PlainDecoder` where it knows them."""
    model = getattr(model_runner.model, "model", None)
    if model is not None and _is_known(model):
        model.forward = PlainDecoder(
            model, backend, is_generation=model_runner.is_generation
        )
