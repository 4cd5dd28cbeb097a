"""A client of a server's batches, and batches as text."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx
import openai
from openai._models import FinalRequestOptions

from ...batch_api import protocol as api
from ...batch_api.objects import computed_usage
from ...errors import ConfigError, ExitStatus, ServerError, SGLangBatchError
from ...request import authorization
from ...server.progress import cached_percent, duration
from ..progress import Display, aligned

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_UPLOAD_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# Makes OpenAI's client stream the answer's bytes.
_STREAM = {"X-Stainless-Raw-Response": "stream"}
_PAGE = 100


class BatchClient:
    """The batches of a server.

    Every method raises :class:`ConfigError` if the server refuses the call, and
    :class:`ServerError` if it does not answer or fails.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: None for a server without keys.

    Raises ConfigError if the URL or the key is not valid.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = url if "://" in url else f"http://{url}"
        authorization(api_key)  # raises for a key that cannot be sent
        # OpenAI's client requires a key.
        try:
            self.client = openai.OpenAI(
                api_key=api_key or "none", base_url=f"{self.url}/v1", timeout=_TIMEOUT
            )
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{self.url} is not the URL of a server: {error}. Use one such as "
                "http://127.0.0.1:30000 for --url."
            ) from None

    def close(self) -> None:
        self.client.close()

    def get(self, batch_id: str) -> Batch:
        with _plain_errors(self.url):
            return self._batch(self.client.batches.retrieve(batch_id))

    def start(self, path: Path, name: str, endpoint: str, **fields: Any) -> Batch:
        """Upload a file and start a batch over it.

        Args:
            name: of the file at the server.
            fields: further parameters of ``POST /v1/batches``.

        Raises OSError if the file cannot be read.
        """
        with _plain_errors(self.url), open(path, "rb") as source:
            file = self.client.files.create(
                file=(name, source), purpose="batch", timeout=_UPLOAD_TIMEOUT
            )
            # A repeated call must not start a second batch.
            once = {"Idempotency-Key": uuid.uuid4().hex}
            batch = self.client.batches.create(
                input_file_id=file.id,
                endpoint=cast(Any, endpoint),
                extra_headers=once,
                **fields,
            )
            return self._batch(batch)

    def newest(self, limit: int) -> Iterator[Batch]:
        """Up to ``limit`` batches, newest first."""
        with _plain_errors(self.url):
            page = self.client.batches.list(limit=min(limit, _PAGE))
            for batch, _ in zip(page, range(limit), strict=False):
                yield self._batch(batch)

    def cancel(self, batch_id: str) -> Batch:
        with _plain_errors(self.url):
            return self._batch(self.client.batches.cancel(batch_id))

    def download(self, path: str, target: BinaryIO) -> httpx.Headers:
        """Write the answer of a GET to ``target``; returns the answer's headers."""
        with _plain_errors(self.url):
            answer = self.client.get(
                path, cast_to=cast(Any, httpx.Response), options={"headers": _STREAM}
            )
            with contextlib.closing(answer):
                for data in answer.iter_bytes():
                    target.write(data)
                return cast(httpx.Headers, answer.headers)

    def call(self, method: str, path: str, body: object = None, **query: Any) -> Any:
        """The JSON answer of a route that OpenAI's client does not know.

        Args:
            path: from the root of the server.
        """
        with _plain_errors(self.url):
            return self.client.request(
                cast(Any, object),
                FinalRequestOptions.construct(
                    method=method, url=f"{self.url}{path}", json_data=body, params=query
                ),
            )

    def _batch(self, answer: Any) -> Batch:
        if not isinstance(answer, openai.types.Batch) or not answer.id:
            raise ServerError(
                f"{self.url} answers, but not with a batch: is it the URL of an sglang-batch server?"
            )
        return answer.to_dict(mode="json")


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command prints: ``objects`` as JSON, one per line, or ``text``."""

    objects: Sequence[Any]
    text: str
    status: int = ExitStatus.OK


@contextmanager
def _plain_errors(url: str) -> Iterator[None]:
    """Turn the exceptions of OpenAI's client into ours, with a message of one line."""
    try:
        yield
    except openai.AuthenticationError:
        raise ConfigError(
            f"{url} does not accept this API key. Set the right one with --api-key or "
            "$SGLANG_BATCH_API_KEY."
        ) from None
    except openai.APIStatusError as error:
        raise _refused(url, error) from None
    except (openai.APIConnectionError, httpx.HTTPError) as error:
        cause = error.__cause__ or error
        brief = str(cause) or type(cause).__name__
        raise ServerError(f"{url} does not answer ({brief}).") from None


