"""A server of batches, asked through OpenAI's own client; errors in plain words."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx
import openai

from .errors import ConfigError, SGLangBatchError
from .remote_view import Batch

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_UPLOAD_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# Makes the client hand out an answer's bytes as they come.
_STREAM = {"X-Stainless-Raw-Response": "stream"}
_PAGE = 100


class ServerError(SGLangBatchError):
    """A server that does not answer, or not as a server of batches does."""


class Server:
    """A server of batches.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: None for one that asks for none.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = _base_url(url)
        # The client insists on a key.
        try:
            self.client = openai.OpenAI(
                api_key=api_key or "none", base_url=f"{self.url}/v1", timeout=_TIMEOUT
            )
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{self.url} is no address of a server: {error}; give one such as "
                "http://127.0.0.1:30000 with --url."
            ) from None

    def close(self) -> None:
        self.client.close()

    def get(self, batch_id: str) -> Batch:
        """The batch as it is now."""
        with _in_plain_words(self.url):
            return self._batch(self.client.batches.retrieve(batch_id))

    def start(self, path: Path, endpoint: str, **fields: Any) -> Batch:
        """Upload a file and start a batch over it."""
        name = path.name if path.name.endswith(".jsonl") else f"{path.name}.jsonl"
        with _in_plain_words(self.url), open(path, "rb") as source:
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
        with _in_plain_words(self.url):
            page = self.client.batches.list(limit=min(limit, _PAGE))
            for batch, _ in zip(page, range(limit), strict=False):
                yield self._batch(batch)

    def cancel(self, batch_id: str) -> Batch:
        with _in_plain_words(self.url):
            return self._batch(self.client.batches.cancel(batch_id))

    def download(self, path: str, target: BinaryIO) -> httpx.Headers:
        """Write what a path of the API answers; returns the answer's headers."""
        with _in_plain_words(self.url):
            answer = self.client.get(
                path, cast_to=cast(Any, httpx.Response), options={"headers": _STREAM}
            )
            with contextlib.closing(answer):
                for data in answer.iter_bytes():
                    target.write(data)
                return cast(httpx.Headers, answer.headers)

    def _batch(self, answer: Any) -> Batch:
        if not isinstance(answer, openai.types.Batch) or not answer.id:
            raise ServerError(f"{self.url} answers, but not as a server of batches.")
        return answer.to_dict(mode="json")


def _base_url(url: str) -> str:
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


@contextmanager
def _in_plain_words(url: str) -> Iterator[None]:
    """Turn the client's exceptions into ours, each with one sentence."""
    try:
        yield
    except (openai.AuthenticationError, openai.PermissionDeniedError):
        raise ConfigError(
            f"{url} does not take this key: give the right one with --api-key or "
            "$SGLANG_BATCH_API_KEY."
        ) from None
    except openai.APIStatusError as error:
        raise _refused(url, error) from None
    except (openai.APIConnectionError, httpx.HTTPError) as error:
        cause = error.__cause__ or error
        raise ServerError(f"{url} does not answer ({_brief(cause)}).") from None


def _refused(url: str, error: openai.APIStatusError) -> SGLangBatchError:
    body = error.body if isinstance(error.body, dict) else {}
    message = body.get("message")
    # Ours are OpenAI's errors, which have this key; others' answers have not.
    if "param" not in body or body.get("object") == "error":
        if error.status_code in (404, 405):
            return ConfigError(
                f"{url} has no batches: was the server started with --offline-batch?"
            )
        message = message or f"HTTP {error.status_code}"
    if error.status_code == 429 or error.status_code >= 500:
        return ServerError(f"{url}: {message}")
    return ConfigError(f"{url}: {message}")


def _brief(cause: BaseException) -> str:
    return str(cause) or type(cause).__name__
