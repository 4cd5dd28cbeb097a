"""The keys that a server is started with: a file of keys, and those of two options."""

from __future__ import annotations

from ....config import OfflineBatchConfig
from ....errors import ConfigError
from ...access.keys import (
    ANYBODY,
    SGLANG_ADMIN,
    SGLANG_CLIENT,
    Caller,
    FixedKeys,
    Role,
    caller_of,
    digest,
    read_api_keys,
)


def given_keys(
    config: OfflineBatchConfig, api_key: str | None, admin_key: str | None
) -> tuple[FixedKeys, Caller | None]:
    """The keys of a server, with the meaning that they have on SGLang's.

    Args:
        config: may name a file of keys.
        api_key: of ``--api-key``. An admin's, unless there is an ``admin_key``.
        admin_key: of ``--admin-api-key``.

    Returns:
        The callers by key, and who calls without a key: None if a key is needed.

    Raises:
        ConfigError: the file cannot be used, or has a key of the options too.
    """
    fixed: FixedKeys = {}
    if config.api_keys is not None:
        fixed |= read_api_keys(config.api_keys)
    role = Role.USER if admin_key else Role.ADMIN
    for flag, key, caller in (
        (SGLANG_ADMIN, admin_key, caller_of(SGLANG_ADMIN, Role.ADMIN)),
        ("--api-key", api_key, caller_of(SGLANG_CLIENT, role)),
    ):
        # One key for both is the admin's.
        if not key or (flag == "--api-key" and key == admin_key):
            continue
        known = fixed.setdefault(digest(key.encode()), caller)
        if known is not caller:
            raise ConfigError(
                f"{flag} is also the key of {known.name or '--api-key'!r}, which would "
                "have two roles; use different keys."
            )
    if config.api_keys is not None or api_key:
        return fixed, None
    # As in SGLang: without --api-key, the routes that are not the admin's stay open.
    return fixed, Caller(SGLANG_CLIENT, Role.USER) if admin_key else ANYBODY
