"""The machine that a job is predicted for: described by options, or chosen."""

from __future__ import annotations

import argparse
import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError, ExitStatus
from ..planner.choosing.chooser import (
    Choices,
    Chooser,
    Outlook,
    SimulatedWay,
    for_deadline,
    reason,
)
from ..planner.choosing.ways import Box, ModelParts, Precision
from ..planner.costs.cost_model import CostModel, kv_capacity_tokens
from ..planner.costs.hardware import HardwareSpec, Parallelism, hardware, match_hardware
from ..planner.costs.model_spec import ModelSpec
from ..planner.costs.step_costs import step_costs
from ..planner.machine_model import EngineLimits, Machine, second_pool
from ..planner.ordering.order import OrderSettings
from ..planner.requests import Int32s, PlanRequests
from ..run.progress import aligned
from ..store.measured_costs import UNMEASURED, kept_row_shares
from .report import rate_text, significant, time_text

logger = logging.getLogger(__name__)


def named_device(options: argparse.Namespace, name: str) -> HardwareSpec:
    """The device of this name, with the measured rates that the options give.

    Raises:
        ConfigError: the device is unknown.
    """
    tflops, tbs = options.compute_tflops, options.bandwidth_tbs
    return hardware(
        name,
        compute_flops=None if tflops is None else tflops * 1e12,
        bandwidth_bytes_per_s=None if tbs is None else tbs * 1e12,
    )


def chosen_device(
    options: argparse.Namespace, name: str | None
) -> tuple[HardwareSpec, str]:
    """The device of ``--hardware``, or this machine's, by its driver's name, and a note
    that it is.

    Raises:
        ConfigError: the device is unknown.
    """
    if options.hardware is not None:
        return named_device(options, options.hardware), ""
    if name is None:
        return named_device(options, "cpu"), "no GPU here; name another with --hardware"
    if match_hardware(name) is None:
        raise ConfigError(
            f"This machine's {name!r} is not in the table of devices. Name the most "
            "similar one with --hardware, and its measured rates with "
            "--compute-tflops and --bandwidth-tbs."
        )
    return named_device(options, name), "this machine"


def make_machine(
    options: argparse.Namespace,
    model: ModelSpec,
    device: HardwareSpec,
    *,
    paper_costs: bool = False,
) -> Machine:
    """The model on ``--tp`` of these devices.

    Raises:
        ConfigError: the weights leave no memory for KV.
    """
    capacity = options.kv_capacity_tokens
    if capacity is None:
        capacity = kv_capacity_tokens(
            model, device, options.tp, mem_fraction=options.mem_fraction_static
        )
    if paper_costs:
        cost = CostModel.of(
            model,
            device,
            tp=options.tp,
            shared_kv_read_once=options.shared_prefix_attention,
            interference_exponent=options.overlap,
            fp8=model.in_8_bits and device.fp8_flops is not None,
        )
        row_share = options.row_share or 0.0
    else:
        cost = step_costs(
            model,
            device,
            Parallelism(tp=options.tp),
            shared_kv_read_once=options.shared_prefix_attention,
            interference_exponent=options.overlap,
        )
        row_share = _row_share(options, model, device)
    cost = replace(cost, row_share=float(row_share), padded=options.padded_attention)
    step_tokens = options.chunked_prefill_size
    pool, max_running = second_pool(model, capacity, step_tokens, options.tp)
    return Machine(
        cost,
        EngineLimits(capacity, step_tokens, max_running=max_running, second_pool=pool),
    )


def _row_share(
    options: argparse.Namespace, model: ModelSpec, device: HardwareSpec
) -> float:
    """That of the option, or the last one measured for this device, or 0."""
    if options.row_share is not None:
        return float(options.row_share)
    for kept in reversed(kept_row_shares()):
        key = kept.key
        spec = match_hardware(key.device)
        # Without an engine neither its attention backend nor its pages are known.
        if (
            spec is not None
            and spec.name == device.name
            and key.kv_heads == model.kv_shards
            and key.tp == options.tp
        ):
            return kept.row_share
    logger.info(UNMEASURED)
    return 0.0


# The report of ``--choose``: ways to run a job, and SGLang's options for the best.

