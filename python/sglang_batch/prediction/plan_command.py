"""``sglang-batch plan``: predicts the run of a batch file before anything runs."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..batch_api.equal_requests import find_equal
from ..batch_api.jsonl import BatchFile
from ..config import AUTO, PAGED_ORDERS
from ..errors import ConfigError, InputError
from ..inputs.local_input import LocalInput
from ..inputs.staging import Staging
from ..job.rendering import in_order
from ..planner.costs.hardware import HardwareSpec, Parallelism, match_hardware
from ..planner.costs.model_spec import ModelSpec
from ..planner.machine_model import Machine, min_step_tokens
from ..planner.ordering.order import OrderSettings
from ..planner.output_lengths.estimates import prior_output_len
from ..planner.prefixes.prefix_tree import build_prefix_tree
from ..planner.requests import UNKNOWN, Int64s, PlanRequests
from ..request import BatchRequestInput
from ..run.backend_options import known_arguments
from ..run.model_place import check_model
from ..run.prepare import checked_requests
from ..run.run_options import command_line, job_input
from ..store.token_spool import TokenSpool
from .late_text import num_late_tokens
from .machine_choice import choose, chosen_device, make_machine
from .options import boxes, check_choice
from .report import LeftOut, MachineInfo, Measured, Report, forecast
from .table import check_plot, progress, read_measured, show, show_measured

if TYPE_CHECKING:
    from ..srt.compat.server_types import OfflineArgs
    from ..srt.engine.in_process import RenderedRequest, Renderer


def plan(options: argparse.Namespace, server_argv: list[str]) -> int:
    """Predict a batch file's run; returns the process's exit status.

    Raises:
        InputError: the file cannot be used, or no line of it can run.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
    check_choice(options, server_argv)
    steps = None if options.steps is None else read_measured(options.steps)
    if options.input_file is None and options.model_path is None and steps is not None:
        if server_argv:
            raise ConfigError(f"{server_argv[0]} has no use without -i FILE.")
        return show_measured(steps, options)
    if options.input_file is None or options.model_path is None:
        raise ConfigError(
            "a plan needs -i FILE and --model-path MODEL; without both, only --steps "
            "FILE can be shown."
        )
    inputs = job_input(options)
    inputs.check()
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        own = Path(directory, "own_order.jsonl") if inputs.optimize_fields else None
        local = Staging(Path(directory), own).stage(inputs)
        return _plan_input(
            options, server_argv, inputs.title, local, Path(directory), steps, own
        )


def _plan_input(
    options: argparse.Namespace,
    server_argv: list[str],
    title: str,
    local: LocalInput,
    directory: Path,
    steps: Measured | None,
    own_order: Path | None,
) -> int:
    # Check all that can be checked first: the import of SGLang takes seconds.
    server_argv = ["--model-path", options.model_path, *server_argv]
    given = known_arguments("sglang", server_argv)
    _check_spread(given)
    check_model(given)
    skip = options.skip_invalid
    file = checked_requests(local, given, skip_invalid=skip)
    servers = boxes(options, "cpu") if options.choose else []
    from ..srt.compat.command_line import import_no_kernels

    import_no_kernels()
    device, note = (servers[0].hardware, "") if servers else chosen_device(options)
    from ..srt.engine import in_process, machine

    server_args = in_process.parse_server_args(server_argv)
    if machine.decodes_share(server_args):
        options.shared_prefix_attention = True
    with (
        file.closing(),
        TokenSpool(directory / "tokens.i32") as spool,
        in_process.renderer(server_args) as renderer,
    ):
        dedupe = options.dedupe or "auto"
        rendered = asyncio.run(render_file(file, renderer, spool, dedupe))
        rendered.refused[:0] = _invalid(file, local)
        if not len(rendered.requests):
            if not rendered.refused:
                raise InputError(f"{local.title} is empty: there is nothing to plan.")
            first = rendered.refused[0]
            raise InputError(
                f"no line of {local.title} can run; {first.name}: {first.reason}"
            )

        kept = server_args.kv_cache_dtype
        if kept == "auto":  # KV is as the model's activations
            kept = server_args.dtype

        def count(quantization: str | None, kv_dtype: str | None) -> ModelSpec:
            return machine.counted_model(
                rendered.model_config,
                kv_dtype=kv_dtype or kept,
                quantization=quantization or server_args.quantization,
            )

        if servers:
            n = len(rendered.requests)
            origin = _origin_of_lengths(rendered.requests, options.default_output_len)
            return choose(
                options,
                job=f"{title}, {n:,} requests; output lengths: {origin}",
                command=shlex.join([*command_line(options), *server_argv]),
                requests=rendered.requests,
                config=rendered.model_config,
                count=count,
                boxes=servers,
            )
        own_tokens = None
        if own_order is not None:
            own_tokens = _unique_tokens(
                LocalInput(own_order, local.title, local.parts),
                given, skip, renderer, directory,
            )  # fmt: skip
        counted = count(None, None)
        planned = make_machine(options, counted, device)
        planned, timed = timed_machine(
            planned, counted, server_args, device, options.tp
        )
        note = "; ".join(filter(None, (note, timed)))
        where = MachineInfo(options.model_path, device, options.tp, note, bool(timed))
        report = _report(options, title, rendered, planned, where, len(file))
    report = replace(report, measured=steps, own_order_tokens=own_tokens)
    return show(report, options)


