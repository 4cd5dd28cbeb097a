"""Settings: their sections, options, tables, and their earlier names."""

from __future__ import annotations

import argparse
import dataclasses
import warnings

import pytest
from settings_tables import DOCS, PAGES, rewritten

from sglang_batch.config import (
    RENAMED_SETTINGS,
    SECTIONS,
    OfflineBatchConfig,
    add_setting,
    settings_help,
    settings_in,
)
from sglang_batch.errors import ConfigError

WARNING = "The setting max_line_tries is now called max_line_attempts; "


def test_renamed_settings_are_settings() -> None:
    names = {field.name for field in dataclasses.fields(OfflineBatchConfig)}
    assert names >= set(RENAMED_SETTINGS.values())
    assert not names & RENAMED_SETTINGS.keys()


def test_an_earlier_name_works_in_the_constructor_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=WARNING) as caught:
        config = OfflineBatchConfig(max_line_tries=5)  # type: ignore[call-arg]
    assert config == OfflineBatchConfig(max_line_attempts=5)
    assert caught[0].filename == __file__


def test_an_earlier_name_works_in_json_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=WARNING) as caught:
        config = OfflineBatchConfig.from_json('{"max_line_tries": 5, "seed": 1}')
    assert config == OfflineBatchConfig(max_line_attempts=5, seed=1)
    assert len(caught) == 1


def test_an_earlier_value_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match='"triton" runs in its place'):
        config = OfflineBatchConfig.from_json('{"attention": "flashinfer"}')
    assert config.attention == "triton"


def test_a_current_name_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = OfflineBatchConfig.from_json('{"max_line_attempts": 5}')
    assert config.max_line_attempts == 5


def test_an_earlier_name_is_checked_like_the_current_one() -> None:
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match="max_line_attempts=0 must be a whole number"),
    ):
        OfflineBatchConfig.from_json('{"max_line_tries": 0}')


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="and both are given; drop max_line_tries"):
        OfflineBatchConfig.from_json('{"max_line_tries": 5, "max_line_attempts": 5}')


def test_unknown_settings_list_current_names_only() -> None:
    with pytest.raises(ConfigError) as caught:
        OfflineBatchConfig.from_json('{"max_line": 5}')
    assert "max_line_attempts" in str(caught.value)
    assert "max_line_tries" not in str(caught.value)


@pytest.mark.parametrize("hours", ["\u0662\u0662:00-06:00", "22:00-0\uff16:00"])
def test_hours_of_other_digits_are_refused(hours: str) -> None:
    with pytest.raises(ConfigError, match="batch_hours"):
        OfflineBatchConfig(batch_hours=hours)


def test_overlap_is_one_of_its_three_values() -> None:
    assert OfflineBatchConfig().overlap == "off"
    for value in ("auto", "on", "off"):
        assert OfflineBatchConfig(overlap=value).overlap == value
    with pytest.raises(ConfigError, match="overlap=True is not known; choose one of"):
        OfflineBatchConfig.from_json('{"overlap": true}')


def test_every_setting_is_in_a_section() -> None:
    stable = [field for section in SECTIONS for field in settings_in(section)]
    assert len(stable) <= 30
    fields = dataclasses.fields(OfflineBatchConfig)
    assert tuple(stable + settings_in("experimental")) == fields
    assert all(field.metadata["description"] for field in fields)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("policy", "dfs", "dfs"),
        ("max_inflight", "12", 12),
        ("batch_share", "0.5", 0.5),
        ("answer_cache", "kept", "kept"),
    ],
)
def test_an_option_is_made_of_its_setting(name: str, text: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    add_setting(parser, name, "More of it")
    flag = f"--{name.replace('_', '-')}"
    assert vars(parser.parse_args([flag, text])) == {name: value}
    assert vars(parser.parse_args([])) == {name: None}
    shown = parser.format_help()
    assert "More of it" in shown and "](" not in shown and "`" not in shown


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("policy", "best", "invalid choice: 'best'"),
        ("max_inflight", "0", "'0' must be a whole number of 1 or more"),
        ("max_inflight", "x", "'x' must be a whole number of 1 or more"),
        ("seed", "\u0663", "'\u0663' must be a whole number of 0 or more"),
        ("dollars_per_hour", "nan", "'nan' must be a number of dollars above 0"),
        ("dollars_per_hour", "inf", "'inf' must be a number of dollars above 0"),
    ],
)
def test_an_option_is_checked_as_its_setting(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_setting(parser, name)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--{name.replace('_', '-')}", text])
    assert message in capsys.readouterr().err


def test_help_lists_the_stable_settings() -> None:
    shown = settings_help()
    assert all(f"{section}:\n" in shown for section in SECTIONS)
    assert "  batch_share: share of running requests" in shown
    assert "prefetch_bytes" not in shown


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_settings_are_those_of_the_fields(page: str) -> None:
    """After a change of a setting: ``python docs/settings_tables.py``."""
    assert (DOCS / page).read_text() == rewritten(page)


def test_a_misspelt_setting_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'polcy'.*Did you mean 'policy'"):
        OfflineBatchConfig.from_json('{"polcy": "dfs"}')
    with pytest.raises(TypeError, match="Did you mean 'policy'"):
        OfflineBatchConfig(polcy="dfs")  # type: ignore[call-arg]
