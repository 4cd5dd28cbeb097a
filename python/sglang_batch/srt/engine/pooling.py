"""Serves sentence-transformers encoders with the pooling they were trained for.

SGLang pools every BERT-style encoder at its first token, and does not read how a
sentence-transformers checkpoint declares it in ``modules.json`` and ``1_Pooling/config.json``.
It also leaves prefix reuse and chunked prefill on for these models. Both are wrong for
bidirectional attention: the states of a reused or cut prefix lack the rest of the text.

Two hooks correct this, and neither affects any other model. On ``ModelConfig.from_server_args``
an encoder-only model is declared unfit for prefix reuse and chunked prefill, with the fields
that SGLang has for this, and its pooling becomes the checkpoint's. On ``ModelRunner.load_model``
a model declared to pool by the mean gets a :class:`MeanPooler`.

SGLang's own mean takes differences of one running sum over the whole batch, in the
model's dtype, where rounding errors may dominate it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.configs import embedding_model_spec as specs
from sglang.srt.layers.pooler import EmbeddingPoolerOutput, Pooler, PoolingType
from torch.nn.functional import normalize

from ...dense.pooling import CheckpointFiles, UnitLength, declared_pooling
from ...errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def declares_mean(model_path: str | Path, revision: str | None = None) -> bool:
    """Whether a sentence-transformers checkpoint declares to pool by the mean, and no steps
    after it that SGLang does not run (``Dense``)."""
    try:
        declared = declared_pooling(CheckpointFiles(str(model_path), revision))
    except ConfigError as error:
        logger.warning("The pooling of a checkpoint is not used: %s", error)
        return False
    if declared is None or declared.modes != ("mean",):
        return False
    run = UnitLength | torch.nn.Identity
    unknown = {
        type(step).__name__ for step in declared.steps if not isinstance(step, run)
    }
    if unknown:
        logger.warning(
            "%s ends in sentence-transformers modules %s, which are not served: "
            "its embeddings will differ from sentence-transformers'",
            model_path,
            ", ".join(sorted(unknown)),
        )
    return not unknown


def segment_mean(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The float32 mean of each run of rows: ``[tokens, h], [n] -> [n, h]``.

    Rows past ``lengths.sum()`` are ignored. It may be captured in a CUDA graph.
    """
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    segment = torch.searchsorted(torch.cumsum(lengths, 0), rows, right=True)
    sums = hidden.new_zeros(
        (lengths.shape[0] + 1, hidden.shape[1]), dtype=torch.float32
    ).index_add_(0, segment, hidden.float())
    return sums[:-1] / lengths.clamp(min=1).unsqueeze(-1)


class MeanPooler(Pooler):  # type: ignore[misc]
    """SGLang's pooler with an exact mean of float32 vectors."""

    def __init__(self, normalize: bool) -> None:
        super().__init__(pooling_type=PoolingType.MEAN, normalize=normalize)

    def forward(
        self, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> EmbeddingPoolerOutput:
        pooled = segment_mean(hidden_states, forward_batch.extend_seq_lens)
        vectors: torch.Tensor | list[torch.Tensor] = pooled
        if (wanted := forward_batch.dimensions) is not None:
            vectors = [v[:d] for v, d in zip(pooled, wanted, strict=True)]
            if len(set(wanted)) == 1:
                vectors = torch.stack(vectors)
        if self.normalize:
            vectors = (
                [normalize(v, dim=-1) for v in vectors]
                if isinstance(vectors, list)
                else normalize(vectors, dim=-1)
            )
        return EmbeddingPoolerOutput(embeddings=vectors)


def use_mean_pooler(model: torch.nn.Module) -> bool:
    """Replace the model's plain pooler with a mean, or return False if it has none."""
    pooler = getattr(model, "pooler", None)
    if (
        pooler is None or type(pooler) is not Pooler
    ):  # a sparse or cross-encoder head stays
        return False
    model.pooler = MeanPooler(normalize=pooler.normalize)
    return True


def declared_spec(
    spec: specs.EmbeddingModelSpec, model_path: str | Path, revision: str | None = None
) -> specs.EmbeddingModelSpec:
    """The spec, corrected for the checkpoint if it is encoder-only."""
    if spec.execution is not specs.EmbeddingExecution.ENCODER_ONLY:
        return spec
    pooling = spec.pooling
    if pooling in (
        specs.PoolingStrategy.CLS,
        specs.PoolingStrategy.MODEL_DEFINED,
    ) and declares_mean(model_path, revision):
        pooling = specs.PoolingStrategy.MEAN
    return replace(
        spec,
        safe_disable_radix_cache=True,
        safe_disable_chunked_prefill=True,
        pooling=pooling,
    )


def after_model_config(config: ModelConfig, *_args: object, **_kwargs: object) -> None:
    """AFTER hook in every process, before SGLang resolves its arguments."""
    config.embedding_model_spec = declared_spec(
        config.embedding_model_spec, config.model_path, config.revision
    )


def after_load_model(
    _result: None, runner: ModelRunner, *_args: object, **_kwargs: object
) -> None:
    """AFTER hook in the scheduler process."""
    config = runner.model_config
    spec: specs.EmbeddingModelSpec = config.embedding_model_spec
    if (
        spec.execution is specs.EmbeddingExecution.ENCODER_ONLY
        and spec.pooling is specs.PoolingStrategy.MEAN
        and use_mean_pooler(runner.model)
    ):
        logger.info("%s: mean pooling, as in its checkpoint", config.model_path)
