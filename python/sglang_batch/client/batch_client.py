"""A client of the batch API, based on OpenAI's client, with errors of one sentence."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx
import openai
from openai._models import FinalRequestOptions

from ..errors import ConfigError, ServerError, SGLangBatchError
from .batch_view import Batch

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

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = _base_url(url)
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
        """The current state of a batch."""
        with _plain_errors(self.url):
            return self._batch(self.client.batches.retrieve(batch_id))

    def start(self, path: Path, name: str, endpoint: str, **fields: Any) -> Batch:
        """Upload a file and start a batch over it.

        Args:
            name: of the file at the server.
            fields: further parameters of ``POST /v1/batches``.

        Raises:
            OSError: the file cannot be read.
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
        """Cancel a batch and return its new state."""
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


def _base_url(url: str) -> str:
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


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
        raise ServerError(f"{url} does not answer ({_brief(cause)}).") from None


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


def _brief(cause: BaseException) -> str:
    return str(cause) or type(cause).__name__
