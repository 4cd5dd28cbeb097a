"""``sglang-batch plan``: predicts the run of a batch file before anything runs."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..config import AUTO
from ..errors import ConfigError, InputError
from ..inputs.local_input import LocalInput
from ..inputs.staging import Staging, check_template
from ..planner.choosing.ways import Box
from ..planner.costs.hardware import HardwareSpec, Parallelism, match_hardware
from ..planner.costs.model_spec import ModelSpec, counted_model
from ..planner.machine_model import Machine, min_step_tokens
from ..planner.ordering.order import OrderSettings
from ..planner.output_lengths.estimates import prior_output_len
from ..planner.plan import orders_for
from ..planner.prefixes.prefix_tree import build_prefix_tree
from ..planner.requests import UNKNOWN, PlanRequests
from ..run.backend_options import known_arguments
from ..run.model_place import check_model
from ..run.prepare import line_rules
from ..run.run_options import command_line, job_input
from .late_text import num_late_tokens
from .machine_choice import choose, chosen_device, make_machine, named_device
from .options import boxes, check_choice
from .rendered_file import EngineFacts, FileRenderer, RenderedFile
from .report import LeftOut, MachineInfo, Measured, Report, forecast
from .table import check_plot, progress, read_measured, show, show_measured


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
    # All that can be checked is, before much is read: the import of SGLang takes seconds.
    server_argv = ["--model-path", options.model_path, *server_argv]
    given = known_arguments("sglang", server_argv)
    _check_spread(given)
    check_model(given)
    servers = boxes(options, "cpu") if options.choose else []
    if options.hardware is not None and not servers:
        named_device(options, options.hardware)
    if not options.skip_invalid:
        check_template(inputs, line_rules(given))
    with TemporaryDirectory(prefix="sglang-batch-") as name:
        directory = Path(name)
        own = directory / "own_order.jsonl" if inputs.optimize_fields else None
        local = Staging(directory, own).stage(inputs)
        skip = options.skip_invalid
        renderer = FileRenderer(
            server_argv, given, skip_invalid=skip, directory=directory
        )
        return _plan_input(options, inputs.title, local, renderer, servers, steps, own)


def _plan_input(
    options: argparse.Namespace,
    title: str,
    local: LocalInput,
    renderer: FileRenderer,
    servers: list[Box],
    steps: Measured | None,
    own_order: Path | None,
) -> int:
    with renderer:
        rendered = renderer.render(local, options.dedupe or "auto")
        if not len(rendered.requests):
            if not rendered.refused:
                raise InputError(f"{local.title} is empty: there is nothing to plan.")
            first = rendered.refused[0]
            raise InputError(
                f"no line of {local.title} can run; {first.name}: {first.reason}"
            )
        engine = rendered.engine
        if engine.shares:
            options.shared_prefix_attention = True

        def count(quantization: str | None, kv_dtype: str | None) -> ModelSpec:
            return counted_model(
                engine.model_config,
                kv_dtype=kv_dtype or engine.kv_dtype,
                quantization=quantization or engine.quantization,
            )

        if servers:
            n = len(rendered.requests)
            origin = _origin_of_lengths(rendered.requests, options.default_output_len)
            return choose(
                options,
                job=f"{title}, {n:,} requests; output lengths: {origin}",
                command=shlex.join([*command_line(options), *renderer.server_argv]),
                requests=rendered.requests,
                config=engine.model_config,
                count=count,
                boxes=servers,
            )
        own_tokens = None
        if own_order is not None:
            own = LocalInput(own_order, local.title, local.parts)
            other = renderer.render(own, "off").requests
            tree = build_prefix_tree(other.tokens, other.offsets)
            own_tokens = tree.num_unique_tokens
        device, note = chosen_device(options, engine.device)
        counted = count(None, None)
        planned = make_machine(options, counted, device)
        planned, timed = timed_machine(planned, counted, engine, device, options.tp)
        note = "; ".join(filter(None, (note, timed)))
        where = MachineInfo(options.model_path, device, options.tp, note, bool(timed))
        report = _report(options, title, rendered, planned, where)
    report = replace(report, measured=steps, own_order_tokens=own_tokens)
    return show(report, options)


def _check_spread(given: argparse.Namespace) -> None:
    """Raises ConfigError for a way to spread the model that would not be predicted."""
    for name in ("pp_size", "dp_size", "attn_dp_size", "ep_size"):
        if (number := getattr(given, name, None) or 1) > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {number} would not be predicted: plan takes "
                "one replica on --tp devices. Compare ways to spread the model with "
                "--choose instead."
            )


def _report(
    options: argparse.Namespace,
    title: str,
    rendered: RenderedFile,
    machine: Machine,
    where: MachineInfo,
) -> Report:
    requests = rendered.requests
    auto = options.policy == AUTO
    orders = orders_for(machine) if auto else (options.policy,)
    found = forecast(
        requests,
        machine,
        progress((*orders, *options.compare)),
        OrderSettings(seed=options.seed, max_wait_steps=options.max_wait_steps),
        default_output_len=options.default_output_len,
    )
    chosen = found.best_of(orders)
    large = f"too large for a KV cache of {machine.limits.kv_capacity_tokens:,} tokens"
    too_large = [
        LeftOut(
            rendered.custom_ids[i],
            f"{large} (its prompt has {requests.input_len[i]:,})",
        )
        for i in found.job.too_large.tolist()
    ]
    return Report(
        job=title,
        machine=where,
        forecast=found,
        left_out=[*rendered.refused, *too_large],
        chosen=chosen,
        verdict=f"auto chooses {chosen}" if auto else f"order: {chosen}",
        lengths=_origin_of_lengths(requests, options.default_output_len),
        num_lines=rendered.num_lines,
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


# The engine that a plan is for: its own limits, and the costs that it measured here.


def timed_machine(
    machine: Machine,
    model: ModelSpec,
    engine: EngineFacts,
    device: HardwareSpec,
    tp: int,
) -> tuple[Machine, str]:
    """A machine by the datasheet of ``tp`` devices, with the limits of the arguments and
    the costs of steps that were timed here; and where its costs are from, empty for the
    datasheet."""
    limits = machine.limits
    if most := engine.max_total_tokens:
        capacity = min(limits.kv_capacity_tokens, most)
        limits = replace(limits, kv_capacity_tokens=capacity)
    if rows := engine.max_running_requests:
        rows = min(rows, limits.max_running or rows)
        limits = replace(limits, max_running=rows)
    machine = replace(machine, limits=limits)
    name = engine.device
    here = match_hardware(name) if name else None
    if device.name != (here.name if here else "cpu"):
        return machine, ""
    from ..srt.engine.timed_steps import planned_law

    parallel = Parallelism(tp=tp, ep=engine.ep_size)
    found = planned_law(machine.cost, engine.steps_of, model, parallel)
    if found is None:
        return machine, ""
    law, mixed = found
    limits = replace(
        limits, as_sglang=mixed, min_step_tokens=min_step_tokens(limits.step_tokens)
    )
    note = f"costs of {law.num_samples} timed steps"
    return Machine(law.applied(machine.cost), limits), note