# The order of a run that names none.
DEFAULT_POLICY = "dfs"
# Ways that are listed without a simulation, for each box.
LISTED = 12
# Counts a model: SGLang's ``--quantization`` and ``--kv-cache-dtype``, None as stored.
CountModel = Callable[[str | None, str | None], ModelSpec]
_CHANGES = "* changes the answers: compare some of them first."


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """What ``--choose`` found: the job's name and size, the command line that SGLang's options are
    added to, and tokens of the job as simulated."""

    job: str
    command: str
    prompt_tokens: int
    output_tokens: int
    boxes: list[Choices]
    deadline_s: float | None

    @property
    def ranked(self) -> list[SimulatedWay]:
        """The choice of each box, cheapest first, or fastest without prices."""
        found = [x.chosen for x in self.boxes if x.chosen is not None]
        return sorted(
            found, key=lambda x: (math.inf if x.price is None else x.price, x.seconds)
        )

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of the whole job."""
        return self.prompt_tokens + self.output_tokens

    def as_json(self) -> str:
        """One JSON document."""
        document: dict[str, Any] = {
            "job": self.job,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "boxes": [self._box_figures(each) for each in self.boxes],
        }
        if self.ranked:
            document["chosen"] = self._figures(self.ranked[0])
        return json.dumps(document, indent=2)

    def _box_figures(self, found: Choices) -> dict[str, Any]:
        best = found.base.outlook if found.base else None
        return {
            "hardware": found.box.hardware.name,
            "devices": found.box.devices,
            "price_per_gpu_hour": found.box.price_per_hour,
            "simulated": [self._figures(each) for each in found.simulated],
            "closed_form": [
                {
                    "spread": str(each.way.parallel),
                    "precision": str(each.way.precision),
                    "changes_answers": each.way.precision.changes_answers,
                    "seconds": None if each.steady is None else each.seconds,
                    "why": each.refusal if best is None else reason(each, best),
                }
                for each in found.outlooks
            ],
        }

    def _figures(self, choice: SimulatedWay) -> dict[str, Any]:
        way = choice.way
        figures: dict[str, Any] = {
            "hardware": str(choice.box),
            "spread": str(way.parallel),
            "precision": str(way.precision),
            "changes_answers": way.precision.changes_answers,
            "step_tokens": way.step_tokens,
            "rows": way.rows,
            "seconds": choice.seconds,
            "tokens_per_second": self.tokens / choice.seconds,
            "price": choice.price,
            "policy": choice.policy,
            "prefix_sharing_ratio": choice.simulation.achieved_prefix_sharing_ratio,
            "arguments": choice.arguments,
        }
        if self.deadline_s is not None:
            figures["boxes_for_deadline"] = for_deadline(choice, self.deadline_s)
        return figures

    def table(self) -> str:
        """For people."""
        parts = [f"Job: {self.job}"]
        parts += [self._box_table(each) for each in self.boxes]
        if self.deadline_s is not None and self.ranked:
            rows = [["server", "number", "time", "price"]]
            for choice in self.ranked:
                number = for_deadline(choice, self.deadline_s)
                seconds = time_text(choice.seconds / number)
                price = "" if choice.price is None else significant(choice.price)
                rows.append([str(choice.box), str(number), seconds, price])
            limit = time_text(self.deadline_s)
            title = f"In {limit}, each server with an equal part of the job:"
            parts.append("\n".join([title, *_aligned(rows)]))
        if self.ranked:
            chosen = self.ranked[0]
            said = f"Chosen: {chosen.way.parallel} on {chosen.box}"
            if len(self.boxes) > 1:
                said += " (least time)" if chosen.price is None else " (least price)"
            is_default = chosen.policy == DEFAULT_POLICY
            policy = [] if is_default else ["--policy", chosen.policy]
            command = f"{self.command} {shlex.join([*policy, *chosen.arguments])}"
            said += f", {time_text(chosen.seconds)}. Run it with:"
            parts.append(f"{said}\n  {command}")
        return "\n\n".join(parts)

    def _box_table(self, found: Choices) -> str:
        price = found.box.price_per_hour
        title = f"{found.box}" + (
            "" if price is None else f" at {price:g} an hour each"
        )
        if not found.simulated:
            lines = [f"{title}: no way is possible"]
            lines += [
                f"  {x.way.parallel}: {x.refusal}" for x in found.outlooks[:LISTED]
            ]
            return "\n".join(lines)
        base = found.base
        assert base is not None
        header = ["", "spread", "weights and KV", "step", "rows", "time", "tokens/s"]
        header += [
            *([] if price is None else ["tokens per price"]),
            "against the choice",
        ]
        rows = [header]
        shown = {_kind(choice.outlook) for choice in found.simulated}
        for choice in found.simulated:
            rows.append(
                [
                    "*" if choice.way.precision.changes_answers else "",
                    str(choice.way.parallel),
                    str(choice.way.precision),
                    f"{choice.way.step_tokens:,}",
                    f"{choice.way.rows:,}",
                    time_text(choice.seconds),
                    rate_text(self.tokens / choice.seconds),
                    *([rate_text(self.tokens / choice.price)] if choice.price else []),
                    "the choice" if choice is base else _against(choice, base),
                ]
            )
        lines = [f"{title}, simulated:", *_aligned(rows)]
        others = [x for x in found.outlooks if _kind(x) not in shown]
        lines += ["", "Not simulated, by the closed form:"]
        rows = [
            [
                "*" if x.way.precision.changes_answers else "",
                str(x.way.parallel),
                str(x.way.precision),
                "" if x.steady is None else time_text(x.seconds),
                reason(x, base.outlook),
            ]
            for x in _listed(others)
        ]
        lines += _aligned(rows)
        if any(x.way.precision.changes_answers for x in found.outlooks):
            lines += ["", _CHANGES]
        return "\n".join(lines)


def _against(choice: SimulatedWay, base: SimulatedWay) -> str:
    more = choice.seconds / base.seconds - 1
    why = reason(choice.outlook, base.outlook, slower=more > 0)
    return f"{more:+.0%}: {why}"


def _kind(outlook: Outlook) -> tuple[str, str]:
    return str(outlook.way.parallel), str(outlook.way.precision)


def _listed(outlooks: Sequence[Outlook]) -> list[Outlook]:
    """The fastest, and the impossible ones of one reason once."""
    possible = [x for x in outlooks if x.steady is not None]
    kept = possible[:LISTED]
    seen: set[str] = set()
    for outlook in outlooks:
        if outlook.steady is None and str(outlook.way.parallel) not in seen:
            seen.add(str(outlook.way.parallel))
            kept.append(outlook)
    return kept[: 2 * LISTED]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows).split("\n")] if rows else ["  none"]


def choose(
    options: argparse.Namespace,
    *,
    job: str,
    command: str,
    requests: PlanRequests,
    config: Mapping[str, Any],
    count: CountModel,
    boxes: Sequence[Box],
    output_len: Int32s | None = None,
) -> int:
    """Search, print, and return the exit status.

    Args:
        config: the model's ``config.json``.
        output_len: int32 ``[n]``, the true lengths if they are known.

    Raises:
        ConfigError: an option cannot be used, or no way is possible.
    """
    chooser = Chooser(
        requests,
        OrderSettings(seed=options.seed),
        default_output_len=getattr(options, "default_output_len", None),
        output_len=output_len,
        interference_exponent=options.overlap,
    )
    precisions = [
        Precision(count(method, dtype), method, dtype)
        for method in (None, *options.allow_quantization)
        for dtype in (None, *options.allow_kv_cache_dtype)
    ]
    parts = ModelParts.of(config)
    found = [
        chooser.choose(
            box,
            parts,
            precisions,
            watched=partial(
                tqdm, desc=f"Simulating {box}", unit="way", dynamic_ncols=True
            ),
        )
        for box in boxes
    ]
    if not any(each.simulated for each in found):
        raise ConfigError(
            f"no way to run the model on {' or '.join(map(str, boxes))} is possible: "
            f"{found[0].outlooks[0].refusal}. More or larger devices are needed, or "
            "--allow-quantization."
        )
    report = ChoiceReport(
        job=job,
        command=command,
        prompt_tokens=chooser.prompt_tokens,
        output_tokens=chooser.output_tokens,
        boxes=found,
        deadline_s=options.deadline,
    )
    print(report.as_json() if options.json else report.table())
    return ExitStatus.OK
