"""Keys of clients beside SGLang's own key, and on its application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.srt import client_keys
from sglang_batch.srt.client_keys import check_client_keys, install_client_keys


@pytest.fixture
def config(tmp_path: Path) -> OfflineBatchConfig:
    path = tmp_path / "keys"
    path.write_text("ann key-a")
    return OfflineBatchConfig(api_keys=str(path))


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"api_key": "x"}, "--api-key"),
        ({"admin_api_key": "x"}, "--admin-api-key"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
    ],
)
def test_keys_of_clients_stand_alone(
    config: OfflineBatchConfig, values: dict[str, Any], flag: str
) -> None:
    check_client_keys({"tokenizer_worker_num": 1, "api_key": None}, config)
    check_client_keys(values, OfflineBatchConfig())
    with pytest.raises(ConfigError, match=f"api_keys .*{flag}.*drop one"):
        check_client_keys(values, config)


def test_a_wrong_file_of_keys_is_found_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="/none"):
        check_client_keys({}, OfflineBatchConfig(api_keys="/none"))


def test_sglangs_own_calls_have_a_key_that_is_no_clients(
    config: OfflineBatchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    overridden: dict[str, str] = {}

    class Context:
        def override(self, source: str, **fields: str) -> None:
            overridden.update(fields)

    monkeypatch.setattr(client_keys, "get_context", Context)
    app = FastAPI()
    install_client_keys(app, OfflineBatchConfig())
    assert not hasattr(app.state, "offline_batch_keys")
    install_client_keys(app, config)
    own = overridden["api_key"].encode()
    assert len(own) > 30
    assert app.state.offline_batch_keys == {b"key-a": "ann", own: ""}
