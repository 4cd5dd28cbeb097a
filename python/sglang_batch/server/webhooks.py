"""Webhooks: an event for the end of each batch, by the Standard Webhooks specification.

An event is a row for each endpoint, inserted in the transaction that ends the batch and
deleted once the endpoint has taken it. An attempt is counted, and the next one scheduled,
before it is made, so servers that die meanwhile make no more attempts than others.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address, ip_network

import httpcore
from standardwebhooks import Webhook

from ..batch_api import pinned_calls as calls
from ..batch_api import protocol as api
from ..batch_api.media_places import PORTS, Place, parse_place
from ..config import OfflineBatchConfig
from ..errors import ConfigError
from ..store.batch_store import BatchStore, Row, now
from .access.keys import check_name, digest, lines_of_words
from .background import Repeated, in_thread
from .result_saver import is_write_error

logger = logging.getLogger(__name__)

ENDS = (api.COMPLETED, api.FAILED, api.CANCELLED, api.EXPIRED)
# The name of an endpoint that gets the events of all batches.
ALL = "*"

# How often each endpoint's events are looked at, and how many are sent to it at a time.
EVERY_S = 1.0
AT_A_TIME = 4
TIMEOUT_S = 15.0
# From 20 s and 1 min to 10 h and 28 h after the attempt before, two days in all.
MAX_ATTEMPTS = 10
FIRST_PAUSE_S = 20.0
PAUSE_GROWTH = 2.9
# Of the pauses that receivers ask for by Retry-After.
LONGEST_PAUSE_S = 86_400.0
_FAILURES = (OSError, ValueError, httpcore.NetworkError, httpcore.ProtocolError)


@dataclass(eq=False)
class Endpoint:
    """Where events of a key's ``name``, or :data:`ALL`, go. Its rows have its ``key``."""

    name: str
    key: str
    place: Place = field(repr=False)
    signers: list[Webhook] = field(repr=False)
    backend: calls.PinnedBackend
    is_gone: bool = False


def read_endpoints(config: OfflineBatchConfig) -> list[Endpoint]:
    """The endpoints in the file of webhooks, none without it.

    Raises ConfigError if it cannot be used. The message has a line's number and none of
    its words, which may be secrets.
    """
    if config.webhooks is None:
        return []
    endpoints: dict[str, Endpoint] = {}
    for number, words in lines_of_words("webhooks", config.webhooks):
        where = f"{config.webhooks}:{number}"
        try:
            found = _endpoint(words, config.webhook_networks)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}.") from None
        if endpoints.setdefault(found.key, found) is not found:
            raise ConfigError(f"{where}: this name has this URL on an earlier line.")
    if not endpoints:
        raise ConfigError(f"webhooks: {config.webhooks} has no 'NAME URL SECRET' line.")
    return list(endpoints.values())


def _endpoint(words: Sequence[str], networks: Sequence[str]) -> Endpoint:
    try:
        name, url, *secrets = words
        check_name("all" if name == ALL else name)
        place = parse_place(url)
    except ValueError:
        place, secrets = None, []
    if not secrets or place is None or place.scheme not in PORTS:
        raise ValueError(
            f"expected 'NAME URL SECRET': the name of a key or {ALL}, an https URL without "
            "a user name, and a secret"
        )
    allowed = [ip_network(each) for each in networks]

    def may_connect(address: calls.Address) -> bool:
        if any(calls.inner_address(address) in network for network in allowed):
            return True
        return place.scheme == "https" and calls.is_public(address)

    refused = place.scheme == "http" and not allowed
    with suppress(ValueError):  # a name is looked up by each attempt
        refused = not may_connect(ip_address(place.host))
    if refused:
        raise ValueError(
            "webhooks go by https to public addresses; name the network of others in "
            "webhook_networks"
        )
    refusal = "its host has no public address, and webhook_networks names none of it"
    # A name server that does not answer must keep no other work waiting.
    backend = calls.PinnedBackend(may_connect, refusal, ThreadPoolExecutor(1))
    key = digest(f"{name} {url}".encode()).hex()
    return Endpoint(name, key, place, [_signer(each) for each in secrets], backend)


def _signer(secret: str) -> Webhook:
    with suppress(ValueError):
        key = re.fullmatch(r"whsec_(.*)", secret)
        if key and 24 <= len(base64.b64decode(key[1], validate=True)) <= 64:
            return Webhook(secret)
    raise ValueError(
        "a secret must be 'whsec_' and 24 to 64 bytes as Base64, such as from "
        "`echo whsec_$(openssl rand -base64 32)`"
    )


