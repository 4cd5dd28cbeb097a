"""Keys of clients (``api_keys``) on SGLang's server, beside its own single key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from sglang.srt.runtime_context import get_context

from ..config import OfflineBatchConfig
from ..errors import ConfigError
from ..http_api.api_keys import read_api_keys


def check_client_keys(values: Mapping[str, Any], config: OfflineBatchConfig) -> None:
    """Refuse, before the model is loaded, what does not go together with the keys.

    Args:
        values: SGLang's server arguments by name.

    Raises:
        ConfigError: another kind of key is set, or the file of keys is wrong.
    """
    if config.api_keys is None:
        return
    for name in ("api_key", "admin_api_key"):
        if values.get(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"api_keys in --offline-batch-config does not work with {flag}: a call "
                "carries one key; drop one of the two."
            )
    if (values.get("tokenizer_worker_num") or 1) > 1:
        raise ConfigError(
            "api_keys in --offline-batch-config does not work with "
            "--tokenizer-worker-num above 1, as SGLang's --api-key; drop one of the two."
        )
    read_api_keys(config.api_keys)


def install_client_keys(app: FastAPI, config: OfflineBatchConfig) -> None:
    """Let calls in only with a key from here on; before SGLang's own start of the app.

    SGLang warms the server up with calls of its own, which carry what it takes for its
    key: one that nobody else knows, and that is no client's.
    """
    if config.api_keys is None:
        return
    own = secrets.token_urlsafe(32)
    app.state.offline_batch_keys = {
        **read_api_keys(config.api_keys),
        own.encode(): "",
    }
    get_context().override("sglang-batch: api_keys", api_key=own)
