"""How the states of a text's tokens become one vector, as sentence-transformers says.

The library itself is not used, though its results are the same. It brings scikit-learn,
which transformers imports wherever it finds it: every process of SGLang would start 1.4 s
of processor time later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import normalize

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class UnitLength(torch.nn.Module):  # type: ignore[misc]
    """Makes vectors, ``[rows, dims]``, of length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The vectors, of the same shape and dtype."""
        return normalize(vectors, dim=-1)


class DenseLayer(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with an activation, on vectors.

    Args:
        residual: a vector is added to its result; by a matrix if their sizes differ.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        activation: torch.nn.Module,
        *,
        bias: bool,
        residual: bool,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(*sizes, bias=bias)
        self.activation = activation
        self.adds = residual
        if residual and sizes[0] != sizes[1]:
            self.residual = torch.nn.Linear(*sizes, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``."""
        found: torch.Tensor = self.activation(self.linear(vectors))
        if self.adds:
            found = found + getattr(self, "residual", torch.nn.Identity())(vectors)
        return found


@dataclass(frozen=True, slots=True)
class SentencePooling:
    """Pooling, and what follows it.

    modes: of :data:`MODES`; their vectors are concatenated.
    steps: applied to the vectors in turn, in float32.
    source: where this is from, for the log.
    """

    modes: tuple[str, ...]
    steps: torch.nn.Sequential = field(default_factory=torch.nn.Sequential)
    source: str = ""

    @property
    def normalizes(self) -> bool:
        """Whether vectors have length 1."""
        return len(self.steps) > 0 and isinstance(self.steps[-1], UnitLength)

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vectors of texts.

        Args:
            states: ``[rows, tokens, width]``, of any floating dtype.
            mask: int64 ``[rows, tokens]``, 1 for tokens and 0 for padding, which is
                behind them. Each row has a token.

        Returns:
            float32 ``[rows, dims]``.
        """
        states = states.float()
        pooled = [_pooled(mode, states, mask) for mode in self.modes]
        found: torch.Tensor = self.steps(torch.cat(pooled, -1))
        return found

    def __str__(self) -> str:
        steps = [type(step).__name__ for step in self.steps]
        return f"{' and '.join(self.modes)}{''.join(f', {name}' for name in steps)}"


def _pooled(mode: str, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, width]``. States of padding may be anything, even NaN."""
    if mode == "cls":
        return states[:, 0]
    counts = mask.sum(1)
    if mode == "lasttoken":
        return states[torch.arange(len(counts), device=states.device), counts - 1]
    padding = mask[..., None] == 0
    if mode == "max":
        return states.masked_fill(padding, -torch.inf).amax(1)
    weights = mask.float()
    if mode == "weightedmean":
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        weights = weights * places
    total = weights.sum(1, keepdim=True)
    if mode == "mean_sqrt_len_tokens":
        total = total.sqrt()
    kept = states.masked_fill(padding, 0.0)
    return (kept * weights[..., None]).sum(1) / total


def usual_pooling(*, causal: bool, mean: bool) -> SentencePooling:
    """That of models which declare none, normalized as SGLang does.

    Args:
        causal: a token sees those before it only.
        mean: the model has no token that was trained to stand for a text.
    """
    mode, kind = ("lasttoken", "a causal model") if causal else ("cls", "an encoder")
    if mean:
        mode, kind = "mean", "an encoder without a first token of its own"
    steps = torch.nn.Sequential(UnitLength())
    return SentencePooling((mode,), steps, f"usual for {kind}")
