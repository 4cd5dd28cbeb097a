"""A fleet of offline servers at URLs, for clusters without Ray such as Kubernetes."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvloop

from ...errors import ConfigError
from ..head_state import HeadState
from .http_place import CONNECT_S, HttpPlace

if TYPE_CHECKING:
    from ..fleet_engine import FleetEngine

# Most bytes of a list of models.
_MOST_MODELS = 1 << 20


def served_model(urls: Sequence[str], api_key: str | None) -> str:
    """The name of the model that all of these servers serve.

    Raises:
        ConfigError: one does not answer, refuses the key, or serves another model.
    """
    names = [_model_at(url.rstrip("/"), api_key) for url in urls]
    for url, name in zip(urls, names, strict=True):
        if name != names[0]:
            raise ConfigError(
                f"{urls[0]} serves {names[0]} and {url} serves {name}; all workers of a "
                "job need the same model."
            )
    return names[0]


def _model_at(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=CONNECT_S) as answer:
            data = answer.read(_MOST_MODELS + 1)
            if len(data) > _MOST_MODELS:
                raise ValueError(f"more than {_MOST_MODELS} bytes of models")
            return str(json.loads(data)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "; pass its admin's key with --workers-key" if error.code == 401 else ""
        raise ConfigError(
            f"{url} refuses to name its model (status {error.code}){hint}."
        ) from None
    except (
        *(OSError, ValueError, LookupError, TypeError, RecursionError),
        http.client.HTTPException,
    ) as error:
        raise ConfigError(
            f"{url} does not answer as a server of SGLang ({error}); start it with "
            "`sglang-batch serve`, and give its URL such as http://10.0.0.2:30000."
        ) from None


@contextmanager
def http_engine(
    urls: Sequence[str], api_key: str | None, head: HeadState
) -> Iterator[tuple[FleetEngine, asyncio.AbstractEventLoop]]:
    """The engines of the servers at these URLs, and the event loop for calls to them."""
    from ..fleet_engine import FleetEngine  # takes half a second to import

    loop = uvloop.new_event_loop()
    places = [HttpPlace(url, api_key) for url in urls]
    engine = FleetEngine(places, head.epoch, crashes=head.crashes)
    try:
        yield engine, loop
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