def _refused(url: str, error: openai.APIStatusError) -> SGLangBatchError:
    body = error.body if isinstance(error.body, dict) else {}
    message = body.get("message")
    # Our errors have this key, as OpenAI's do. Other servers' errors lack it.
    if "param" not in body or body.get("object") == "error":
        if error.status_code in (404, 405):
            return ConfigError(
                f"{url} does not serve batches: was it started with --offline-batch?"
            )
        message = message or f"HTTP {error.status_code}"
    if error.status_code == 429 or error.status_code >= 500:
        return ServerError(f"{url}: {message}")
    return ConfigError(f"{url}: {message}")


# A batch object of the API.
Batch = dict[str, Any]

MAX_ERRORS = 5


def batch_table(batch: Batch) -> str:
    """All fields of a batch, one per line."""
    metadata = batch.get("metadata") or {}
    errors = zip(("errors", *[""] * MAX_ERRORS), first_errors(batch), strict=False)
    rows = [
        ("batch", batch["id"]),
        ("status", status_text(batch)),
        ("endpoint", batch["endpoint"]),
        ("model", batch.get("model")),
        ("priority", batch.get("priority")),
        ("metadata", ", ".join(f"{k}={v}" for k, v in metadata.items())),
        ("requests", _requests(batch)),
        *_tokens(batch),
        *_times(batch),
        ("output file", batch.get("output_file_id")),
        ("error file", batch.get("error_file_id")),
        *errors,
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in rows if value)


def batches_table(batches: Sequence[Batch]) -> str:
    """Batches, one per line, with a header line."""
    rows = [("id", "status", "requests", "failed", "created", "endpoint", "model")]
    for batch in batches:
        counts = _counts(batch)
        rows.append(
            (
                batch["id"],
                batch["status"],
                f"{_num_done(batch)}/{counts['total']}",
                str(counts["failed"]),
                short_time(batch["created_at"]),
                batch["endpoint"],
                batch.get("model") or "-",
            )
        )
    return aligned(rows)


def first_errors(batch: Batch) -> list[str]:
    """The first ``MAX_ERRORS`` errors of a failed batch, of those that differ in more than the
    line, and the number of the others."""
    errors = batch.get("errors") or {}
    data = errors.get("data") or []
    total = errors.get("total") or len(data)
    first: dict[str, str] = {}
    for error in data:
        where = f"line {error['line']}: " if error.get("line") else ""
        first.setdefault(error["message"], f"{where}{error['message']}")
    lines = list(first.values())[:MAX_ERRORS]
    if total > len(lines):
        lines.append(f"and {total - len(lines):,} more")
    return lines


def status_text(batch: Batch) -> str:
    """The status of a batch, with the reason if it is paused."""
    paused = batch.get("paused_reason")
    return f"{batch['status']} (paused: {paused})" if paused else str(batch["status"])


class BatchProgress:
    """The status of a batch that is followed. A change of it is a line of the display."""

    def __init__(self, display: Display, batch: Batch) -> None:
        self._display, self._batch = display, batch
        self._began, self._num_before = time.monotonic(), _num_done(batch)
        display.say(str(self))

    def update(self, batch: Batch) -> None:
        """The batch as it is now."""
        before, self._batch = self._batch, batch
        if status_text(batch) != status_text(before):
            self._display.say(str(self))

    def __str__(self) -> str:
        title = f"{self._batch['id']}: {status_text(self._batch)}"
        if not (total := _counts(self._batch)["total"]):
            return title
        return self._display.meter(
            title,
            _num_done(self._batch),
            total,
            self._began,
            initial=self._num_before,
            postfix=_postfix(self._batch),
        )


