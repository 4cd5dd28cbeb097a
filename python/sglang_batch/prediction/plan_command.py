"""``sglang-batch plan``: predicts the run of a batch file before anything runs."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..batch_api.jsonl import BatchFile
from ..errors import ConfigError, InputError
from ..inputs.local_input import LocalInput
from ..inputs.staging import Staging
from ..planner.costs.hardware import HardwareSpec
from ..planner.costs.model_spec import ModelSpec
from ..planner.machine_model import Machine
from ..planner.ordering.order import OrderSettings
from ..planner.output_lengths.estimates import prior_output_len
from ..planner.prefixes.prefix_tree import build_prefix_tree
from ..planner.requests import UNKNOWN, Int64s, PlanRequests
from ..policies import AUTO, PAGED_ORDERS
from ..run.checked_input import checked_again, checked_requests
from ..run.model_place import check_model
from ..run.options.run_options import job_input, named_model
from ..store.token_spool import TokenSpool
from .console import check_plot, progress, read_measured, show, show_measured
from .forecast import Lengths, forecast
from .machine_choice import chosen_device, make_machine
from .machine_search.choice_options import boxes, check_choice
from .machine_search.choice_report import choose
from .planned_engine import kept_kv_dtype, timed_machine
from .rendered_file import RenderedFile, render_file
from .report import LeftOut, MachineInfo, Measured, Report

if TYPE_CHECKING:
    from ..srt.engine.in_process import Renderer


def plan(options: argparse.Namespace, server_argv: list[str]) -> int:
    """Predict a batch file's run; returns the process's exit status.

    Raises:
        InputError: the file cannot be used, or no line of it can run.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
    check_choice(options)
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
    from ..srt.compat.command_line import check_arguments

    # Check all that can be checked first: the import of SGLang takes seconds.
    server_argv = ["--model-path", options.model_path, *server_argv]
    given = check_arguments(server_argv)
    _check_spread(given)
    check_model(given)
    named, skip = named_model(server_argv), options.skip_invalid
    file = checked_requests(local, named, skip_invalid=skip)
    servers = boxes(options, "cpu") if options.choose else []
    device, note = (servers[0].hardware, "") if servers else chosen_device(options)
    from ..srt.engine import in_process, machine

    server_args = in_process.parse_server_args(server_argv)
    if machine.decodes_share(server_args):
        options.shared_prefix_attention = True
    model = in_process.model_name(server_args)
    file = checked_again(file, local, named=named, model=model, skip_invalid=skip)
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

        def count(quantization: str | None, kv_dtype: str | None) -> ModelSpec:
            return machine.counted_model(
                rendered.model_config,
                kv_dtype=kv_dtype or kept_kv_dtype(server_args),
                quantization=quantization or server_args.quantization,
            )

        if servers:
            n = len(rendered.requests)
            origin = _origin_of_lengths(rendered.requests, options.default_output_len)
            named_input = shlex.join(map(str, options.input_file))
            model_path = shlex.quote(options.model_path)
            return choose(
                options,
                job=f"{title}, {n:,} requests; output lengths: {origin}",
                command=f"sglang-batch run -i {named_input} --model-path {model_path}",
                requests=rendered.requests,
                config=rendered.model_config,
                count=count,
                boxes=servers,
            )
        own_tokens = None
        if own_order is not None:
            own_tokens = _unique_tokens(
                LocalInput(own_order, local.title, local.parts),
                model, skip, renderer, directory,
            )  # fmt: skip
        counted = count(None, None)
        planned = make_machine(options, counted, device)
        planned, timed = timed_machine(
            planned, counted, server_args, device, options.tp
        )
        note = "; ".join(filter(None, (note, timed)))
        report = _report(options, title, rendered, planned, device, note, len(file))
    report = replace(report, measured=steps, own_order_tokens=own_tokens)
    return show(report, options)


def _unique_tokens(
    local: LocalInput,
    model: str,
    skip_invalid: bool,
    renderer: Renderer,
    directory: Path,
) -> int:
    """Prompt tokens of a file that are computed if each prefix is computed once."""
    file = checked_requests(local, model, skip_invalid=skip_invalid)
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
    device: HardwareSpec,
    note: str,
    num_lines: int,
) -> Report:
    requests = rendered.requests
    auto = options.policy == AUTO
    orders = PAGED_ORDERS if auto else (options.policy,)
    found = forecast(
        requests,
        machine,
        progress((*orders, *options.compare)),
        Lengths(default=options.default_output_len),
        OrderSettings(seed=options.seed, max_wait_steps=options.max_wait_steps),
    )
    chosen = found.best_of(orders)
    return Report(
        job=title,
        machine=MachineInfo(options.model_path, device, options.tp, note),
        forecast=found,
        left_out=[*rendered.refused, *_too_large(rendered, found.too_large, machine)],
        chosen=chosen,
        verdict=f"auto chooses {chosen}" if auto else f"order: {chosen}",
        lengths=_origin_of_lengths(requests, options.default_output_len),
        num_lines=num_lines,
        num_merged=rendered.num_merged,
        gpu_price=options.price_per_gpu_hour,
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
