"""``sglang-batch calibrate``: measures costs and ``row_share`` on an engine in this process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...config import OfflineBatchConfig
from ...errors import ConfigError, EngineError, ExitStatus, SGLangBatchError
from ...job.engine import GENERATE_URL, Engine
from ...job.job import Job, until_stopped
from ...planner.costs.cost_model import tokens_read
from ...planner.costs.step_law import StepLaw
from ...request import BatchRequestInput, RequestOutput, named_job_id, random_prompts
from ...run.backend_options import known_arguments
from ...run.engine_log import EngineLog, end_process
from ...run.model_place import check_model
from ...run.progress import Display
from ...run.stop_signals import StopSignals
from ...store.measured_costs import (
    KeptRowShare,
    MeasuredStep,
    RowShareKey,
    keep_row_share,
    timed_steps_path,
)
from .decode_shapes import (
    MIN_TIMED_STEPS,
    TIMED_STEPS,
    WARM_STEPS,
    DecodeLimits,
    Mix,
    Sizes,
    chosen_sizes,
    mixes,
    shapes,
    step_point,
)
from .row_share import Finding, RowShare, StepPoint, fit_row_share

if TYPE_CHECKING:
    from ...srt.engine.decode_timing import DecodeTimer

# Each round measures all batches once. No round starts that would end later than this.
MOST_ROUNDS = 5
LEAST_ROUNDS = 2
ROUNDS_S = 45.0
ROUNDS_ON_CPU_S = 15.0
# No further round of mixes starts after this.
MIXES_S = 30.0
# Relative noise that other processes make, and not the device.
LOUD = 0.1
_FITTED = ("row_share", "least", "weights_s", "kv_read_s", "noise")
_PACKAGES = ("sglang-batch", "sglang", "torch")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured.

    points: those of all rounds, each round in the same order.
    law: of all steps that were timed.
    """

    key: RowShareKey
    sizes: Sizes
    points: list[StepPoint]
    law: StepLaw | None


def calibrate(
    server_argv: list[str], *, rows: int | None = None, tokens: int | None = None
) -> int:
    """Measure, print and keep ``row_share``; returns the process's exit status.

    Args:
        server_argv: options of SGLang.
        rows, tokens: requests and prompt tokens of a batch, None to choose them.

    Raises:
        ConfigError: an option or the model cannot be used.
        EngineError: the engine failed.
        StoreWriteError: the result cannot be written.
    """
    from ...srt.compat.command_line import check_device

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = known_arguments("sglang", server_argv)
    if getattr(known, "dp_size", 1) > 1:
        raise ConfigError(
            f"--dp-size {known.dp_size}: replicas are alike, and one is measured; drop "
            "the option."
        )
    mode = getattr(known, "disaggregation_mode", "null")
    if mode != "null":
        raise ConfigError(
            f"--disaggregation-mode {mode}: an engine is measured that computes prompts "
            "and decodes; drop the option."
        )
    if getattr(known, "is_embedding", False):
        raise ConfigError("--is-embedding: an embedding model does not decode.")
    check_device(known)
    check_model(known)
    handle, name = tempfile.mkstemp(prefix="sglang-batch-calibrate-", suffix=".log")
    os.close(handle)
    with EngineLog(Path(name)) as engine_log:
        found = _Calibration(engine_log, rows, tokens).run(server_argv)
    print(law_text(found.law))
    fitted = fit_row_share(found.points)
    print(as_table(found, fitted))
    if fitted.finding is not Finding.NOTHING:
        kept = KeptRowShare(
            key=found.key,
            finding=fitted.finding.value,
            most=fitted.most if math.isfinite(fitted.most) else None,
            **{name: getattr(fitted, name) for name in _FITTED},
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={name: version(name) for name in _PACKAGES},
            points=[MeasuredStep(*point) for point in found.points],
        )
        print(f"Kept in {keep_row_share(kept)}.")
    else:
        print(f"No row_share is kept. {_advice(fitted)}")
        if found.law is None:
            return ExitStatus.FAILED
    return ExitStatus.OK


def law_text(law: StepLaw | None) -> str:
    """The costs that the timed steps show, for people."""
    if law is None:
        return "Too few steps could be timed: plans use the device's datasheet."
    names = ("arithmetic", "reading weights", "attention of prompts", "reading KV")
    factors = "\n".join(
        f"  {name:<24}{factor:>10.3g} times the datasheet's seconds"
        for name, factor in zip(names, law.factors, strict=True)
    )
    extras = law.extras
    seconds = {
        "a step": law.fixed_s,
        "a step with prompts": extras.prompt_step_s,
        "a prompt": extras.prompt_s,
        "a row that decodes": extras.decode_s,
        "such a row, with prompts": extras.mixed_decode_s,
        "1,000 of its KV tokens": 1e3 * extras.mixed_kv_token_s,
        "1,000 of them, squared": 1e6 * extras.mixed_square_s,
        "1,000 of a prompt so far": 1e3 * extras.prompt_context_s,
        "1,000 of it, squared": 1e6 * extras.prompt_square_s,
        "a request's arrival, end": extras.request_s,
        "decodes after prompts": extras.after_prompts_s,
    }
    others = "\n".join(
        f"  {name:<24}{x * 1e3:>10.3g} ms" for name, x in seconds.items()
    )
    overlap = "none" if law.exponent == 1 else f"k = {law.exponent:g}"
    return (
        f"Costs of {law.num_samples} timed steps, half of them within {law.noise:.0%}:\n"
        f"{factors}\n{others}\n  {'overlap':<24}{overlap:>10}\n"
        f"Kept in {timed_steps_path()}."
    )


