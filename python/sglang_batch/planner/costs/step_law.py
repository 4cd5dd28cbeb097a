"""Costs of a machine from the seconds of its own steps.

The law is that of :mod:`.step_costs`, with factors that measured steps decide::

    seconds = fixed + prompt step + prompts * a
              + tokens of prompts up to here * t + their squares * c
              + decodes * (b, or in a step with prompts b')
              + (KV, KV^2 / decodes) in a step with prompts * (d, e)
              + requests that arrive and end * r + decodes alone after prompts * s
              + overlapped(f_c compute(tokens) + f_p pairs, f_m reads(tokens) + f_k KV)

``compute``, ``reads``, ``pairs`` and ``KV`` are the seconds of the machine's datasheet. All
coefficients are 0 or more. They are found by least squares, with far points counting less (Huber,
1964). Where the steps say nothing about a factor, it is that of all operators together.

For an exponent k of the overlap the law is linear around any solution: ``overlapped`` is
homogeneous of degree 1, so it equals the sum of its arguments times its derivatives there
(Euler). An exponent above 1 is taken only where it explains the steps better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from ..requests import Floats
from .cost_model import (
    COMPUTE,
    HEAD_COMPUTE,
    HEAD_MEMORY,
    MEMORY,
    OTHER,
    TOKENS,
    CostModel,
    StepExtras,
)
from .step_costs import StepSample, least_token_s

# Steps that a law needs.
MIN_SAMPLES = 40
# Exponents of the overlap that are tried, and the share of the squares that one above 1
# must save.
EXPONENTS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0)
_BETTER = 0.05
# Strength with which factors of which the steps say nothing are drawn to that of all operators.
_PRIOR = 0.03
_OUTLIER = 2.0
_ROUNDS = 8
# Least factor, as a share of that of all operators: nothing takes no time at all.
_LEAST = 0.02
# Of a step that took longer than so many times the law, the rest is not its own.
_DISTURBED = 1.5


@dataclass(frozen=True, slots=True)
class StepLaw:
    """A machine's measured factors.

    factors: of the seconds by datasheet: arithmetic of matrices, their reads, attention of
        prompts, reads of KV.
    fixed_s, extras: seconds besides the operators.
    exponent: of the overlap.
    noise: median distance of a step from the law, as a share of it.
    num_samples: steps that were fitted.
    """

    factors: tuple[float, float, float, float]
    fixed_s: float
    extras: StepExtras
    exponent: float
    noise: float
    num_samples: int

    def applied(self, cost: CostModel) -> CostModel:
        """The same machine, of which ``cost`` is by its datasheet, by its own steps."""
        compute, memory, attention, kv = self.factors
        table = cost.step_table.copy()
        table[[COMPUTE, HEAD_COMPUTE]] *= compute
        table[[MEMORY, HEAD_MEMORY]] *= memory
        table[OTHER] = self.fixed_s
        kv_read_s = cost.kv_read_time_s * kv
        typical = np.searchsorted(table[TOKENS], 64.0)
        step_s = float((table[MEMORY] + table[OTHER])[min(typical, table.shape[1] - 1)])
        return replace(
            cost,
            token_time_s=least_token_s(table, self.exponent),
            kv_read_time_s=kv_read_s,
            attention_time_s=cost.attention_time_s * attention,
            weight_read_time_s=step_s,
            interference_exponent=self.exponent,
            # Measured steps have the overlap in them already.
            split_exponent=cost.split_exponent if self.exponent == 1 else 1.0,
            table=table,
            extras=self.extras,
        )


def samples_array(samples: list[StepSample]) -> Floats:
    """float64 ``[n, 10]``."""
    return np.array(samples, dtype=np.float64).reshape(-1, len(StepSample._fields))


def fit_step_law(samples: Floats, cost: CostModel) -> StepLaw | None:
    """The law of measured steps, None if fewer than :data:`MIN_SAMPLES` are usable.

    Args:
        samples: float64 ``[n, 10]``, the fields of :class:`StepSample`.
        cost: of the machine by its datasheet.
    """
    usable = np.isfinite(samples).all(axis=1) & (samples[:, 0] > 0)
    usable &= samples[:, 1] + samples[:, 3] > 0
    samples = samples[usable]
    if len(samples) < MIN_SAMPLES:
        return None
    columns = _StepColumns.of(samples, cost)
    fits = {k: _fit(columns, k) for k in EXPONENTS}
    best = min(fits, key=lambda k: fits[k].squares)
    if fits[best].squares > (1 - _BETTER) * fits[1.0].squares:
        best = 1.0
    fit = fits[best]
    ratio = columns.seconds / np.maximum(fit.predicted, 1e-300)
    # Far points count less in a fit, but their seconds are spent all the same.
    spent = np.minimum(ratio, _DISTURBED) @ fit.predicted
    bias = float(spent / fit.predicted.sum())
    found = (fit.coefficients * bias).tolist()
    return StepLaw(
        factors=(found[0], found[1], found[2], found[3]),
        fixed_s=found[4],
        extras=StepExtras(*found[5:]),
        exponent=best,
        noise=float(np.median(abs(ratio / bias - 1.0))),
        num_samples=len(columns.seconds),
    )


class _StepColumns(NamedTuple):
    """Seconds by datasheet and counts of each step, all float64 ``[n]`` or ``[n, 11]``."""

    seconds: Floats
    compute: Floats
    memory: Floats
    attention: Floats
    kv: Floats
    counts: Floats

    @classmethod
    def of(cls, samples: Floats, cost: CostModel) -> _StepColumns:
        seconds, prompt_tokens, prompts, decodes = samples.T[:4]
        attended, context, squares, kv, requests, after_prompts = samples.T[4:]
        table = cost.step_table
        tokens, rows = prompt_tokens + decodes, prompts + decodes
        mixed = prompts > 0

        def at(row: int, where: Floats) -> Floats:
            last = np.diff(table[row, -2:])[0] / np.diff(table[TOKENS, -2:])[0]
            beyond = np.maximum(where - table[TOKENS, -1], 0.0)
            found: Floats = np.interp(where, table[TOKENS], table[row]) + last * beyond
            return found

        return cls(
            seconds,
            at(COMPUTE, tokens) + at(HEAD_COMPUTE, rows),
            at(MEMORY, tokens) + at(HEAD_MEMORY, rows),
            attended * cost.attention_time_s,
            kv * cost.kv_read_time_s,
            np.stack(
                [
                    np.ones_like(seconds),
                    mixed,
                    prompts,
                    np.where(mixed, 0.0, decodes),
                    np.where(mixed, decodes, 0.0),
                    np.where(mixed, kv, 0.0),
                    context,
                    squares,
                    np.where(mixed, kv * kv / np.maximum(decodes, 1.0), 0.0),
                    requests,
                    np.where(mixed, 0.0, after_prompts),
                ],
                axis=1,
            ),
        )


class _LawFit(NamedTuple):
    """Coefficients ``[15]``, predicted seconds ``[n]``, and the squares that they leave."""

    coefficients: Floats
    predicted: Floats
    squares: float


def _fit(columns: _StepColumns, k: float) -> _LawFit:
    operators = np.stack(
        [columns.compute, columns.memory, columns.attention, columns.kv], axis=1
    )
    seconds = columns.seconds
    # Of all operators, as if nothing else took time.
    common = float(seconds.sum() / max(operators.sum(), 1e-300))
    prior = _PRIOR * math.sqrt(len(seconds))
    scaled = operators * common
    importance = np.ones(len(seconds))
    slopes = np.ones_like(operators)
    found, predicted = np.zeros(4 + columns.counts.shape[1]), seconds
    for _ in range(_ROUNDS):
        # Errors count relative to the root of the time: long steps decide a job's time,
        # and short ones are many.
        weight = np.sqrt(importance / seconds)
        design = np.concatenate([scaled * slopes, columns.counts], axis=1)
        pull = np.zeros((4, len(found)))
        np.fill_diagonal(pull, prior * math.sqrt(seconds.mean()))
        found = nnls(
            np.concatenate([design * weight[:, None], pull]),
            np.concatenate([seconds * weight, pull.sum(axis=1)]),
        )[0]
        parts = scaled * found[:4]
        compute, memory = parts[:, 0] + parts[:, 2], parts[:, 1] + parts[:, 3]
        less, longer = np.minimum(compute, memory), np.maximum(compute, memory)
        share = np.divide(less, longer, out=np.zeros_like(longer), where=longer > 0)
        together = longer * (1.0 + share**k) ** (1.0 / k)
        predicted = together + columns.counts @ found[4:]
        ratio = np.divide(
            np.stack([compute, memory, compute, memory], axis=1),
            together[:, None],
            out=np.zeros_like(slopes),
            where=together[:, None] > 0,
        )
        slopes = ratio ** (k - 1)
        distance = abs(predicted - seconds) / np.sqrt(seconds)
        scale = max(1.4826 * float(np.median(distance)), 1e-12)
        importance = np.minimum(1.0, _OUTLIER * scale / np.maximum(distance, 1e-12))
    squares = float(importance @ ((predicted - seconds) ** 2 / seconds))
    found[:4] = np.maximum(found[:4], _LEAST) * common
    return _LawFit(found, predicted, squares)