def _postfix(batch: Batch) -> str:
    parts = []
    if _counts(batch)["failed"]:
        parts.append(f"failed {_counts(batch)['failed']:,}")
    cached = cached_percent(_usage_row(batch))
    if cached is not None:
        parts.append(f"cached {cached}")
    return ", ".join(parts)


def _counts(batch: Batch) -> dict[str, int]:
    return batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}


def _num_done(batch: Batch) -> int:
    return _counts(batch)["completed"] + _counts(batch)["failed"]


def _usage_row(batch: Batch) -> dict[str, int]:
    usage = batch.get("usage") or {}
    details = usage.get("input_tokens_details") or {}
    return {
        "input_tokens": usage.get("input_tokens") or 0,
        "cached_tokens": details.get("cached_tokens") or 0,
        "output_tokens": usage.get("output_tokens") or 0,
        "merged_input_tokens": details.get("merged_tokens") or 0,
        "merged_cached_tokens": details.get("merged_cached_tokens") or 0,
    }


def _requests(batch: Batch) -> str:
    counts, done = _counts(batch), _num_done(batch)
    if not counts["total"]:
        return ""
    text = f"{done:,} of {counts['total']:,} done ({done / counts['total']:.0%})"
    return f"{text}, {counts['failed']:,} failed" if counts["failed"] else text


def _tokens(batch: Batch) -> list[tuple[str, str]]:
    usage = batch.get("usage") or {}
    if not usage.get("total_tokens"):
        return []
    row = _usage_row(batch)
    possible = usage["input_tokens_details"].get("optimal_cached_share")
    computed = computed_usage(row)
    cached = f"{computed.cached_tokens:,} = {computed.cache_hit_rate:.1%}"
    if possible is not None:
        cached += f" (possible: {possible:.1%})"
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    truncated = usage.get("truncated_answers", 0)
    merged, seconds = usage.get("merged_requests"), usage.get("engine_seconds")
    cost = "" if usage.get("dollars") is None else f" = ${usage['dollars']:,.4f}"
    rows = [
        ("prompt tokens", f"{row['input_tokens']:,}"),
        ("cached tokens", cached),
        ("output tokens", f"{usage['output_tokens']:,}"),
    ]
    if reasoning:
        rows.append(("of reasoning", f"{reasoning:,}"))
    if truncated:
        rows.append(("truncated answers", f"{truncated:,}"))
    if merged:
        saved = f"{usage['merged_tokens']:,} tokens not computed"
        rows.append(("merged requests", f"{merged:,}, {saved}"))
    if seconds is not None:
        rows.append(("engine seconds", f"{seconds:,.1f}{cost}"))
    return rows


def _times(batch: Batch) -> list[tuple[str, str]]:
    rows = [("created", short_time(batch["created_at"]))]
    ended_at = (
        batch.get(f"{batch['status']}_at")
        if batch["status"] in api.ENDED_STATUSES
        else None
    )
    if ended_at:
        took = duration(ended_at - batch["created_at"])
        return [*rows, ("ended", f"{short_time(ended_at)}, after {took}")]
    if batch.get("in_progress_at"):
        rows.append(("started", short_time(batch["in_progress_at"])))
    left_s = _eta_s(batch)
    rows.append(("time left", "" if left_s is None else f"about {duration(left_s)}"))
    if batch.get("expires_at"):
        rows.append(("expires", short_time(batch["expires_at"])))
    return rows


def _eta_s(batch: Batch) -> float | None:
    """Seconds until the batch is done at its average rate so far, or None if unknown."""
    done, total = _num_done(batch), _counts(batch)["total"]
    if batch["status"] != api.IN_PROGRESS or batch.get("paused_reason") or not done:
        return None
    began = batch.get("in_progress_at") or batch["created_at"]
    seconds: float = time.time() - began
    return max(0.0, seconds) * (total - done) / done


def short_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
