"""A changed signature in SGLang is caught before it can do harm."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_batch.errors import UnsupportedSGLang
from sglang_batch.srt.compat import offline_hooks
from sglang_batch.srt.compat.private_api import (
    PRIVATE_API,
    check_private_api,
    parameters,
)


def test_installed_sglang_is_as_we_expect() -> None:
    check_private_api()


def test_the_page_names_each_hook() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    found = {
        n: v for n, v in vars(offline_hooks).items() if n.endswith(("HOOK", "HOOKS"))
    }
    targets = [t for v in found.values() for t in ([v] if isinstance(v, str) else v)]
    assert len(targets) > 25
    for target in targets:
        name = target.rpartition(".")[2]
        assert f"{name}`" in page, target


def test_added_parameter_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_batch(self: Any, batch: Any, pp_proxy_tensors: Any, stream: Any) -> None:
        pass

    monkeypatch.setattr(Scheduler, "run_batch", run_batch)
    with pytest.raises(UnsupportedSGLang) as caught:
        check_private_api()
    message = str(caught.value)
    assert "Scheduler.run_batch" in message
    assert "(batch, pp_proxy_tensors)" in message
    assert "(batch, pp_proxy_tensors, stream)" in message
    assert '{"scheduler": "stock"}' in message


def test_removed_method_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hides evict, which is inherited as an abstract method too.
    monkeypatch.setattr(UnifiedRadixCache, "evict", None)
    with pytest.raises(UnsupportedSGLang, match=r"UnifiedRadixCache\.evict .*missing"):
        check_private_api()


def test_property_that_became_a_method_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefillBudget, "remaining_total", lambda self: 0)
    with pytest.raises(UnsupportedSGLang, match=r"PrefillBudget\.remaining_total"):
        check_private_api()


@pytest.mark.parametrize(
    "place", ["sglang.srt.gone:Scheduler", "sglang.srt.utils:Gone"]
)
def test_moved_class_is_caught(place: str) -> None:
    with pytest.raises(UnsupportedSGLang, match=place.replace(":", r"\.")):
        check_private_api({place: {"method": ("", "")}})


class Slotted:
    __slots__ = ("field",)


def test_parameters_are_names_and_stars() -> None:
    def plain(a: int, b: int = 1) -> None: ...
    def keyword(self: Any, a: int, *, b: int = 1, **rest: int) -> None: ...
    def star(self: Any, *args: int, b: int = 1) -> None: ...

    assert parameters(plain) == "a, b"
    assert parameters(keyword) == "a, *, b, **rest"
    assert parameters(star) == "*args, b"
    assert parameters(staticmethod(plain)) == "a, b"
    assert parameters(property(plain)) == "(property)"
    assert parameters(inspect.getattr_static(Slotted, "field")) == "(attribute)"
    assert parameters(None) == "missing"


@pytest.mark.parametrize(
    ("ours", "place"),
    [
        (
            "scheduler.scheduler.OfflineScheduler",
            "sglang.srt.managers.scheduler:Scheduler",
        ),
        (
            "scheduler.sglang_parts.OfflinePrefillAdder",
            "sglang.srt.managers.schedule_policy:PrefillAdder",
        ),
        (
            "scheduler.sglang_parts.OfflineSchedulePolicy",
            "sglang.srt.managers.schedule_policy:SchedulePolicy",
        ),
        (
            "scheduler.kv.planned_cache.PlannedRadixCache",
            "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
        ),
        (
            "scheduler.sglang_parts.OfflineOutputStreamer",
            "sglang.srt.managers.scheduler_components.output_streamer:"
            "SchedulerOutputStreamer",
        ),
        (
            "scheduler.sglang_parts.OfflineResultProcessor",
            "sglang.srt.managers.scheduler_components.batch_result_processor:"
            "SchedulerBatchResultProcessor",
        ),
        (
            "attention.attention_backend.SharedPrefixMixin",
            "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        ),
    ],
)
def test_every_override_is_checked(ours: str, place: str) -> None:
    module, _, name = ours.rpartition(".")
    classes = getattr(import_module(f"sglang_batch.srt.{module}"), name).__mro__
    base = next(cls for cls in classes if cls.__module__.startswith("sglang."))
    assert place == f"{base.__module__}:{base.__name__}"
    overridden = {
        name
        for cls in classes[: classes.index(base)]
        for name, value in vars(cls).items()
        if callable(value) and hasattr(base, name) and name not in vars(object)
    }
    assert overridden and overridden <= set(PRIVATE_API[place])


def test_every_entry_has_its_use() -> None:
    for names in PRIVATE_API.values():
        assert all(use for _, use in names.values())