def _unique_tokens(
    local: LocalInput,
    given: argparse.Namespace,
    skip_invalid: bool,
    renderer: Renderer,
    directory: Path,
) -> int:
    """Prompt tokens of a file that are computed if each prefix is computed once."""
    file = checked_requests(local, given, skip_invalid=skip_invalid)
    with file.closing(), TokenSpool(directory / "own_tokens.i32") as spool:
        requests = asyncio.run(render_file(file, renderer, spool, "off")).requests
        return build_prefix_tree(requests.tokens, requests.offsets).num_unique_tokens


def _check_spread(given: argparse.Namespace) -> None:
    """Raises ConfigError for a way to spread the model that would not be predicted."""
    for name in ("pp_size", "dp_size", "attn_dp_size", "ep_size"):
        if (number := getattr(given, name, None) or 1) > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {number} would not be predicted: plan takes "
                "one replica on --tp devices. Compare ways to spread the model with "
                "--choose instead."
            )


def _invalid(file: BatchFile, local: LocalInput) -> list[LeftOut]:
    """The bad lines, which run nothing."""
    return [
        LeftOut(
            file.custom_id(index) or local.line_name(error.line or 0), error.message
        )
        for index, error in file.invalid.items()
    ]


def _report(
    options: argparse.Namespace,
    title: str,
    rendered: RenderedFile,
    machine: Machine,
    where: MachineInfo,
    num_lines: int,
) -> Report:
    requests = rendered.requests
    auto = options.policy == AUTO
    orders = PAGED_ORDERS if auto else (options.policy,)
    found = forecast(
        requests,
        machine,
        progress((*orders, *options.compare)),
        OrderSettings(seed=options.seed, max_wait_steps=options.max_wait_steps),
        default_output_len=options.default_output_len,
    )
    chosen = found.best_of(orders)
    return Report(
        job=title,
        machine=where,
        forecast=found,
        left_out=[
            *rendered.refused,
            *_too_large(rendered, found.job.too_large, machine),
        ],
        chosen=chosen,
        verdict=f"auto chooses {chosen}" if auto else f"order: {chosen}",
        lengths=_origin_of_lengths(requests, options.default_output_len),
        num_lines=num_lines,
        num_merged=rendered.num_merged,
        gpu_price=options.price_per_gpu_hour,
        late_tokens=num_late_tokens(found.job.requests, found.job.tree),
    )


def _origin_of_lengths(requests: PlanRequests, default: int | None) -> str:
    known = int((requests.known_output_len != UNKNOWN).sum())
    if known == len(requests):
        return "all lengths are known"
    if default is None:
        default = prior_output_len(requests)
    assumed = f"{default:,} on average, less where a request allows less"
    if known == 0:
        return f"assumed: {assumed}"
    return f"{known:,} lengths are known; the others assumed: {assumed}"


