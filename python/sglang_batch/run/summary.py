"""The summary of a finished job: counts, rates, and errors by reason."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..batch_api.lines import line_error, without_details
from ..batch_api.objects import dollars
from ..batch_api.stop_rules import RULES
from ..inputs.field_sample import FieldSaving
from ..request import Usage
from ..store.result_log import ResultLog, finished_lines
from .outputs import Outputs

if TYPE_CHECKING:
    from ..fleet.fleet_worker import WorkerState

MAX_REASONS_SHOWN = 8
MAX_REASON_CHARS = 160
# Share of the answers from which on the summary says what to do about truncated ones.
MOST_TRUNCATED = 0.05


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Requests and tokens of a log, at some moment.

    merged: requests that got the answer of an equal one. Their tokens, in ``merged_*``, are
        among the others as if they had been computed.
    cut_json, cut_regex, cut_repetition: answers that each stop rule has ended.
    truncated: answers that ended at their limit of tokens.
    """

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    merged: int = 0
    merged_prompt_tokens: int = 0
    merged_cached_tokens: int = 0
    merged_output_tokens: int = 0
    cut_json: int = 0
    cut_regex: int = 0
    cut_repetition: int = 0
    truncated: int = 0

    @classmethod
    def of(cls, log: ResultLog) -> Counts:
        return Counts(
            completed=log.num_completed,
            failed=log.num_failed,
            prompt_tokens=log.usage.input_tokens,
            cached_tokens=log.usage.cached_tokens,
            output_tokens=log.usage.output_tokens,
            reasoning_tokens=log.usage.reasoning_tokens,
            merged=log.num_merged,
            merged_prompt_tokens=log.merged_usage.input_tokens,
            merged_cached_tokens=log.merged_usage.cached_tokens,
            merged_output_tokens=log.merged_usage.output_tokens,
            cut_json=log.cuts.json,
            cut_regex=log.cuts.regex,
            cut_repetition=log.cuts.repetition,
            truncated=log.cuts.length,
        )

    @property
    def computed(self) -> Usage:
        """The tokens of the requests that were computed, not merged."""
        return Usage(
            self.prompt_tokens - self.merged_prompt_tokens,
            self.cached_tokens - self.merged_cached_tokens,
            self.output_tokens - self.merged_output_tokens,
        )

    def since(self, before: Counts) -> Counts:
        """The difference to an earlier moment."""
        now, then = dataclasses.asdict(self), dataclasses.asdict(before)
        return Counts(**{name: now[name] - then[name] for name in now})


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Requests that failed for one reason: the first one's message and ``custom_id``."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The work of one of several engines in this run of a job.

    status: at the end, a :class:`~sglang_batch.fleet.fleet_worker.WorkerStatus`.
    answered: lines that it answered, those included that ran again elsewhere.
    tokens: prompt and output tokens of them.
    tokens_per_second: these tokens over the seconds of the run.
    cached_share: share of the prompt tokens that came from its cache, 0 to 1.
    losses: how often it was lost.
    reason: of the last loss, or why it is left out.
    engine_s: seconds in which each of its replicas was there, loaded, added up.
    """

    name: str
    status: str
    answered: int
    tokens: int
    tokens_per_second: float
    cached_share: float
    losses: int
    reason: str
    engine_s: float = 0.0

    @classmethod
    def of(cls, state: WorkerState, seconds: float) -> EngineWork:
        names = (each.name for each in dataclasses.fields(cls))
        return cls(
            **{name: getattr(state, name) for name in names if hasattr(state, name)},
            tokens_per_second=_rate(state.tokens, seconds),
            engine_s=state.there_s,
        )

    def __str__(self) -> str:
        done = (
            f"{self.answered:,} requests, {self.tokens_per_second:,.0f} tokens/s, "
            f"cached {self.cached_share:.1%}"
        )
        if self.status == "released":
            done += f"; released after {self.engine_s:,.0f} engine seconds"
        if not self.losses and not self.reason:
            return f"{self.name}: {done}"
        lost = f"lost {self.losses:,} time{'s' * (self.losses != 1)}: {self.reason}"
        if self.status in ("running", "released"):
            return f"{self.name}: {done}; {lost}"
        # Lost, it is looked for, or started, until the end.
        again = " again" * (self.status == "starting")
        return f"{self.name}: {done}; {self.status}{again}, {lost}"


@dataclass(frozen=True, slots=True)
class LastRequests:
    """The tail of a run: its last part, in which engines were less than half full.

    engine_s: seconds of all engines, after each last ran half as many requests as when nothing
        waited for it any more.
    requests: those that ended in it.
    last: ``custom_id`` of the last of them, the very last one first.
    """

    engine_s: float
    requests: int
    last: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.engine_s:,.1f} engine seconds less than half full"
        if not self.requests:
            return said
        return (
            f"{said}, for {self.requests:,} requests, the last of them {self.last[0]}"
        )


@dataclass(frozen=True, kw_only=True)
class Summary(Counts):
    """Counts of a finished job, and rates without merged requests of the run that ended it.

    refused: those of ``failed`` that were no valid requests.
    given_up: requests without an answer, as enough of the others have one.
    errors: failed requests by reason, most frequent first.
    seconds: wall time of this run of the job, from the first request rendered to
        the last answer stored. Excludes loading the model.
    tokens_per_second, output_tokens_per_second: prompt and output tokens of this run over
        ``seconds``, and the latter alone.
    computed_tokens_per_second: prompt tokens that were not cached.
    cached_share: share of the job's prompt tokens that came from the prefix cache, 0 to 1.
    optimal_cached_share: share that a perfect prefix cache would have saved: what the
        prompts have in common, or ``cached_share`` where the cache held what other jobs
        computed. None if the policy does not compute it, or earlier runs did a part.
    this_run: the part of the job that this run did. None: all of it.
    engine_s: seconds of each replica in this run, added up. Of a fleet: those in which it was
        there, loaded.
    dollars: for these, at the price that the run was given. None without one.
    engines: the work of each engine, if there are several.
    fields: the saving by the order of the fields, if it was optimized: a
        :class:`~sglang_batch.inputs.field_sample.FieldSaving` as a dictionary.
    """

    refused: int = 0
    given_up: int = 0
    errors: tuple[ErrorGroup, ...] = ()
    seconds: float
    tokens_per_second: float
    output_tokens_per_second: float = 0.0
    computed_tokens_per_second: float = 0.0
    cached_share: float
    optimal_cached_share: float | None = None
    this_run: Counts | None = None
    engine_s: float = 0.0
    dollars: float | None = None
    tail: LastRequests | None = None
    engines: tuple[EngineWork, ...] = ()
    fields: dict[str, int] | None = None

    @classmethod
    def of_log(
        cls,
        log: ResultLog,
        before: Counts,
        seconds: float,
        optimal_cached_share: float | None = None,
        engines: Sequence[WorkerState] = (),
        tail: LastRequests | None = None,
        price: float | None = None,
        replicas: int = 1,
    ) -> Summary:
        """The summary of the results in a log.

        Args:
            before: of the log when this run began.
            engines: all of a fleet.
            price: dollars for an hour of a replica.
            replicas: of an engine that is none of a fleet.
        """
        job = Counts.of(log)
        done_before = before.completed + before.failed
        if done_before > log.num_refused:  # which have no tokens
            optimal_cached_share = None
        this_run = job.since(before) if done_before else None
        engine_s = seconds * replicas
        if engines:
            engine_s = sum(state.there_s for state in engines)
        several = engines if len(engines) > 1 else ()
        return replace(
            cls.of_counts(job, seconds, optimal_cached_share, this_run),
            refused=log.num_refused,
            given_up=len(log) - log.num_done,
            errors=_errors_of(log) if log.num_failed else (),
            engine_s=round(engine_s, 3),
            dollars=None if price is None else dollars(engine_s, price),
            tail=tail,
            engines=tuple(EngineWork.of(state, seconds) for state in several),
        )

    @classmethod
    def of_counts(
        cls,
        job: Counts,
        seconds: float,
        optimal_cached_share: float | None = None,
        this_run: Counts | None = None,
    ) -> Summary:
        part, whole = (this_run or job).computed, job.computed
        possible = whole.possible_hit_rate(optimal_cached_share)
        return cls(
            **dataclasses.asdict(job),
            seconds=round(seconds, 3),
            tokens_per_second=_rate(part.input_tokens + part.output_tokens, seconds),
            output_tokens_per_second=_rate(part.output_tokens, seconds),
            computed_tokens_per_second=_rate(
                part.input_tokens - part.cached_tokens, seconds
            ),
            cached_share=round(whole.cached_tokens / max(whole.input_tokens, 1), 4),
            optimal_cached_share=None if possible is None else round(possible, 4),
            this_run=this_run,
            engine_s=round(seconds, 3),
        )

    def with_failed(self, rows: Sequence[int], reason: str) -> Summary:
        """The summary in which completed requests, by their rows, have failed for a reason."""
        if not rows:
            return self
        groups = [*self.errors, ErrorGroup(reason, len(rows), f"row {rows[0]}")]
        return replace(
            self,
            completed=self.completed - len(rows),
            failed=self.failed + len(rows),
            errors=tuple(sorted(groups, key=lambda group: -group.count)),
        )

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        if not self.engines:
            del values["engines"]
        if self.fields is None:
            del values["fields"]
        return values

    def as_json(self) -> str:
        """The summary as one line of JSON, for scripts."""
        return json.dumps(self.as_dict())

    def as_table(self, outputs: Outputs | None = None) -> str:
        """The summary as aligned lines, for people.

        Args:
            outputs: the files to name.
        """
        rows = [*self._request_rows(), *self._token_rows(), *self._rate_rows()]
        if outputs is not None:
            rows.append(("results", str(outputs.output)))
            if self.failed:
                column = "the column 'error'" if outputs.table else "among the results"
                where = outputs.errors or column
                rows.append(("errors", str(where)))
        return "\n".join(f"{name:<20} {value}" for name, value in rows)

    def _request_rows(self) -> list[tuple[str, str]]:
        refused = f" ({self.refused:,} of them invalid)" if self.refused else ""
        rows = [
            ("requests completed", f"{self.completed:,}"),
            ("requests failed", f"{self.failed:,}{refused}"),
        ]
        for group in self.errors[:MAX_REASONS_SHOWN]:
            shown = f"{group.count:,} x {group.reason} (such as {group.example})"
            rows.append(("", shown))
        if rest := self.errors[MAX_REASONS_SHOWN:]:
            num = sum(group.count for group in rest)
            rows.append(("", f"{num:,} x {len(rest)} other reasons"))
        if self.given_up:
            given_up = f"{self.given_up:,}, as enough have an answer"
            rows.append(("requests given up", given_up))
        return rows

    def _token_rows(self) -> list[tuple[str, str]]:
        cached = f"{self.computed.cached_tokens:,} = {self.cached_share:.1%}"
        if self.optimal_cached_share is not None:
            cached += f" (possible: {self.optimal_cached_share:.1%})"
        rows = [
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("cached tokens", cached),
            ("output tokens", f"{self.output_tokens:,}"),
        ]
        if self.reasoning_tokens:
            rows.append(("of reasoning", f"{self.reasoning_tokens:,}"))
        if self.fields is not None:
            rows.append(("order of fields", str(FieldSaving(**self.fields))))
        if self.merged:
            merged = (
                f"{self.merged:,}, equal to others or in the cache: "
                f"{self.merged_prompt_tokens:,} prompt and "
                f"{self.merged_output_tokens:,} output tokens were not computed"
            )
            rows.append(("merged requests", merged))
        cuts = {rule: cut for rule in RULES if (cut := getattr(self, f"cut_{rule}"))}
        if cuts:
            shown = ", ".join(f"{cut:,} by {rule}" for rule, cut in cuts.items())
            shown = f"{sum(cuts.values()):,} by stop rules: {shown}"
            rows.append(("answers cut", shown))
        if self.truncated:
            often = self.truncated > MOST_TRUNCATED * max(self.completed, 1)
            advice = "; raise max_tokens" * often
            shown = f"{self.truncated:,} at their limit of tokens{advice}"
            rows.append(("answers truncated", shown))
        return rows

    def _rate_rows(self) -> list[tuple[str, str]]:
        rows = [("seconds", f"{self.seconds:,.1f}")]
        if (run := self.this_run) is not None:
            done = f"{run.completed + run.failed:,} requests, {run.output_tokens:,}"
            done += " output tokens; the rest is from earlier runs"
            rows.insert(0, ("this run", done))
        if self.dollars is not None:
            rows.append(("cost", f"${self.dollars:,.4f} of this run"))
        if self.tail is not None and self.tail.engine_s >= 0.05:
            rows.append(("tail", str(self.tail)))
        computed = f"{self.computed_tokens_per_second:,.0f}, cached ones not counted"
        rows += [
            ("output tokens/s", f"{self.output_tokens_per_second:,.0f}"),
            ("prompt tokens/s", computed),
        ]
        titles = ("engines", *[""] * len(self.engines))
        rows += [
            (title, str(x)) for title, x in zip(titles, self.engines, strict=False)
        ]
        return rows


def _rate(tokens: int, seconds: float) -> float:
    """Tokens per second, 0 of a run that took no time."""
    return round(tokens / seconds, 1) if seconds else 0.0


def error_groups(lines: Iterable[bytes]) -> tuple[ErrorGroup, ...]:
    """Error lines by reason, most frequent first.

    Messages that differ only in numbers and quoted names are one reason.
    """
    counts: Counter[str] = Counter()
    firsts: dict[str, tuple[str, str]] = {}
    for line in lines:
        entry = json.loads(line)
        message = " ".join(line_error(entry).split())
        if len(message) > MAX_REASON_CHARS:
            message = message[: MAX_REASON_CHARS - 3] + "..."
        key = without_details(message)
        counts[key] += 1
        firsts.setdefault(key, (message, str(entry.get("custom_id"))))
    return tuple(
        ErrorGroup(firsts[key][0], count, firsts[key][1])
        for key, count in counts.most_common()
    )


def _errors_of(log: ResultLog) -> tuple[ErrorGroup, ...]:
    log.commit()
    with open(log.path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        return error_groups(finished_lines(file, end, ok=False))
