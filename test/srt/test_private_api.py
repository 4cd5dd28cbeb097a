"""A changed signature in SGLang is caught before it can do harm."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_batch.errors import UnsupportedSGLang
from sglang_batch.srt.compat import offline_hooks, private_api
from sglang_batch.srt.compat.private_api import (
    CALL,
    INTERFACE,
    PRIVATE_API,
    PrivateFunction,
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


@pytest.mark.parametrize(
    "place", ["sglang.srt.gone:Scheduler", "sglang.srt.utils:Gone"]
)
def test_moved_class_is_caught(place: str) -> None:
    with pytest.raises(UnsupportedSGLang, match=place.replace(":", r"\.")):
        check_private_api({place: {"method": PrivateFunction("", "", "", "")}})


def test_parameters_are_names_and_stars() -> None:
    def plain(a: int, b: int = 1) -> None: ...
    def keyword(self: Any, a: int, *, b: int = 1, **rest: int) -> None: ...
    def star(self: Any, *args: int, b: int = 1) -> None: ...

    assert parameters(plain) == "a, b"
    assert parameters(keyword) == "a, *, b, **rest"
    assert parameters(star) == "*args, b"
    assert parameters(staticmethod(plain)) == "a, b"
    assert parameters(property(plain)) == "missing"
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
    listed: dict[str, PrivateFunction] = {}
    for cls in base.__mro__:
        listed |= PRIVATE_API.get(f"{cls.__module__}:{cls.__name__}", {})
    assert overridden and overridden <= set(listed)
    assert CALL not in {listed[name].kind for name in overridden}


def test_interfaces_are_declared_by_sglang() -> None:
    """In a base class that others extend, or in the module of a registry."""
    declared = {
        "UnifiedRadixCache": BasePrefixCache,
        "CommonKVSender": BaseKVSender,
        "CommonKVReceiver": BaseKVReceiver,
        "AttentionBackend": AttentionBackend,
        "TokenToKVPoolAllocator": BaseTokenToKVPoolAllocator,
        "BaseTokenToKVPoolAllocator": BaseTokenToKVPoolAllocator,
    }
    others = set()
    for place, names in PRIVATE_API.items():
        owner = place.partition(":")[2]
        for name, function in names.items():
            if function.kind == INTERFACE and owner in declared:
                assert name in vars(declared[owner]), f"{place}.{name}"
            elif function.kind == INTERFACE:
                others.add(name)
    assert others == {
        # Named for plugins: their bodies return a class, or make the request's record.
        *("get_prefill_adder_class", "get_output_streamer_class"),
        "_create_generation_req",
        *("register_radix_cache_backend", "get_radix_cache_factory"),
        "create_unified_radix_cache",
        *("hook_custom_types", "add_cli_args", "from_cli_args", "shutdown"),
    }


def test_calls_have_public_names() -> None:
    called = {
        name
        for names in PRIVATE_API.values()
        for name, function in names.items()
        if function.kind == CALL
    }
    assert len(called) > 30
    assert {name for name in called if name.startswith("_")} == {"__init__"}


def test_every_hook_is_checked() -> None:
    found = {
        n: v for n, v in vars(offline_hooks).items() if n.endswith(("HOOK", "HOOKS"))
    }
    targets = {t for v in found.values() for t in ([v] if isinstance(v, str) else v)}
    functions = {target.rpartition(".")[2] for target in targets}
    functions = {name for name in functions if not name[0].isupper()}
    listed = {
        name
        for names in PRIVATE_API.values()
        for name, function in names.items()
        if function.kind != CALL
    }
    assert len(functions) > 20
    assert functions <= listed


def test_other_code_of_the_same_version_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private_api.warn_of_changes()
    assert not caplog.records
    place = "sglang.srt.managers.scheduler:Scheduler"
    other = PRIVATE_API[place]["run_batch"]._replace(digest="0")
    changed = {**PRIVATE_API, place: {**PRIVATE_API[place], "run_batch": other}}
    monkeypatch.setattr(private_api, "PRIVATE_API", changed)
    private_api.warn_of_changes()  # no file differs
    assert not caplog.records
    monkeypatch.setitem(private_api._RECORD, "digest", "")
    private_api.warn_of_changes()
    [record] = caplog.records
    assert "Scheduler.run_batch; if results are wrong" in record.getMessage()
