"""Keys of clients and admins on SGLang's server, and what their online calls use.

SGLang's ``--api-key`` and ``--admin-api-key`` keep their meaning: they are two more keys
of ours. SGLang's own check never starts, because it is told that there is no key.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from sglang.srt.runtime_context import get_context, get_serving

from ...config import OfflineBatchConfig
from ...errors import ApiError, ConfigError
from ...server.access import keys
from ...server.access.keys import ANYBODY, Role, digest, given_keys, read_api_keys
from ...server.http.authorization import AccessControl, current_caller
from ...store.batch_store import BatchStore
from ..compat.server_types import EngineRequest, TokenizerManager
from ..compat.support import as_flag
from ..engine.request_ids import has_our_id

SOURCE = "sglang-batch: keys"
_KEY_OPTIONS = ("api_key", "admin_api_key")


def check_client_keys(values: Mapping[str, object], config: OfflineBatchConfig) -> None:
    """Refuse arguments that would open a server with keys, before a model is loaded.

    Raises:
        ConfigError: calls could avoid the keys, or the file of keys is invalid.
    """
    flags = [as_flag(name) for name in _KEY_OPTIONS if values.get(name)]
    if config.api_keys is not None:
        flags.append("api_keys in --offline-batch-config")
    if not flags:
        return
    workers, wrong = values.get("tokenizer_worker_num"), ""
    if isinstance(workers, int) and workers > 1:
        wrong = "--tokenizer-worker-num above 1: SGLang's workers check no key"
    elif values.get("grpc_port") is not None:
        wrong = "--grpc-port: calls over gRPC carry no key"
    if wrong:
        raise ConfigError(
            f"{flags[-1]} does not work with {wrong}; drop one of the two."
        )
    if config.api_keys is None:
        return
    named = read_api_keys(config.api_keys)
    for option in _KEY_OPTIONS:
        key = str(values.get(option) or "")
        caller = named.get(digest(key.encode()))
        if caller is not None:
            raise ConfigError(
                f"{as_flag(option)} is also the key of {caller.name!r} in "
                f"{config.api_keys}, which would have two roles; use different keys."
            )


class ServerKeys:
    """The keys that a server was started with, also in the file that its settings name.

    Raises:
        ConfigError: the file of keys is invalid.
    """

    def __init__(self, config: OfflineBatchConfig) -> None:
        serving = get_serving()
        api_key, admin_key = serving.api_key, serving.admin_api_key
        self._can_be_closed = (
            serving.tokenizer_worker_num == 1 and serving.grpc_port is None
        )
        self.fixed, self.without_key = given_keys(config, api_key, admin_key)
        self._has_admin = any(caller.sees_all for caller in self.fixed.values())

    def replace_sglangs(self) -> None:
        """Have SGLang start without its own check of keys."""
        get_context().override(SOURCE, api_key=None, admin_api_key=None)

    def open_for_sglang(self) -> None:
        """Give SGLang's own calls, which warm the server up, a random key."""
        if not self._can_be_closed:
            return
        own = secrets.token_urlsafe(32)
        self.fixed[digest(own.encode())] = ANYBODY
        # Some of SGLang's routes refuse every call unless there is a key of an admin.
        get_context().override(
            SOURCE, api_key=own, admin_api_key=own if self._has_admin else None
        )

    def access(self, store: BatchStore) -> AccessControl:
        """The keys that the server was started with and those of its store.

        Raises:
            ConfigError: the store has keys, and calls could avoid them.
        """
        if not self._can_be_closed and keys.has_keys(store.rows):
            raise ConfigError(
                f"keys were made for the server of {store.directory}, and SGLang checks "
                "none with --tokenizer-worker-num above 1 or --grpc-port; drop that "
                "option, or name another --offline-batch-dir."
            )
        return AccessControl(store, self.fixed, self.without_key)


def count_online_usage(manager: TokenizerManager, access: AccessControl) -> None:
    """Count the calls that a tokenizer manager answers from now on.

    It answers every kind of call in one method, in the task of the call or in one that it
    started. Clients' requests get ids from SGLang, whatever id they ask for: when a call is
    dropped, SGLang aborts every request whose id begins with that of the call.
    """
    generate = manager.generate_request

    def counted(obj: EngineRequest, request: Any = None) -> AsyncGenerator[Any]:
        caller = current_caller.get()
        if caller is not None and caller.role < Role.ADMIN and not has_our_id(obj):
            # That of a response in the background is the server's, to cancel it by.
            obj.rid = obj.rid if getattr(obj, "background", False) else None
        if caller is None or not caller.name:
            return generate(obj, request)
        try:
            access.check_tokens(caller)
        except ApiError as error:
            # A wave is one call of any number of requests. SGLang answers each with 400.
            raise ValueError(error.message) from None
        return _counting(generate(obj, request), obj, caller.name, access)

    manager.generate_request = counted  # type: ignore[method-assign]


async def _counting(
    answers: AsyncGenerator[Any], obj: EngineRequest, name: str, access: AccessControl
) -> AsyncGenerator[Any]:
    """Pass answers on, and count them when they end or the caller leaves."""
    newest: dict[int, Mapping[str, Any]] = {}
    try:
        async for answer in answers:
            found = answer if isinstance(answer, list) else [answer]
            for place, one in enumerate(found):
                newest[one.get("index", place)] = one.get("meta_info", {})
            yield answer
    finally:
        await answers.aclose()
        # Samples of one prompt follow one another, and the prompt counts once.
        num_samples = getattr(obj, "parallel_sample_num", None) or 1
        access.count(name, used_by(newest, num_samples))


def used_by(newest: Mapping[int, Mapping[str, Any]], num_samples: int) -> Counter[str]:
    """The usage of a call with so many answers to each prompt, by SGLang's last reports."""
    used = Counter(calls=1)
    for index, report in newest.items():
        used["output_tokens"] += report.get("completion_tokens") or 0
        if index % num_samples == 0:
            used["input_tokens"] += report.get("prompt_tokens") or 0
            used["cached_tokens"] += report.get("cached_tokens") or 0
    return used
