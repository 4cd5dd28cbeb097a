"""OpenTelemetry spans of jobs, where the process has a provider of traces; else nothing.

SGLang makes it with ``--enable-trace``, which the environment implies, or else :func:`start`.
Its threads export, and drop what no collector takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

MOST_LINES = 100  # of a job that have spans, spread evenly
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def protocol() -> str:
    """How the environment wants spans to be sent."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    return os.environ.get(PROTOCOL, general)


def exporter() -> EntryPoint | None:
    """What sends spans to the collector that the environment names, if it is installed."""
    endpoints = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    default = "otlp" if any(map(os.environ.get, endpoints)) else "none"
    if "otlp" not in os.environ.get("OTEL_TRACES_EXPORTER", default):
        return None
    name = f"otlp_proto_{protocol().removesuffix('/protobuf')}"  # none has http/json
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    return next(iter(found), None)


def check_propagators() -> None:
    """Have no traces, and say so, if ``OTEL_PROPAGATORS`` names what is not installed.

    FastAPI and SGLang, which import it, would end.
    """
    if os.environ.get("OTEL_PROPAGATORS"):
        try:
            import_module("opentelemetry.propagate")
        except ModuleNotFoundError:
            pass
        except ValueError as error:
            print(
                f"No traces: OTEL_PROPAGATORS is unusable ({error}).", file=sys.stderr
            )
            os.environ |= {"OTEL_PROPAGATORS": "none", "OTEL_TRACES_EXPORTER": "none"}


def provider(say: Callable[[str], None]) -> Any:
    """What makes spans for the collector that the environment names, None without one.

    None as well if the environment cannot be used: SGLang, which makes the same, would
    end. ``say`` gets why.
    """
    if (found := exporter()) is None:
        return None
    try:
        for name in ("grpc", "http"):  # SGLang imports both
            import_module(f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter")
        import_module("opentelemetry.propagate")
        from opentelemetry.sdk.trace import TracerProvider, export

        # Without a collector, its shutdown could take half a minute.
        made = TracerProvider(shutdown_on_exit=False)
        made.add_span_processor(
            export.BatchSpanProcessor(
                found.load()(), schedule_delay_millis=500, max_export_batch_size=64
            )
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        say(f"No traces: the environment's OTEL_* variables cannot be used ({reason}).")
        return None
    return made


def start(say: Callable[[str], None]) -> bool:
    """Whether there is a provider, made here if the environment asks and SGLang did not."""
    if exporter() is None and "opentelemetry.trace" not in sys.modules:
        return False
    trace: Any = import_module("opentelemetry.trace")
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return True
    if (made := provider(say)) is not None:
        trace.set_tracer_provider(made)
    return made is not None


@asynccontextmanager
async def span(
    name: str, *, root: bool = False, hides: bool = False
) -> AsyncIterator[None]:
    """A block or coroutine function with a span, if it belongs to a sampled one or is a
    ``root``. One that ``hides`` has none, nor has anything in it."""
    block: AbstractContextManager[Any] = nullcontext()
    if (trace := sys.modules.get("opentelemetry.trace")) is not None:
        present = trace.get_current_span().get_span_context()
        if hides and present.trace_flags.sampled:
            unsampled = trace.SpanContext(present.trace_id, present.span_id, False)
            block = trace.use_span(trace.NonRecordingSpan(unsampled))
        elif root or present.trace_flags.sampled:
            block = trace.get_tracer("sglang_batch").start_as_current_span(name)
    with block:
        yield


def note(status: str | None = None, /, **attributes: Any) -> None:
    """Set attributes of the present span, and how its work ended unless it completed."""
    if (trace := sys.modules.get("opentelemetry.trace")) is not None:
        present = trace.get_current_span()
        present.set_attributes({f"sglang_batch.{k}": v for k, v in attributes.items()})
        if status not in (None, "completed"):
            present.add_event(status)
            present.set_status(trace.StatusCode.ERROR, status)


def headers() -> dict[str, str]:
    """The present span as W3C headers of a call, none without one."""
    found: dict[str, str] = {}
    if (propagate := sys.modules.get("opentelemetry.propagate")) is not None:
        propagate.inject(found)
    return found


def enter(headers: Mapping[str, str]) -> None:
    """Have the present task continue the trace of a call's headers, or none."""
    if (propagate := sys.modules.get("opentelemetry.propagate")) is not None:
        context: Any = import_module("opentelemetry.context")
        # Without propagators (OTEL_PROPAGATORS=none), it is the one that is given.
        context.attach(propagate.extract(headers, context.Context()))
