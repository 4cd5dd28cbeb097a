"""``sglang-batch simulate``: policies on synthetic jobs and on traces of lengths."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..planner.costs.model_spec import ModelSpec
from ..planner.machine_model import Machine
from ..planner.ordering.order import OrderSettings
from ..planner.requests import Int64s
from ..workloads.mix import Workload
from .console import check_plot, progress, show
from .forecast import Lengths, forecast
from .machine_choice import make_machine, named_device
from .models import MODELS
from .report import LeftOut, MachineInfo, Report
from .synthetic_jobs import SyntheticJob


def simulate(options: argparse.Namespace) -> int:
    """Simulate a job under several policies; returns the process's exit status.

    Raises:
        InputError: a file cannot be used.
        ConfigError: an option cannot be used.
    """
    check_plot(options.plot)
    name, model = _model(options)
    device = named_device(options, options.hardware)
    machine = make_machine(options, model, device, paper_costs=options.paper_costs)
    policies = progress(options.policies)
    job: SyntheticJob = options.job
    workload = job.make(options.num_requests, options.seed, machine.cost)
    found = forecast(
        workload.requests,
        machine,
        policies,
        Lengths(true=workload.output_len, sample_share=options.sample_share),
        OrderSettings(seed=options.seed, max_wait_steps=options.max_wait_steps),
    )
    report = Report(
        job=job.title,
        machine=MachineInfo(name, device, options.tp),
        forecast=found,
        left_out=_too_large(workload, found.too_large, machine),
        chosen=found.best,
        verdict=f"auto chooses {found.best}",
        lengths=f"true lengths; the orders use estimates learnt from "
        f"{found.num_sampled:,} answers",
    )
    return show(report, options)


def _model(options: argparse.Namespace) -> tuple[str, ModelSpec]:
    if options.model_path is None:
        return options.model, _counted(options, MODELS[options.model])
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
    return str(path), _counted(options, config)


def _counted(options: argparse.Namespace, config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_hf_config(
        config, kv_dtype=options.kv_cache_dtype, quantization=options.quantization
    )


def _too_large(workload: Workload, indices: Int64s, machine: Machine) -> list[LeftOut]:
    needed = workload.requests.input_len + workload.output_len
    capacity = machine.limits.kv_capacity_tokens
    return [
        LeftOut(f"request {i}", f"{needed[i]:,} tokens; the KV cache has {capacity:,}")
        for i in indices.tolist()
    ]
