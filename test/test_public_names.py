"""Names that users have written down keep working.

``public_names.json`` holds the settings, the options of every command, the imports in
documentation and examples, the metrics, and the keys of JSON that the documentation names.
It is not generated again: a name leaves it when its release with a warning is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sglang_batch
from sglang_batch import __main__ as cli
from sglang_batch.config import RENAMED_SETTINGS, OfflineBatchConfig
from sglang_batch.run.summary import EngineWork, Summary
from sglang_batch.server.http.openapi import BatchObject, EngineState, ReplicaTree

NAMES = json.loads((Path(__file__).parent / "public_names.json").read_text())
FLAGS = {(command, flag) for command, all_ in NAMES["flags"].items() for flag in all_}


def options_of(
    parser: argparse.ArgumentParser, command: str = ""
) -> Iterator[tuple[str, str]]:
    """The commands of a parser with each of their options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from options_of(each, f"{command} {name}".strip())
        for flag in action.option_strings:
            yield command or "sglang-batch", flag


def test_every_setting_is_known() -> None:
    known = {field.name for field in dataclasses.fields(OfflineBatchConfig)}
    assert set(NAMES["settings"]) <= known | set(RENAMED_SETTINGS)
    assert set(RENAMED_SETTINGS.values()) <= known


def test_every_command_has_its_options() -> None:
    assert len(FLAGS) > 200
    assert FLAGS - set(options_of(cli._parser())) == set()


@pytest.mark.parametrize("name", NAMES["imports"])
def test_an_import_works(name: str) -> None:
    module, _, attribute = name.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        if attribute:
            assert getattr(found, attribute) is not None


def test_a_moved_module_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"sglang_batch\.run\.demo_model"):
        exec("from sglang_batch.demo_model import write_demo_model")
    moved = importlib.import_module("sglang_batch.demo_model")
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = moved.other


@cache
def source() -> str:
    files = Path(sglang_batch.__path__[0]).rglob("*.*")
    return "".join(x.read_text() for x in files if x.suffix in (".py", ".toml"))


@pytest.mark.parametrize("where", NAMES["json_keys"])
def test_every_key_of_json_is_written(where: str) -> None:
    """Keys of a declared object are its fields. Others are texts of the source."""
    declared = {
        "summary": set(Summary.__dataclass_fields__),
        "summary_engines": set(EngineWork.__dataclass_fields__),
        "engines": set(EngineState.model_fields),
        "tree": set(ReplicaTree.model_fields),
        "batch": set(BatchObject.model_fields),
    }
    written = {*re.findall(r'"(\w+)"', source())}
    written |= {*re.findall(r"^ +(\w+): ", source(), re.M)}
    assert set(NAMES["json_keys"][where]) - declared.get(where, written) == set()


def test_every_metric_is_made() -> None:
    """Names are put together from parts, so the part behind the prefix is looked for."""
    text = source()
    parts = (
        name.removeprefix("sglang_batch_").removeprefix("key_").removesuffix("_total")
        for name in NAMES["metrics"]
    )
    assert len(NAMES["metrics"]) > 30
    assert [part for part in parts if part not in text] == []