def as_table(found: Measurement, fitted: RowShare) -> str:
    """The measured steps next to the fitted law and its figures, for people."""
    batches = shapes(found.sizes)
    lines = [
        f"{found.key}",
        f"Median of {TIMED_STEPS} decode steps with {found.sizes.rows} rows, in "
        f"{len(found.points) // len(batches)} rounds:",
        f"{'sum':>10}{'longest':>10}{'step':>12}{'law':>12}",
    ]
    for i in range(len(batches)):
        same = found.points[i :: len(batches)]
        total, longest, _ = same[0]
        seconds = statistics.median(point.seconds for point in same)
        decides = tokens_read(
            total, longest, found.sizes.rows, fitted.row_share, padded=False
        )
        law = fitted.weights_s + fitted.kv_read_s * decides
        lines.append(
            f"{total:>10,.0f}{longest:>10,.0f}{seconds * 1e3:>9.3f} ms"
            f"{law * 1e3:>9.3f} ms"
        )
    lines += [
        f"weights {fitted.weights_s * 1e3:.3f} ms, {fitted.kv_read_s * 1e9:.3g} ns per "
        f"token of KV, noise {fitted.noise:.1%}",
        str(fitted),
    ]
    return "\n".join(lines)


def _advice(fitted: RowShare) -> str:
    if fitted.noise > LOUD:
        return (
            "Steps of one batch take very different times: end other work on this "
            "machine. On a CPU, OMP_NUM_THREADS below its number of cores helps."
        )
    return "Give more --tokens: attention takes longer then."


