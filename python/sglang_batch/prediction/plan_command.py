"""``sglang-batch plan``: what a batch file will take, before anything runs."""

from __future__ import annotations

import argparse
import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from ..batch_api.jsonl import BatchFile, LineRules
from ..errors import ConfigError, InputError
from ..inputs.sources import InputOptions, check
from ..inputs.staging import LocalInput, Staging
from ..planner.hardware import HardwareSpec, match_hardware
from ..planner.model_spec import ModelSpec
from ..planner.order import ORDERS, OrderSettings
from ..planner.plan import AUTO, Machine
from ..planner.requests import UNKNOWN, PlanRequests
from ..request import BatchRequestInput
from ..run import validated_file
from ..run_options import input_options
from ..store.token_spool import TokenSpool
from .console import (
    check_plot,
    make_machine,
    measured,
    progress,
    read_measured,
    show,
    show_measured,
)
from .forecast import Lengths, forecast
from .report import LeftOut, MachineInfo, Report

# Requests rendered at a time: SGLang renders in threads.
LOOKAHEAD = 32


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """The prompts of a file.

    custom_ids: by prompt, the line that it is of.
    """

    requests: PlanRequests
    custom_ids: list[str]
    refused: list[LeftOut]
    model_config: dict[str, Any]


def plan(options: argparse.Namespace, server_argv: list[str]) -> int:
    """Predict a batch file's run; returns the process's exit status.

    Raises:
        InputError: the file cannot be used, or no line of it can run.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
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
    inputs: InputOptions = input_options(options)
    check(inputs)
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        local = Staging(Path(directory)).bring(inputs)
        report = _plan_input(options, server_argv, inputs.title, local, Path(directory))
    return show(replace(report, measured=steps), options)


def _plan_input(
    options: argparse.Namespace,
    server_argv: list[str],
    title: str,
    local: LocalInput,
    directory: Path,
) -> Report:
    # What needs no SGLang is checked first: a typo should not cost its import.
    with validated_file(local, LineRules(require_model=False)).closing():
        pass
    device, note = _device(options)
    from ..srt import launch, machine, render

    server_args = launch.parse_server_args(
        ["--model-path", options.model_path, *server_argv]
    )
    if machine.decodes_share(server_args):
        options.shared_prefix_attention = True
    rules = LineRules(
        models=(launch.model_name(server_args),),
        require_model=False,
        check_body=launch.check_body,
    )
    file = validated_file(local, rules)
    with (
        file.closing(),
        TokenSpool(directory / "tokens.i32") as spool,
        render.renderer(server_args) as renderer,
    ):
        rendered = asyncio.run(_render(file, renderer, spool))
        if not len(rendered.requests):
            first = rendered.refused[0]
            raise InputError(
                f"no line of {local.title} can run; {first.name}: {first.reason}"
            )
        return _report(options, title, rendered, device, note, len(file))


def _report(
    options: argparse.Namespace,
    title: str,
    rendered: RenderedFile,
    device: HardwareSpec,
    note: str,
    num_lines: int,
) -> Report:
    model = ModelSpec.from_hf_config(rendered.model_config)
    machine = make_machine(options, model, device)
    requests = rendered.requests
    policies = ORDERS if options.policy == AUTO else (options.policy,)
    found = forecast(
        requests,
        machine,
        progress(dict.fromkeys((*policies, *options.compare))),
        Lengths(default=options.default_output_len),
        OrderSettings(seed=options.seed),
    )
    known = int((requests.known_output_len != UNKNOWN).sum())
    chosen = found.best if options.policy == AUTO else options.policy
    return Report(
        job=title,
        machine=MachineInfo(options.model_path, device, options.tp, note),
        forecast=found,
        left_out=[*rendered.refused, *_too_large(rendered, found.too_large, machine)],
        chosen=chosen,
        verdict=f"auto chooses {chosen}"
        if options.policy == AUTO
        else f"order: {chosen}",
        lengths=_lengths(known, len(requests), options.default_output_len),
        num_lines=num_lines,
    )


def _lengths(known: int, total: int, default: int) -> str:
    if known == total:
        return "all lengths are known"
    assumed = f"{default:,} on average, or less where a request asks for less"
    if known == 0:
        return f"assumed: {assumed}"
    return f"{known:,} lengths are known; the others assumed: {assumed}"


def _too_large(rendered: RenderedFile, places: Any, machine: Machine) -> list[LeftOut]:
    capacity = machine.limits.kv_capacity_tokens
    input_len = rendered.requests.input_len
    return [
        LeftOut(
            rendered.custom_ids[i],
            f"too large for a KV cache of {capacity:,} tokens "
            f"(its prompt has {input_len[i]:,})",
        )
        for i in places.tolist()
    ]


async def _render(file: BatchFile, renderer: Any, spool: TokenSpool) -> RenderedFile:
    """Render every line; only its tokens and lengths are kept."""
    custom_ids: list[str] = []
    refused: list[LeftOut] = []
    longest, known = array("q"), array("q")
    with tqdm(total=len(file), desc="Rendering", unit="req", dynamic_ncols=True) as bar:
        async for request, found in _rendered_in_order(file, renderer):
            bar.update()
            if isinstance(found, str):
                refused.append(LeftOut(request.custom_id, found))
                continue
            for prompt, length in zip(found.prompts, found.max_new_tokens, strict=True):
                spool.append(prompt)
                custom_ids.append(request.custom_id)
                longest.append(length)
                known.append(length if found.fixed_length else UNKNOWN)
    tokens, offsets = spool.arrays()
    return RenderedFile(
        PlanRequests(
            tokens,
            offsets,
            np.array(longest, dtype=np.int32),
            np.array(known, dtype=np.int32),
        ),
        custom_ids,
        refused,
        renderer.model_config,
    )


async def _rendered_in_order(
    file: BatchFile, renderer: Any
) -> AsyncGenerator[tuple[BatchRequestInput, Any]]:
    ahead: deque[tuple[BatchRequestInput, asyncio.Task[Any]]] = deque()
    for index in range(len(file)):
        request = file[index]
        ahead.append((request, asyncio.create_task(renderer.render(request))))
        if len(ahead) == LOOKAHEAD:
            first, task = ahead.popleft()
            yield first, await task
    for request, task in ahead:
        yield request, await task


def _device(options: argparse.Namespace) -> tuple[HardwareSpec, str]:
    """The device to plan for, and why this one if nobody named it."""
    if options.hardware is not None:
        return measured(options, options.hardware), ""
    from ..srt.machine import device_name

    name = device_name()
    if name is None:
        return measured(options, "cpu"), "no GPU here; name another with --hardware"
    if match_hardware(name) is None:
        raise ConfigError(
            f"This machine's {name!r} is not a device that is known; name the nearest "
            "that is with --hardware, and measured figures with --compute-tflops and "
            "--bandwidth-tbs."
        )
    return measured(options, name), "this machine"
