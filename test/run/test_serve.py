"""The checks of ``sglang-batch serve`` before SGLang is imported."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from sglang_batch.errors import StoreError
from sglang_batch.run import serve_command
from sglang_batch.run.serve_command import check_server


def test_a_port_that_may_be_in_a_file_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(serve_command, "DEFAULT_PORT", taken.getsockname()[1])
        check_server(Namespace())  # with --config
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(StoreError, match="is in use"):
            check_server(Namespace(model_path=str(tmp_path)))
