"""``sglang-batch simulate``: policies on synthetic jobs and on traces of lengths."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from ..planner.model_spec import ModelSpec
from ..planner.order import OrderSettings
from ..planner.plan import Machine
from ..workloads.blend import TRACES, blend
from ..workloads.mix import Workload, combine, industry, shared_prefix_groups
from ..workloads.traces import read_trace
from .console import check_plot, make_machine, measured, progress, show
from .forecast import Lengths, forecast
from .models import MODELS
from .report import LeftOut, MachineInfo, Report


def simulate(options: argparse.Namespace) -> int:
    """Simulate a job under several policies; returns the process's exit status.

    Raises:
        InputError: a file cannot be used.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
    name, model = _model(options)
    device = measured(options, options.hardware)
    machine = make_machine(options, model, device, paper_costs=options.paper_costs)
    policies = progress(dict.fromkeys(options.policies))
    job = _workload(options, machine)
    found = forecast(
        job.requests,
        machine,
        policies,
        Lengths(true=job.output_len, sample_share=options.sample_share),
        OrderSettings(seed=options.seed),
    )
    report = Report(
        job=_job_name(options, job),
        machine=MachineInfo(name, device, options.tp),
        forecast=found,
        left_out=_too_large(job, found.too_large, machine),
        chosen=found.best,
        verdict=f"auto chooses {found.best}",
        lengths=f"the truth; estimates are learnt from {found.num_sampled:,} answers",
    )
    return show(report, options)


def _model(options: argparse.Namespace) -> tuple[str, ModelSpec]:
    if options.model_path is None:
        return options.model, ModelSpec.from_hf_config(MODELS[options.model])
    path: Path = options.model_path
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model-path {path}: {file} cannot be read: {error}"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"--model-path {path}: {file} is not a JSON object.")
    return str(path), ModelSpec.from_hf_config(config)


def _workload(options: argparse.Namespace, machine: Machine) -> Workload:
    """The job that the options name; there is exactly one."""
    count, seed = options.num_requests, options.seed
    if options.lengths is not None:
        return _traces(options.lengths, count, seed)
    count = count or options.default_num_requests
    if options.groups is not None:
        prefix, distinct, degree, output = options.groups
        return shared_prefix_groups(count, prefix, distinct, degree, output, seed)
    if options.industry:
        return industry(count, seed)
    density, sharing = options.blend or TRACES[options.trace or 1]
    cost = machine.cost
    return blend(density, sharing, count, seed, cost.token_time_s, cost.kv_read_time_s)


def _job_name(options: argparse.Namespace, job: Workload) -> str:
    """The job as a person would call it."""
    if options.lengths is not None:
        return " + ".join(path.name for path in options.lengths)
    if options.groups is not None:
        prefix, distinct, degree, output = options.groups
        return (
            f"groups of {degree} with {prefix} + {distinct} prompt tokens, {output} "
            "output tokens"
        )
    if options.industry:
        return "snippets of documents (industry)"
    density, sharing = options.blend or TRACES[options.trace or 1]
    trace = "blend" if options.blend else f"trace {options.trace or 1}"
    return f"{trace} (density {density:g}, sharing {sharing:g})"


def _traces(paths: list[Path], count: int | None, seed: int) -> Workload:
    """The first requests of each file, the same number of each, shuffled together."""
    limit = None if count is None else -(-count // len(paths))
    jobs = [read_trace(path, limit=limit, seed=seed) for path in paths]
    if len({job.name for job in jobs}) < len(jobs):
        names = ", ".join(str(path) for path in paths)
        raise ConfigError(f"--lengths {names}: give each file once.")
    return combine(jobs, seed)


def _too_large(job: Workload, places: Any, machine: Machine) -> list[LeftOut]:
    needed = job.requests.input_len + job.output_len
    capacity = machine.limits.kv_capacity_tokens
    return [
        LeftOut(f"request {i}", f"{needed[i]:,} tokens; the KV cache has {capacity:,}")
        for i in places.tolist()
    ]
