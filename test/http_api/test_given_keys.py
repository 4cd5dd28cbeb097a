"""The keys that a server is started with, as on SGLang's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.server.access.keys import (
    ANYBODY,
    SGLANG_ADMIN,
    Role,
    digest,
    given_keys,
)

NO_FILE = OfflineBatchConfig()


@pytest.fixture
def with_file(tmp_path: Path) -> OfflineBatchConfig:
    path = tmp_path / "keys"
    path.write_text("ann key-ann\nops key-ops admin\n")
    return OfflineBatchConfig(api_keys=str(path))


def test_without_keys_everybody_does_everything() -> None:
    assert given_keys(NO_FILE, None, None) == ({}, ANYBODY)


def test_a_single_key_is_an_admins() -> None:
    fixed, without_key = given_keys(NO_FILE, "one", None)
    caller = fixed[digest(b"one")]
    assert (caller.role, caller.sees_all, without_key) == (Role.ADMIN, True, None)


def test_an_admins_key_leaves_the_other_routes_open() -> None:
    fixed, without_key = given_keys(NO_FILE, None, "root")
    assert fixed[digest(b"root")].role is Role.ADMIN
    assert without_key is not None and without_key.role is Role.USER
    assert not without_key.sees_all


def test_two_keys_and_a_file(with_file: OfflineBatchConfig) -> None:
    fixed, without_key = given_keys(with_file, "one", "root")
    roles = {key: fixed[digest(key.encode())].role for key in ("one", "root")}
    assert roles == {"one": Role.USER, "root": Role.ADMIN}
    assert fixed[digest(b"key-ann")].role is Role.CLIENT
    assert fixed[digest(b"key-ops")].role is Role.ADMIN
    assert without_key is None and len(fixed) == 4


def test_one_key_for_both_options_is_the_admins() -> None:
    fixed, without_key = given_keys(OfflineBatchConfig(), "same", "same")
    assert [caller.role for caller in fixed.values()] == [Role.ADMIN]
    assert without_key is None


@pytest.mark.parametrize(
    ("api_key", "admin_key", "said"),
    [
        ("key-ann", None, "--api-key is also the key of 'ann'"),
        (None, "key-ann", f"{SGLANG_ADMIN} is also the key of 'ann'"),
    ],
)
def test_a_key_has_one_role(
    with_file: OfflineBatchConfig,
    api_key: str | None,
    admin_key: str | None,
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        given_keys(with_file, api_key, admin_key)
