"""Traces for OpenTelemetry: a span for each thing that a process does, and the context that events carry on.

Holds: nothing is loaded and no span is made unless the standard variables name a collector; a collector that is away,
slow or broken delays no step and fails none. A context that somebody forged can only put spans into another trace.
Does not: write down prompts, commands, results or secrets. An attribute is a name, a number or an id.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

REPORTING = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""The loggers that report spans that could not be sent; a filter of a logger does not hear of those below it."""
MAX_TEXT_CHARS = 200
END_SECONDS = 2.0
"""How long the end of a process waits for the last spans to be sent."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | list[str] | int | float | bool

_log = logging.getLogger(__name__)


def checked_traceparent(value: object) -> str | None:
    """Return a context as W3C Trace Context writes it; None for anything else, which is no error."""
    return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else None


def traceparent_of(conversation_id: str) -> str:
    """Return the context of a conversation that was submitted without one; all processes compute the same."""
    digest = sha256(conversation_id.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


class OpenSpan:
    """A span under way; without a tracer it is none, and has the context that it was given."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str | None, span: Span | None = None) -> None:
        self.traceparent = traceparent
        self._span = span

    def add(self, attributes: Mapping[str, Value]) -> None:
        """Say more about it."""
        if self._span is not None:
            self._span.set_attributes(_bounded(attributes))

    def fail(self, code: str) -> None:
        """Mark it as failed, with the error's code."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", code[:MAX_TEXT_CHARS])
            self._span.set_status(Status(StatusCode.ERROR))


class Tracing:
    """The spans of one process.

    Args:
        tracer: None makes no spans.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self.is_on = tracer is not None

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        parent: str | None,
        *,
        kind: Kind = "internal",
        attributes: Mapping[str, Value] | None = None,
        begun: datetime | None = None,
    ) -> Iterator[OpenSpan]:
        """Make a span of what is done within; an exception that leaves it marks it as failed, by its class.

        Args:
            parent: the context that it belongs to, if it is one; None begins a trace.
            begun: when it began; None: now.
        """
        if self._tracer is None:
            yield OpenSpan(parent)
            return
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name[:MAX_TEXT_CHARS],
            _context(parent),
            SpanKind[kind.upper()],
            _bounded(attributes or {}),
            start_time=None if begun is None else int(begun.timestamp() * 1_000_000_000),
        )
        found = span.get_span_context()
        own = OpenSpan(f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}", span)
        try:
            yield own
        except BaseException as error:
            own.fail(getattr(error, "code", None) or type(error).__name__)
            raise
        finally:
            span.end()


@functools.cache
def tracing(role: str) -> Tracing:
    """Return the spans of this process: none, unless a standard variable names a collector.

    Args:
        role: what the process is: `client`, `server`, `controller`, `tool`, …
    """
    from broker.runtime.settings import otel_variables

    env = otel_variables()
    is_wanted = any(env.get(name) for name in ENDPOINTS)
    if not is_wanted or env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none":
        return Tracing()
    try:
        return Tracing(_provider(role, is_named="OTEL_SERVICE_NAME" in env).get_tracer("deckhands"))
    except ImportError as error:
        _log.warning("no traces are sent, because packages are missing (pip install 'deckhands[otel]'): %s", error)
    except Exception:  # noqa: BLE001  (a variable of the SDK's that it cannot use must stop no work)
        _log.exception("no traces are sent, because a variable named OTEL_… cannot be used")
    return Tracing()


def _provider(role: str, *, is_named: bool) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK reports a collector that is away at each attempt.
    seldom = _Seldom()
    for name in REPORTING:
        logging.getLogger(name).addFilter(seldom)
    named = {} if is_named else {"service.name": "deckhands"}
    resource = Resource.create({**named, "deckhands.role": role, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    atexit.register(_end, provider)
    return provider


def _end(provider: TracerProvider) -> None:
    """Send the last spans, as long as that takes at most."""
    ending = threading.Thread(target=provider.shutdown, name="end of traces", daemon=True)
    ending.start()
    ending.join(END_SECONDS)


class _Seldom(logging.Filter):
    """Lets no more than the first report through."""

    def __init__(self) -> None:
        super().__init__()
        self._has_reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_first, self._has_reported = not self._has_reported, True
        return is_first or record.levelno < logging.WARNING


def _context(parent: str | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if checked_traceparent(parent) is None:
        return Context()
    assert parent is not None
    _, trace_id, span_id, flags = parent.split("-")
    found = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16) & 1))
    return set_span_in_context(NonRecordingSpan(found), Context())


def _bounded(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value for name, value in attributes.items()}