class Webhooks:
    """Records and sends the events of a store's batches. Without endpoints it does nothing.

    ``may_send`` says whether this process is the one that sends. ``attempts`` counts by
    outcome, delivered or failed. Raises ConfigError as :func:`read_endpoints`.
    """

    def __init__(
        self,
        store: BatchStore,
        config: OfflineBatchConfig,
        may_send: Callable[[], bool],
    ) -> None:
        self.attempts: Counter[str] = Counter()
        self._store = store
        self._may_send = may_send
        self._endpoints = read_endpoints(config)
        # Each has its own, so a slow endpoint delays no other.
        self._sending = [
            Repeated(partial(self._send_due, each), EVERY_S, "Sending webhooks")
            for each in self._endpoints
        ]
        if self._endpoints:
            store.on_status = self._record

    def start(self) -> None:
        for sending in self._sending:
            sending.start()

    async def stop(self) -> None:
        """Stop sending. The next server sends what was not delivered."""
        for sending in self._sending:
            await sending.stop()

    def _record(self, batch_id: str, status: str) -> None:
        row = self._store.get_batch(batch_id)
        if status not in ENDS or row is None:
            return
        event = {
            "id": f"evt_{uuid.uuid4().hex}",
            "type": f"batch.{status}",
            "batch_id": batch_id,
            "created_at": now(),
            "due_at": time.time(),
        }
        for endpoint in self._endpoints:
            if endpoint.name in (ALL, row["owner"]) and not endpoint.is_gone:
                self._store.insert("webhooks", {**event, "endpoint": endpoint.key})

    async def _send_due(self, endpoint: Endpoint) -> None:
        """Make the attempts at an endpoint that are due, a few at a time."""
        try:
            while self._may_send() and (rows := await in_thread(self._begin, endpoint)):
                await asyncio.gather(*(self._attempt(endpoint, row) for row in rows))
        except sqlite3.OperationalError as error:
            # On a full disk nothing is sent: the attempt could not be counted.
            if not is_write_error(error):
                raise

    def _begin(self, endpoint: Endpoint) -> list[Row]:
        """The next events, with this attempt counted and the one after it scheduled."""
        with self._store.atomic() as db:
            rows = self._store.rows(
                "SELECT * FROM webhooks WHERE endpoint = ? AND due_at <= ?"
                " AND attempts < ? ORDER BY due_at LIMIT ?",
                (endpoint.key, time.time(), MAX_ATTEMPTS, AT_A_TIME),
            )
            for row in rows:
                pause_s = FIRST_PAUSE_S * PAUSE_GROWTH ** row["attempts"]
                row["attempts"] += 1
                row["due_at"] = time.time() + pause_s * random.uniform(1, 1.25)
                db.execute(
                    "UPDATE webhooks SET attempts = :attempts, due_at = :due_at"
                    " WHERE endpoint = :endpoint AND id = :id",
                    row,
                )
        return rows

    async def _attempt(self, endpoint: Endpoint, row: Row) -> None:
        status, pause_s = 0, 0.0
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, pause_s = await _post(endpoint, row)
            failure = f"its status is {status}"
        except _FAILURES as error:
            failure = str(error) or type(error).__name__
        delivered = 200 <= status < 300
        self.attempts["delivered" if delivered else "failed"] += 1
        if not delivered:
            logger.warning(  # of the URL, only what can be no secret
                "Webhook %s (%s, %s) was not taken by %s in attempt %d of %d: %s",
                *(row["id"], row["type"], row["batch_id"], endpoint.place.host),
                *(row["attempts"], MAX_ATTEMPTS, failure),
            )
        query, values = "DELETE FROM webhooks WHERE endpoint = ?", (endpoint.key,)
        if status == HTTPStatus.GONE:
            endpoint.is_gone = True
            logger.warning("%s gets no more webhooks.", endpoint.place.host)
            await in_thread(self._store.forget, query, values)
        elif delivered or row["attempts"] >= MAX_ATTEMPTS:
            await in_thread(
                self._store.forget, f"{query} AND id = ?", (*values, row["id"])
            )
        elif pause_s > 0:
            await in_thread(self._wait, row, time.time() + pause_s)

    def _wait(self, row: Row, until: float) -> None:
        """Make no attempt before then."""
        with self._store.atomic() as db:
            db.execute(
                "UPDATE webhooks SET due_at = MAX(due_at, ?)"
                " WHERE endpoint = ? AND id = ?",
                (until, row["endpoint"], row["id"]),
            )


async def _post(endpoint: Endpoint, row: Row) -> tuple[int, float]:
    """Send an event. Returns the status of the answer, and the pause that it asks for."""
    event = {
        "id": row["id"],
        "object": "event",
        "created_at": row["created_at"],
        "type": row["type"],
        "data": {"id": row["batch_id"]},
    }
    body, at = json.dumps(event), datetime.now(UTC)
    headers = {
        "Content-Type": "application/json",
        "webhook-id": row["id"],
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(
            each.sign(row["id"], at, body) for each in endpoint.signers
        ),
    }
    place, backend = endpoint.place, endpoint.backend
    async with calls.pinned_call("POST", place, backend, headers, body.encode()) as got:
        found = {name.lower(): value for name, value in got.headers}
        return got.status, _asked_pause_s(
            found.get(b"retry-after", b"").decode("latin-1")
        )


def _asked_pause_s(text: str) -> float:
    """Seconds until a receiver wants to be asked again, by its ``Retry-After``, seconds or a
    date. 0 if it has none that can be read."""
    try:
        date_or_s = float(text) if text.isdecimal() else parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    if isinstance(date_or_s, datetime):
        date_or_s = date_or_s.timestamp() - time.time()
    return min(max(0.0, date_or_s), LONGEST_PAUSE_S)
