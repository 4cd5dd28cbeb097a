"""Ways to run a model on a box of devices, and which of them are possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..costs.hardware import HardwareSpec, Parallelism
from ..costs.model_spec import ModelSpec, text_config
from ..costs.weights import Config, first_number

# Most tokens of a step that are tried.
STEP_TOKENS = (2048, 4096, 8192, 16384)
# SGLang's limit where none is given, and that of its decode CUDA graphs which we plan with.
MOST_ROWS = 4096
MOST_GRAPH_ROWS = 1024
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """Devices of one server.

    price_per_hour: of one device, None if it is not known.
    """

    hardware: HardwareSpec
    devices: int
    price_per_hour: float | None = None

    def __str__(self) -> str:
        return f"{self.devices}x {self.hardware.name}"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of the weights and of the KV.

    quantization, kv_dtype: SGLang's options, None for the checkpoint's own.
    """

    model: ModelSpec
    quantization: str | None = None
    kv_dtype: str | None = None

    @property
    def changes_answers(self) -> bool:
        """Whether answers differ from those of the checkpoint as it is."""
        return self.quantization is not None or self.kv_dtype is not None

    @property
    def arguments(self) -> list[str]:
        """SGLang's options."""
        options = {
            "--quantization": self.quantization,
            "--kv-cache-dtype": self.kv_dtype,
        }
        return [word for name, x in options.items() if x for word in (name, x)]

    def __str__(self) -> str:
        parts = [self.quantization or "as stored"]
        if self.kv_dtype:
            parts.append(f"KV {self.kv_dtype}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model on all devices of a box.

    step_tokens: ``--chunked-prefill-size``, most tokens in a step of an attention rank.
    rows: ``--max-running-requests`` of an attention rank. Its decode CUDA graphs go as far.
    """

    parallel: Parallelism
    precision: Precision
    step_tokens: int
    rows: int = MOST_ROWS

    @property
    def graph_rows(self) -> int:
        """Rows of the largest decode CUDA graph."""
        return min(self.rows, MOST_GRAPH_ROWS)

    def mem_fraction(self, hardware: HardwareSpec) -> float:
        """The share of a device's memory for weights and KV that SGLang's own rule leaves: it keeps
        memory for activations, by the tokens of a step, and for CUDA graphs, by their rows."""
        ranks = self.parallel.attention_ranks
        kept = 512 + 1.5 * self.step_tokens
        kept += self.parallel.tp * self.parallel.pp / 8 * 1024
        kept += 2 * self.graph_rows
        if ranks > 1:
            kept += (3 if self.graph_rows <= 300 else 4.5) * self.graph_rows * ranks
        if hardware.memory_bytes > 60 * 1024 * _MIB:
            kept = max(kept, 10 * 1024)
        return max(0.1, 1 - kept * _MIB / hardware.memory_bytes)

    def with_rows(self, rows: float) -> Way:
        """With room for so many requests, and a quarter more."""
        wanted = max(1, math.ceil(rows * 1.25))
        return replace(self, rows=min(MOST_ROWS, -(-wanted // 8) * 8))

    def arguments(self, hardware: HardwareSpec) -> list[str]:
        """SGLang's options for this way."""
        # SGLang divides both among the attention ranks of a replica.
        ranks = self.parallel.attention_ranks
        return [
            *self.parallel.arguments,
            *self.precision.arguments,
            *("--chunked-prefill-size", str(self.step_tokens * ranks)),
            *("--max-running-requests", str(self.rows * ranks)),
            *("--cuda-graph-max-bs-decode", str(self.graph_rows)),
            *("--mem-fraction-static", f"{self.mem_fraction(hardware):.3f}"),
        ]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Numbers of a model that its devices must divide."""

    heads: int
    kv_heads: int
    layers: int
    experts: int

    @classmethod
    def of(cls, config: Config) -> ModelParts:
        """From a ``config.json``, also of a multimodal model."""
        text = text_config(config)
        heads = first_number(text, "num_attention_heads") or 1
        kv_heads = 1 if text.get("kv_lora_rank") else None
        return cls(
            heads,
            kv_heads or first_number(text, "num_key_value_heads") or heads,
            first_number(text, "num_hidden_layers") or 1,
            first_number(text, "n_routed_experts", "num_local_experts", "num_experts")
            or 0,
        )

    def refusal(self, parallel: Parallelism) -> str | None:
        """Why this model cannot be spread like this, or None."""
        tp = parallel.attention_tp
        if self.heads % tp:
            return f"{self.heads} attention heads are no multiple of {tp}"
        if self.kv_heads % tp and tp % self.kv_heads:
            return (
                f"{self.kv_heads} KV heads and {tp} devices: neither divides the other"
            )
        if parallel.pp > self.layers:
            return f"{self.layers} layers are fewer than {parallel.pp} stages"
        if parallel.ep > 1 and self.experts % parallel.ep:
            return f"{self.experts} experts are no multiple of {parallel.ep}"
        return None


def spreads(devices: int, parts: ModelParts) -> Iterator[Parallelism]:
    """Every way to spread a model over all of these devices. Attention ranks and expert parallelism
    are tried for mixtures of experts, and not together with pipeline stages. SGLang has no
    replicas of engines with attention ranks."""
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            replicas = devices // tp // pp
            yield Parallelism(tp=tp, pp=pp, replicas=replicas)
            if parts.experts < 2 or pp > 1 or tp == 1:
                continue
            for ranks in _divisors(tp) if replicas == 1 else [1]:
                for ep in (1, tp):
                    if (ranks, ep) != (1, 1):
                        yield Parallelism(
                            tp=tp, replicas=replicas, attention_ranks=ranks, ep=ep
                        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def possible_ways(
    box: Box, parts: ModelParts, precisions: Sequence[Precision]
) -> Iterator[Way]:
    """All ways, also those that :meth:`ModelParts.refusal` refuses."""
    for parallel in spreads(box.devices, parts):
        for precision in precisions:
            for step_tokens in STEP_TOKENS:
                yield Way(parallel, precision, step_tokens)
