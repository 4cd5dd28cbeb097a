"""The list of SGLang's options, which is read in place of SGLang, is SGLang's."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentTypeError
from importlib.metadata import version
from pathlib import Path

import pytest
from record_release import sglangs_options

from sglang_batch.errors import ConfigError
from sglang_batch.srt.compat.command_line import OPTIONS, size
from sglang_batch.srt.plugin import quiet_log

WRITE = "run `PYTHONPATH=test/helpers python -m record_release`"


def test_the_recorded_options_are_those_of_the_release() -> None:
    recorded = json.loads(OPTIONS.read_bytes())
    assert recorded["release"] == version("sglang"), WRITE
    assert recorded["options"] == sglangs_options(), WRITE


@pytest.mark.parametrize("text", ["7", "-1", "1k", "25.6k", " 2G ", "1Ki", "10Ti"])
def test_sizes_are_read_as_by_sglang(text: str) -> None:
    from sglang.srt.utils.common import human_readable_int

    assert size(text) == human_readable_int(text)


@pytest.mark.parametrize("text", ["1K", "1.5Ki", "1.5", "k", "x"])
def test_no_sizes(text: str) -> None:
    from sglang.srt.utils.common import human_readable_int

    with pytest.raises(ArgumentTypeError):
        human_readable_int(text)
    with pytest.raises(ValueError):
        size(text)


def test_a_file_of_options_that_cannot_be_read_is_a_mistake(tmp_path: Path) -> None:
    from sglang_batch.srt.engine.in_process import parse_server_args

    torn = tmp_path / "torn.yaml"
    torn.write_text("{")
    with pytest.raises(ConfigError, match="SGLang refuses an option: "):
        parse_server_args(["--config", str(torn)])


def record(name: str, message: str, *args: object) -> bool:
    """Whether a logger prints a line, after its filters."""
    logger = logging.getLogger(name)
    made = logger.makeRecord(name, logging.INFO, "", 0, message, args, None)
    return bool(logger.filter(made))


def test_the_log_has_no_lines_that_nobody_reads() -> None:
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers.scheduler_components import metrics_reporter

    assert engine.logger.name in quiet_log.LONG_LINES
    assert metrics_reporter.logger.name == quiet_log.STEPS
    quiet_log.hide_polls()
    quiet_log.quiet_scheduler()
    access = '%s - "%s %s HTTP/%s" %d'

    def called(method: str, path: str, status: int) -> bool:
        return record(quiet_log.ACCESS, access, "::1", method, path, "1.1", status)

    assert not record(quiet_log.STEPS, "Prefill batch, #new-seq: 1")
    assert record(quiet_log.STEPS, "Decode batch, #running-req: 1")
    assert not called("GET", "/v1/batches/batch_1?x=1", 200)
    assert called("GET", "/v1/batches/batch_1", 404)
    assert called("POST", "/v1/batches", 200)
    assert called("GET", "/v1/files/file-1/content", 200)
    assert called("GET", "/get_model_info", 200)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    try:
        assert called("GET", "/v1/batches/batch_1", 200)
    finally:
        root.setLevel(before)
    quiet_log.show_polls()
    assert called("GET", "/v1/batches/batch_1", 200)


def test_a_long_line_is_cut() -> None:
    quiet_log.quiet_arguments()
    logger = logging.getLogger(quiet_log.LONG_LINES[0])
    for text, most in (
        ("server_args={'offline_batch': True, " + "x" * 19_000, 1100),
        ("server_args={" + "x" * 19_000, 20_000),  # a stock engine's
    ):
        made = logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None)
        assert logger.filter(made)
        assert len(made.getMessage()) < most
        cut = f"{len(text)} characters; --log-level debug" in made.getMessage()
        assert cut == (most < len(text))