class _Calibration:
    """Starts an engine, measures, and ends it. Its output goes to a log.

    The log is deleted unless the engine fails.
    """

    def __init__(
        self, engine_log: EngineLog, rows: int | None, tokens: int | None
    ) -> None:
        self._engine_log = engine_log
        self._display = Display(engine_log.terminal)
        self._rows, self._tokens = rows, tokens
        self._signals = StopSignals()
        self._started = False
        self._begun = time.monotonic()
        self._status = "Loading the engine"

    def run(self, server_argv: list[str]) -> Measurement:
        try:
            with self._display.showing(self._shown):
                found = self._measured(server_argv)
        except (SGLangBatchError, KeyboardInterrupt):
            self._engine_log.path.unlink(missing_ok=True)
            raise
        except Exception as error:
            traceback.print_exc()
            raise self._engine_log.failure(error, started=self._started) from error
        self._engine_log.path.unlink(missing_ok=True)
        return found

    def _measured(self, server_argv: list[str]) -> Measurement:
        from ...srt.engine import decode_timing, in_process
        from ...srt.plugin import engine_death

        # SGLang's processes inherit it.
        os.environ.update(decode_timing.ENVIRONMENT)
        server_args = in_process.parse_server_args(
            [*server_argv, *decode_timing.ARGUMENTS]
        )
        in_process.resolve(server_args, engine_death.tell)
        engine_death.listen(self._died)
        self._status = "Starting the engine"
        with ExitStack() as stack:
            engine, loop = stack.enter_context(in_process.engine(server_args))
            loop.run_until_complete(engine.connect())
            self._started = True
            timer = decode_timing.DecodeTimer(engine)
            limits = engine.machine.limits
            key = loop.run_until_complete(timer.key())
            room = DecodeLimits(
                kv_capacity_tokens=limits.kv_capacity_tokens,
                max_running=engine.max_running_requests,
                context_len=timer.context_len,
                page_size=limits.page_size,
                step_tokens=limits.step_tokens,
                on_cpu=key.device == "cpu",
            )
            sizes = chosen_sizes(room, self._rows, self._tokens)
            work = self._measure(timer, key, sizes, mixes(room, timer.vocab_size))
            measured = loop.run_until_complete(self._until_stopped(work))
        if measured is None:
            raise KeyboardInterrupt
        return measured

    async def _until_stopped(
        self, work: Coroutine[Any, Any, Measurement]
    ) -> Measurement | None:
        """The measurement, or None if a signal came."""
        stop = asyncio.Event()
        with self._signals.setting(stop, lambda: None):
            return await until_stopped(work, stop)

    async def _measure(
        self, timer: DecodeTimer, key: RowShareKey, sizes: Sizes, mixed: Sequence[Mix]
    ) -> Measurement:
        batches = shapes(sizes)
        self._display.say(
            f"Engine ready after {time.monotonic() - self._begun:.0f} s: {key}."
        )
        self._status = f"Warming up with {sizes.rows} rows, {sizes.tokens:,} tokens"
        for lengths in (batches[0], batches[-1]):
            await _median_step(timer, lengths, sizes.new_tokens)
        budget = ROUNDS_ON_CPU_S if key.device == "cpu" else ROUNDS_S
        begun = time.monotonic()
        rounds: list[list[StepPoint]] = []
        while len(rounds) < MOST_ROUNDS:
            spent = time.monotonic() - begun
            per_round = spent / max(1, len(rounds))
            if len(rounds) >= LEAST_ROUNDS and spent + per_round > budget:
                break
            points: dict[int, StepPoint] = {}
            # Every other round backwards, so that a drift is no difference of batches.
            order = range(len(batches))[:: -1 if len(rounds) % 2 else 1]
            for i in order:
                self._status = (
                    f"Measuring, round {len(rounds) + 1}: batch {len(points) + 1} of "
                    f"{len(batches)}"
                )
                seconds = await _median_step(timer, batches[i], sizes.new_tokens)
                points[i] = step_point(batches[i], seconds)
            rounds.append([points[i] for i in range(len(batches))])
        law = await self._law(timer, mixed)
        return Measurement(key, sizes, [one for each in rounds for one in each], law)

    async def _law(self, timer: DecodeTimer, mixed: Sequence[Mix]) -> StepLaw | None:
        learnt = timer.engine.learnt
        assert learnt is not None  # it is connected
        begun = time.monotonic()
        # Mixed steps first. Then as jobs will run: mixed only where that pays.
        with learnt.by_datasheet():
            await self._run_mixes(timer, mixed, 1)
        if await learnt.keep_steps():
            await learnt.learn()
        for turn in range(2, MOST_ROUNDS + 1):
            if time.monotonic() - begun > MIXES_S:
                break
            await self._run_mixes(timer, mixed, turn)
        return learnt.law()

    async def _run_mixes(
        self, timer: DecodeTimer, mixed: Sequence[Mix], turn: int
    ) -> None:
        for number, mix in enumerate(mixed, 1):
            self._status = (
                f"Timing steps, round {turn}: mix {number} of {len(mixed)}, "
                f"{len(mix.lengths)} requests"
            )
            # Attention over KV in scattered places takes longer on some devices.
            await timer.empty_cache()
            seed = turn * len(mixed) + number
            await run_mix(timer.engine, mix, seed, timer.vocab_size)

    def _shown(self) -> str:
        return f"{self._status} ({time.monotonic() - self._begun:.0f} s)"

    def _died(self) -> NoReturn:
        """SGLang is about to end this process. End it with the reason instead."""
        failure = self._engine_log.failure(None, started=self._started)
        reason = None if self._signals.received else failure
        end_process(self._display.say, reason, "interrupted")


async def _median_step(
    timer: DecodeTimer, lengths: list[int], new_tokens: int
) -> float:
    """Seconds of a decode step of a batch, the median of many."""
    times = await timer.step_seconds(lengths, new_tokens)
    timed = times[WARM_STEPS : WARM_STEPS + TIMED_STEPS]
    if len(timed) < MIN_TIMED_STEPS:
        raise EngineError(
            f"{len(lengths)} rows decoded together in {len(times)} steps only: the "
            "engine did not run them at the same time; give fewer --rows or --tokens."
        )
    return statistics.median(timed)


# Prefixes in common run together, and no candidates are simulated.
_CONFIG = OfflineBatchConfig(policy="dfs")


async def run_mix(engine: Engine, mix: Mix, number: int, vocab_size: int) -> None:
    """Run a mix: planned, so that its steps take what those of a job take.

    Args:
        number: of the mix; its prompts begin with other tokens than those of other numbers.

    Raises:
        EngineError: a request failed.
    """
    prompts = random_prompts(mix.lengths, vocab_size, seed=number)
    prefix = prompts[0][: mix.shared]
    requests = [
        BatchRequestInput(
            row,
            f"{number}-{row}",
            GENERATE_URL,
            json.dumps(
                {
                    "input_ids": [*prefix, *prompt[mix.shared :]],
                    "sampling_params": {
                        "temperature": 0,
                        "max_new_tokens": output,
                        "ignore_eos": True,
                    },
                }
            ).encode(),
        )
        for row, (prompt, output) in enumerate(zip(prompts, mix.outputs, strict=True))
    ]

    def check(_: BatchRequestInput, answer: RequestOutput) -> None:
        if not answer.ok:
            raise EngineError(
                f"a measured request failed: {answer.body.decode(errors='replace')}"
            )

    name = named_job_id(f"calibrate-{number}")
    job = Job(name, requests, range(len(requests)), engine, _CONFIG, check)
    await job.run()
