"""Settings under their earlier names."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from sglang_batch.config import RENAMED_SETTINGS, OfflineBatchConfig
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


def test_a_setting_has_a_description_and_a_misspelt_one_a_suggestion() -> None:
    for field in dataclasses.fields(OfflineBatchConfig):
        assert field.metadata["description"] and field.metadata["section"]
    with pytest.raises(ConfigError, match=r"no setting 'polcy'.*Did you mean 'policy'"):
        OfflineBatchConfig.from_json('{"polcy": "dfs"}')
    with pytest.raises(TypeError, match="Did you mean 'policy'"):
        OfflineBatchConfig(polcy="dfs")  # type: ignore[call-arg]
