"""``sglang-batch simulate``: policies on synthetic jobs and on traces of lengths."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..planner.costs.hardware import Parallelism
from ..planner.costs.model_spec import ModelSpec, counted_model
from ..planner.costs.step_costs import step_costs
from ..planner.ordering.order import OrderSettings
from .machine_choice import choose, make_machine, named_device
from .models import MODELS
from .options import DEFAULT_HARDWARE, boxes, check_choice
from .report import LeftOut, MachineInfo, Report, forecast
from .synthetic_jobs import SyntheticJob, lengths_job
from .table import check_plot, progress, show


def simulate(options: argparse.Namespace) -> int:
    """Simulate a job under several policies; returns the process's exit status.

    Raises:
        InputError: a file cannot be used.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
    check_choice(options)
    if options.lengths:
        options.job = lengths_job(options.lengths)
    job: SyntheticJob = options.job
    name, config = _config(options)
    if options.choose:
        servers = boxes(options, DEFAULT_HARDWARE)
        count = partial(_counted, options, config)
        # Densities of synthetic jobs are those of one device.
        one = step_costs(count(), servers[0].hardware, Parallelism())
        workload = job.make(options.num_requests, options.seed, one)
        return choose(
            options,
            job=f"{job.title}, {len(workload.requests):,} requests, {name}",
            command=f"sglang-batch run -i INPUT --model-path {options.model_path or 'MODEL'}",
            requests=workload.requests,
            config=config,
            count=count,
            boxes=servers,
            output_len=workload.output_len,
        )
    model = _counted(options, config)
    device = named_device(options, options.hardware or DEFAULT_HARDWARE)
    machine = make_machine(options, model, device, paper_costs=options.paper_costs)
    policies = progress(options.policies)
    workload = job.make(options.num_requests, options.seed, machine.cost)
    found = forecast(
        workload.requests,
        machine,
        policies,
        OrderSettings(seed=options.seed, max_wait_steps=options.max_wait_steps),
        true_output_len=workload.output_len,
        sample_share=options.sample_share,
    )
    best = found.best_of(found.runs)
    needed = workload.requests.input_len + workload.output_len
    room = f"tokens; the KV cache has {machine.limits.kv_capacity_tokens:,}"
    report = Report(
        job=job.title,
        machine=MachineInfo(name, device, options.tp),
        forecast=found,
        left_out=[
            LeftOut(f"request {i}", f"{needed[i]:,} {room}")
            for i in found.job.too_large.tolist()
        ],
        chosen=best,
        verdict=f"auto chooses {best}",
        lengths=f"true lengths; the orders use estimates learnt from "
        f"{found.num_sampled:,} answers",
        gpu_price=options.price_per_gpu_hour,
    )
    return show(report, options)


def _config(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The model's name and its ``config.json``."""
    if options.model_path is None:
        return options.model, MODELS[options.model]
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
    return str(path), config


def _counted(
    options: argparse.Namespace,
    config: dict[str, Any],
    quantization: str | None = None,
    kv_dtype: str | None = None,
) -> ModelSpec:
    quantization = quantization or options.quantization
    # A method that is asked for must be known. That of a checkpoint is what it is.
    count = counted_model if quantization is None else ModelSpec.from_hf_config
    return count(
        config,
        kv_dtype=kv_dtype or options.kv_cache_dtype,
        quantization=quantization,
    )
