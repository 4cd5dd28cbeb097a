"""Webhooks of a server: what receivers get, how often, and which addresses are called."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import ssl
import subprocess
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from batch_service import batch_row, running_service, submit, until_over
from builders import ids_of, make_lines, run
from fake_engine import FakeEngine
from named_hosts import named
from openai.types import webhooks as types
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter
from standardwebhooks import Webhook, WebhookVerificationError
from webhook_receiver import (
    OTHER_SECRET,
    SECRET,
    Receiver,
    ended,
    hooked,
    hooks_file,
    pending,
    receiving,
    until,
)

from sglang_batch.batch_api import pinned_calls
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.server import webhooks
from sglang_batch.server.metrics import BatchMetrics
from sglang_batch.server.webhooks import read_endpoints
from sglang_batch.store.backup import restore_backup, write_backup
from sglang_batch.store.batch_store import BatchStore

pytestmark = pytest.mark.usefixtures("quick_polling")

TYPES: dict[str, Any] = {
    "batch.completed": types.BatchCompletedWebhookEvent,
    "batch.failed": types.BatchFailedWebhookEvent,
    "batch.cancelled": types.BatchCancelledWebhookEvent,
    "batch.expired": types.BatchExpiredWebhookEvent,
}


@pytest.fixture(autouse=True)
def quick_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "EVERY_S", 0.005)
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(webhooks, "PAUSE_GROWTH", 1)


# What is sent ---------------------------------------------------------------------


@pytest.mark.parametrize("batch_api", ["openai", "anthropic"])
@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "expired"])
def test_each_end_has_its_event(tmp_path: Path, status: str, batch_api: str) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        if status in ("cancelled", "expired"):
            engine.hold(ids_of(range(2)))
        async with (
            receiving() as receiver,
            hooked(tmp_path, f"* {receiver.url()} {SECRET}", engine=engine) as service,
        ):
            lines = ["not JSON"] if status == "failed" else make_lines(2)
            began = int(time.time())
            batch_id = submit(service, lines, api=batch_api)
            if engine_holds := status in ("cancelled", "expired"):
                await engine.until(lambda: bool(engine.running))
                assert not pending(service)
            if status == "cancelled":
                service.cancel_batch(batch_id)
            elif engine_holds:
                service.store.update_batch(batch_id, expires_at=1)
            assert (await until_over(service, batch_id))["status"] == status
            await until(lambda: not pending(service))
            [event] = receiver.events()
            [(headers, body)] = receiver.calls
            assert isinstance(event, TYPES[f"batch.{status}"])
            # The model of the client, with nothing that it does not know.
            TypeAdapter(type(event)).validate_json(body)
            assert event.model_extra == event.data.model_extra == {}
            assert json.loads(body) == {
                "id": event.id,
                "object": "event",
                "created_at": event.created_at,
                "type": f"batch.{status}",
                "data": {"id": batch_id},
            }
            assert event.id.startswith("evt_")
            assert began <= event.created_at <= time.time()
            assert headers["Content-Type"] == "application/json"
            assert headers["Host"] == f"127.0.0.1:{receiver.port}"

    run(scenario())


def test_a_secret_can_be_exchanged_and_a_wrong_one_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            receiving() as receiver,
            hooked(tmp_path, f"* {receiver.url()} {OTHER_SECRET} {SECRET}") as service,
        ):
            await ended(service)
            await until(lambda: receiver.calls)
            receiver.events()
            [(headers, body)] = receiver.calls
            Webhook(OTHER_SECRET).verify(body, headers)
            with pytest.raises(WebhookVerificationError):
                Webhook(SECRET).verify(body + b" ", headers)
            with pytest.raises(WebhookVerificationError):
                Webhook("whsec_" + "A" * 32).verify(body, headers)

    run(scenario())


def test_names_get_the_events_of_their_own_batches(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with receiving() as every, receiving() as ann, receiving() as bob:
            lines = [
                f"* {every.url()} {SECRET}",
                f"ann {ann.url()} {SECRET}",
                f"ann {bob.url(path='/from-ann')} {SECRET}",
                f"bob {bob.url()} {SECRET}",
            ]
            async with hooked(tmp_path, *lines) as service:
                nobodys = await ended(service)
                of_ann = await ended(service, owner="ann")
                of_bob = await ended(service, owner="bob")
                await until(lambda: not pending(service))

        def ids(receiver: Receiver) -> list[str]:
            return [event.data.id for event in receiver.events()]

        assert sorted(ids(every)) == sorted([nobodys, of_ann, of_bob])
        assert ids(ann) == [of_ann]
        assert sorted(ids(bob)) == sorted([of_ann, of_bob])
        assert set(bob.paths) == {"/hook", "/from-ann"}
        # One id for one event, wherever it is sent.
        assert set(every.ids) >= {*ann.ids, *bob.ids}

    run(scenario())


def test_without_the_setting_nothing_is_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            await ended(service)
            assert service.store.on_status is None
            assert not pending(service)
            tasks = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
            async with receiving() as receiver:
                line = f"* {receiver.url()} {SECRET}"
                async with hooked(tmp_path / "other", line) as other:
                    await ended(other)
                    assert other.store.on_status is not None
            assert "Repeated._repeat" in tasks  # what is counted below
            assert service.runner is not None
            assert service.runner.webhooks._sending == []

    run(scenario())


# How often ------------------------------------------------------------------------


def test_a_receiver_that_fails_gets_the_same_event_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        registry = CollectorRegistry()
        async with (
            receiving(500, 302, 429) as receiver,
            hooked(
                tmp_path, f"* {receiver.url(path='/hook?token=t0p')} {SECRET}"
            ) as service,
        ):
            metrics = BatchMetrics(service, registry=registry)
            await metrics.sample()
            await ended(service)
            await until(lambda: not pending(service))
            assert len(receiver.calls) == 4
            assert len(set(receiver.ids)) == 1
            assert len({event.id for event in receiver.events()}) == 1
            # A redirect is not followed.
            assert set(receiver.paths) == {"/hook"}
            await metrics.sample()
            metrics.close()

        def sample(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"sglang_batch_{name}", labels)

        assert sample("webhook_attempts_total", outcome="failed") == 3
        assert sample("webhook_attempts_total", outcome="delivered") == 1
        assert sample("webhooks_pending") == 0

    with caplog.at_level(logging.DEBUG):
        run(scenario())
    for status in (500, 302, 429):
        assert f"its status is {status}" in caplog.text
    assert "in attempt 3 of 10" in caplog.text
    # The path of a URL may be a secret, too.
    for secret in ("t0p", SECRET, SECRET.removeprefix("whsec_")):
        ours = [r.getMessage() for r in caplog.records if r.name != "aiohttp.access"]
        assert not any(secret in line for line in ours)


def test_attempts_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with (
            receiving(*[503] * 50) as receiver,
            hooked(tmp_path, f"* {receiver.url()} {SECRET}") as service,
        ):
            await ended(service)
            await until(lambda: not pending(service))
            await asyncio.sleep(0.1)
            assert len(receiver.calls) == webhooks.MAX_ATTEMPTS == 10
            assert len(set(receiver.ids)) == 1

    run(scenario())
    assert "attempt 10 of 10" in caplog.text


def test_pauses_grow_and_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> list[list[float]]:
        async with (
            receiving(*[503] * 100) as receiver,
            hooked(tmp_path, f"* {receiver.url()} {SECRET}") as service,
        ):
            for _ in range(4):
                await ended(service)
            pauses: list[list[float]] = [[] for _ in range(4)]
            for attempt in range(1, 10):
                await until(lambda num=4 * attempt: len(receiver.calls) == num)
                for place, row in enumerate(pending(service)):
                    pauses[place].append(row["due_at"] - time.time())
                service.store.rows("UPDATE webhooks SET due_at = 0 RETURNING id")
            return pauses

    monkeypatch.undo()  # the real pauses
    monkeypatch.setattr(webhooks, "EVERY_S", 0.005)
    found = run(scenario())
    for place, expected in enumerate([20 * 2.9**n for n in range(9)]):
        seconds = [each[place] for each in found]
        # By the time at which they are seen.
        assert all(0.9 * expected < each <= 1.25 * expected for each in seconds)
        assert max(seconds) - min(seconds) > 0.002 * expected
    assert all(1.7 < sum(pauses) / 86_400 < 2.3 for pauses in found)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        (3600, 3600),
        ("9" * 400, webhooks.LONGEST_PAUSE_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", webhooks.LONGEST_PAUSE_S),
        # What is past, or cannot be read, leaves the pause as it is.
        (-3600, 20),
        *((text, 20) for text in ("0", "-5", "soon", "1e3", "nan", "²")),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", 20),
        ("Mon, 01 Jan 2030 00:00:00 +9999999999999999", 20),
    ],
    ids=range(13),
)
def test_a_receiver_can_ask_for_a_longer_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str | int, seconds: float
) -> None:
    """By ``Retry-After``: seconds, or a date, here from now on."""
    monkeypatch.undo()  # the real pauses
    monkeypatch.setattr(webhooks, "EVERY_S", 0.005)
    if isinstance(header, int):
        header = formatdate(time.time() + header, usegmt=True)

    async def scenario() -> None:
        async with (
            receiving(503) as receiver,
            hooked(tmp_path, f"* {receiver.url()} {SECRET}") as service,
        ):
            receiver.headers["Retry-After"] = header
            await ended(service)
            await until(lambda: receiver.calls)

            def is_as_asked() -> bool:
                [row] = pending(service)
                pause_s = row["due_at"] - time.time()
                return bool(0.9 * seconds < pause_s <= 1.25 * seconds)

            await until(is_as_asked)
            await asyncio.sleep(0.02)
            assert is_as_asked()
            service.store.rows("UPDATE webhooks SET due_at = 0 RETURNING id")
            await until(lambda: not pending(service))
            assert len(set(receiver.ids)) == 1

    run(scenario())


def test_what_was_taken_is_not_sent_again_for_an_odd_pause(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            receiving() as receiver,
            hooked(tmp_path, f"* {receiver.url()} {SECRET}") as service,
        ):
            receiver.headers["Retry-After"] = "Mon, 01 Jan 99999999999 00:00:00 GMT"
            await ended(service)
            await until(lambda: not pending(service) and receiver.calls)
            assert len(receiver.calls) == 1

    run(scenario())


def test_gone_ends_all_events_of_an_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            receiving(410) as gone,
            receiving() as other,
            hooked(
                tmp_path, f"* {gone.url()} {SECRET}", f"* {other.url()} {SECRET}"
            ) as service,
        ):
            await ended(service)
            await until(lambda: not pending(service))
            await ended(service)
            await until(lambda: len(other.calls) == 2 and not pending(service))
            assert len(gone.calls) == 1

    run(scenario())
    assert "gets no more webhooks" in caplog.text


def test_a_slow_receiver_delays_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with receiving() as slow, receiving() as quick:
            slow.hold = first = asyncio.Event()
            lines = [f"* {slow.url()} {SECRET}", f"* {quick.url()} {SECRET}"]
            async with hooked(tmp_path, *lines) as service:
                for _ in range(10):
                    await ended(service)
                await until(lambda: len(quick.calls) == 10)
                num = len(slow.calls)
                assert 1 <= num <= webhooks.AT_A_TIME
                # They are sent a few at a time, also when it answers.
                slow.hold = second = asyncio.Event()
                first.set()
                await until(lambda: len(slow.calls) == num + webhooks.AT_A_TIME)
                await asyncio.sleep(0.05)
                assert len(slow.calls) == num + webhooks.AT_A_TIME
                assert slow.most_open == webhooks.AT_A_TIME
                slow.hold = None
                second.set()
                await until(lambda: not pending(service))
                assert len(slow.calls) == len(set(slow.ids)) == 10

    run(scenario())


def test_an_attempt_that_takes_too_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            receiver.hold = asyncio.Event()
            line = f"* {receiver.url()} {SECRET}"
            async with hooked(tmp_path, line) as service:
                await ended(service)
                await until(lambda: len(receiver.calls) == 2)
                receiver.hold = None
                await until(lambda: not pending(service))
            assert len(set(receiver.ids)) == 1

    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.2)
    run(scenario())
    assert "attempt 1 of 10: TimeoutError" in caplog.text


# Restarts -------------------------------------------------------------------------


def test_an_event_survives_a_restart_in_the_middle_of_an_attempt(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            line = f"* {receiver.url()} {SECRET}"
            receiver.hold = asyncio.Event()
            async with hooked(tmp_path, line) as service:
                batch_id = await ended(service)
                await until(lambda: receiver.calls)
            # Nobody has answered. A batch that was deleted is no reason to send nothing.
            store = BatchStore(tmp_path)
            assert store.delete_batch(batch_id, ("completed",))
            store.close()
            receiver.hold = None
            async with hooked(tmp_path, line) as service:
                await until(lambda: not pending(service))
            assert len(receiver.calls) == 2
            assert len(set(receiver.ids)) == 1
            assert [event.data.id for event in receiver.events()] == 2 * [batch_id]

    run(scenario())


def test_servers_that_die_make_no_more_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            line = f"* {receiver.url()} {SECRET}"
            receiver.hold = asyncio.Event()
            for number in range(6):
                async with hooked(tmp_path, line) as service:
                    if not number:
                        await ended(service)
                    num = min(number + 1, 3)
                    await until(lambda: len(receiver.calls) >= num)  # noqa: B023
                    await asyncio.sleep(0.05)
            assert len(receiver.calls) == 3

    monkeypatch.setattr(webhooks, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 15)
    run(scenario())


def test_a_server_without_the_endpoint_keeps_its_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with receiving(500) as receiver, receiving() as other:
            line = f"* {receiver.url()} {SECRET}"
            receiver.hold = asyncio.Event()
            async with hooked(tmp_path, line) as service:
                await ended(service)
                await until(lambda: receiver.calls)
            receiver.hold = None
            async with hooked(tmp_path, f"* {other.url()} {SECRET}") as service:
                await ended(service)
                await until(lambda: len(pending(service)) == 1)
            async with running_service(tmp_path) as service:
                await ended(service)
                assert len(pending(service)) == 1
            async with hooked(tmp_path, line) as service:
                await until(lambda: not pending(service))
            assert len(set(receiver.ids)) == 1
            assert not {*other.ids} & {*receiver.ids}

    run(scenario())


def test_a_backup_has_pending_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            line = f"* {receiver.url()} {SECRET}"
            receiver.hold = asyncio.Event()
            file = io.BytesIO()
            async with hooked(tmp_path / "old", line) as service:
                batch_id = await ended(service)
                await until(lambda: receiver.calls)
                await asyncio.to_thread(write_backup, tmp_path / "old", file)
            receiver.hold = None
            data = file.getvalue()
            for secret in (SECRET.removeprefix("whsec_"), receiver.url()):
                assert secret.encode() not in data
            restore_backup(tmp_path / "new", io.BytesIO(data))
            async with hooked(tmp_path / "new", line) as service:
                await until(lambda: not pending(service))
                assert batch_row(service, batch_id)["status"] == "completed"
            assert receiver.events()[-1].data.id == batch_id
            assert len(set(receiver.ids)) == 1

    run(scenario())


# Which addresses ------------------------------------------------------------------

PRIVATE = ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"]
REFUSED = "its host has no public address"


@pytest.mark.parametrize("address", [*PRIVATE, "64:ff9b::7f00:1", "fe80::1", "0.0.0.0"])
@pytest.mark.parametrize("scheme", ["https", "http"])
def test_private_addresses_in_urls_are_refused_at_the_start(
    tmp_path: Path, address: str, scheme: str
) -> None:
    host = f"[{address}]" if ":" in address else address
    path = hooks_file(tmp_path, f"* {scheme}://{host}/h0ok {SECRET}")
    with pytest.raises(ConfigError, match="webhook_networks") as error:
        read_endpoints(OfflineBatchConfig(webhooks=path))
    assert "h0ok" not in str(error.value)
    networks = ("0.0.0.0/0", "::/0")
    config = OfflineBatchConfig(webhooks=path, webhook_networks=networks)
    assert len(read_endpoints(config)) == 1


@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.parametrize("scheme", ["https", "http"])
def test_names_of_private_addresses_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
    scheme: str,
) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            url = receiver.url("hooks.example.com").replace("http:", f"{scheme}:")
            # http needs one network.
            async with hooked(
                tmp_path, f"* {url} {SECRET}", networks=("192.168.7.0/24",)
            ) as service:
                await ended(service)
                await until(lambda: not pending(service))
            assert not receiver.calls
            assert len(asked) == webhooks.MAX_ATTEMPTS

    asked = named(monkeypatch, hooks=[address] * 10)
    run(scenario())
    assert caplog.text.count(REFUSED) == 10


def test_a_name_is_checked_at_each_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            receiving(500) as receiver,
            hooked(
                tmp_path,
                f"* {receiver.url('hooks.example.com')} {SECRET}",
                networks=("127.0.0.1/32",),
            ) as service,
        ):
            await ended(service)
            await until(lambda: not pending(service))
            # Each look-up is of one connection: what was checked is what is called.
            assert len(receiver.calls) == 2
            assert len(asked) == 3

    asked = named(monkeypatch, hooks=["127.0.0.1", "127.0.0.2", "::ffff:127.0.0.1"])
    run(scenario())
    assert caplog.text.count(REFUSED) == 1


def test_http_is_for_listed_networks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with hooked(tmp_path, f"* http://hooks.example.com/ {SECRET}") as service:
            await ended(service)
            await until(lambda: not pending(service))

    named(monkeypatch, hooks=["93.184.216.34"] * 10)
    run(scenario())
    assert caplog.text.count(REFUSED) == 10


def test_https_with_a_certificate_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-days", "2", "-keyout", key, "-out", cert),
            *("-subj", "/CN=hooks.example.com"),
            *("-addext", "subjectAltName=DNS:hooks.example.com"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)

    async def scenario(host: str) -> int:
        async with receiving(tls=tls) as receiver:
            url = receiver.url(host).replace("http:", "https:")
            async with hooked(tmp_path / host, f"* {url} {SECRET}") as service:
                await ended(service)
                await until(lambda: not pending(service))
            return len(receiver.events())

    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    pinned_calls._certificates.cache_clear()
    try:
        named(monkeypatch, hooks=["127.0.0.1"] * 20, other=["127.0.0.1"] * 20)
        assert run(scenario("hooks.example.com")) == 1
        assert run(scenario("other.example.com")) == 0
    finally:
        pinned_calls._certificates.cache_clear()
    assert caplog.text.count("certificate verify failed: Hostname mismatch") == 10


# The file -------------------------------------------------------------------------

URL = "https://hooks.example.com/t0p"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no 'NAME URL SECRET' line"),
        ([f"* {URL}"], "expected 'NAME URL SECRET': the name of a key or *"),
        ([f"a/b {URL} {SECRET}"], "expected 'NAME URL SECRET': the name of a key or *"),
        ([f"{SECRET} {URL} *"], "expected 'NAME URL SECRET': the name of a key or *"),
        ([f"* {SECRET} {URL}"], "expected 'NAME URL SECRET': the name of a key or *"),
        (
            [f"* ftp://hooks.example.com/t0p {SECRET}"],
            "expected 'NAME URL SECRET': the name of a key or *",
        ),
        (
            [f"* /etc/t0p {SECRET}"],
            "expected 'NAME URL SECRET': the name of a key or *",
        ),
        (
            [f"* https://user:t0p@hooks.example.com/ {SECRET}"],
            "expected 'NAME URL SECRET': the name of a key or *",
        ),
        ([f"* http://hooks.example.com/t0p {SECRET}"], "webhooks go by https"),
        ([f"* {URL} t0psecret"], "a secret must be 'whsec_' and 24 to 64 bytes"),
        ([f"* {URL} {SECRET} whsec_t0p="], "a secret must be 'whsec_'"),
        ([f"* {URL} whsec_{'A' * 28}"], "24 to 64 bytes"),
        ([f"* {URL} whsec_{'A' * 92}"], "24 to 64 bytes"),
        (
            [f"* {URL} {SECRET}", f"* {URL} {OTHER_SECRET}"],
            ":4: this name has this URL",
        ),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    path = hooks_file(tmp_path, *lines)
    with pytest.raises(ConfigError) as error:
        read_endpoints(OfflineBatchConfig(webhooks=path))
    assert message in str(error.value)
    assert path in str(error.value)
    for secret in ("t0p", SECRET, "QUFB", OTHER_SECRET):
        assert secret not in str(error.value)


def test_endpoints_show_no_secrets(tmp_path: Path) -> None:
    path = hooks_file(
        tmp_path, f"ann {URL} {SECRET}", f"* {URL} {SECRET} {OTHER_SECRET}"
    )
    first, second = read_endpoints(OfflineBatchConfig(webhooks=path))
    assert (first.name, len(first.signers)) == ("ann", 1)
    assert (second.name, len(second.signers)) == ("*", 2)
    assert (first.place.host, first.place.port) == ("hooks.example.com", 443)
    for secret in ("t0p", SECRET.removeprefix("whsec_")):
        assert secret not in repr([first, second])


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="webhooks: cannot read"):
        read_endpoints(OfflineBatchConfig(webhooks=str(tmp_path / "none")))


def test_networks_are_checked() -> None:
    with pytest.raises(ConfigError, match="webhook_networks"):
        OfflineBatchConfig(webhook_networks=("hooks.example.com",))