def _too_large(
    rendered: RenderedFile, indices: Int64s, machine: Machine
) -> list[LeftOut]:
    capacity = machine.limits.kv_capacity_tokens
    input_len = rendered.requests.input_len
    return [
        LeftOut(
            rendered.custom_ids[i],
            f"too large for a KV cache of {capacity:,} tokens "
            f"(its prompt has {input_len[i]:,})",
        )
        for i in indices.tolist()
    ]


# The engine that a plan is for: its own limits, and the costs that it measured here.


def timed_machine(
    machine: Machine,
    model: ModelSpec,
    server_args: OfflineArgs,
    device: HardwareSpec,
    tp: int,
) -> tuple[Machine, str]:
    """A machine by the datasheet of ``tp`` devices, with the limits of the arguments and
    the costs of steps that were timed here; and where its costs are from, empty for the
    datasheet."""
    limits = machine.limits
    if most := server_args.max_total_tokens:
        capacity = min(limits.kv_capacity_tokens, most)
        limits = replace(limits, kv_capacity_tokens=capacity)
    if rows := server_args.max_running_requests:
        rows = min(rows, limits.max_running or rows)
        limits = replace(limits, max_running=rows)
    machine = replace(machine, limits=limits)
    from ..srt.engine.machine import device_name, planned_law

    name = device_name()
    here = match_hardware(name) if name else None
    if device.name != (here.name if here else "cpu"):
        return machine, ""
    parallel = Parallelism(tp=tp, ep=server_args.ep_size)
    found = planned_law(machine.cost, name, model, parallel)
    if found is None:
        return machine, ""
    law, mixed = found
    limits = replace(
        limits, as_sglang=mixed, min_step_tokens=min_step_tokens(limits.step_tokens)
    )
    note = f"costs of {law.num_samples} timed steps"
    return Machine(law.applied(machine.cost), limits), note


# The prompts of a batch file, rendered by SGLang for a plan.

# Requests rendered at the same time, in SGLang's threads.
LOOKAHEAD = 32


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """The prompts of a file, of which a line can have several, with the line of each; lines
    that SGLang cannot render; lines that get the answer of an equal one; the model's
    config.json."""

    requests: PlanRequests
    custom_ids: list[str]
    refused: list[LeftOut]
    num_merged: int
    model_config: dict[str, Any]


async def render_file(
    file: BatchFile, renderer: Renderer, spool: TokenSpool, dedupe: str
) -> RenderedFile:
    """Render every line that would be computed, and keep its tokens, in ``spool``, and its
    lengths."""
    valid = np.setdiff1d(np.arange(len(file)), np.array(list(file.invalid), np.int64))
    equal = find_equal(file, valid, dedupe)
    custom_ids: list[str] = []
    refused: list[LeftOut] = []
    max_new_tokens, known = array("q"), array("q")
    adapters, adapter = {"": 0}, array("i")

    async def render(
        number: np.int64,
    ) -> tuple[BatchRequestInput, RenderedRequest | str]:
        request = file[int(number)]
        return request, await renderer.render(request)

    with tqdm(
        total=len(equal.todo),
        desc="Rendering",
        unit="req",
        dynamic_ncols=True,
    ) as bar:
        async for request, found in in_order(map(render, equal.todo), LOOKAHEAD):
            bar.update()
            if isinstance(found, str):
                refused.append(LeftOut(request.custom_id, found))
                continue
            for prompt, limit in zip(found.prompts, found.max_new_tokens, strict=True):
                spool.append(prompt, found.shareable_len, found.namespace)
                adapter.append(adapters.setdefault(found.adapter, len(adapters)))
                custom_ids.append(request.custom_id)
                max_new_tokens.append(limit)
                known.append(limit if found.fixed_length else UNKNOWN)
    tokens, offsets = spool.arrays()
    return RenderedFile(
        PlanRequests(
            tokens,
            offsets,
            np.array(max_new_tokens, dtype=np.int32),
            np.array(known, dtype=np.int32),
            np.array(adapter, dtype=np.int32) if len(adapters) > 1 else None,
        ),
        custom_ids,
        refused,
        equal.num_merged,
        renderer.model_config,
    )
