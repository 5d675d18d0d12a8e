"""Traces for OpenTelemetry: spans of a process, and the trace context that events carry.

Holds: nothing is imported and no span is made unless the standard variables name a collector. A collector that is
unavailable, slow or broken neither delays nor fails a step. A forged context can only put spans into another trace.
Spans are our own objects until the SDK's batch processor has a batch, because the SDK's spans would cost a step several
times as much. An attribute is a name, a number or an id. Only if an operator asks for it, the attributes in `CONTENT`
hold what models and tools read and write; callers mask secrets in them.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from broker.runtime.clock import now_nanos
from broker.runtime.ids import new_span_id, new_trace_id

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import SpanContext

REPORTING = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""The loggers that report unsent spans. A filter of a logger does not apply to its child loggers."""
MAX_TEXT_CHARS = 200
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The published variable that asks for content in spans."""
CAPTURING = frozenset({"true", "span_only", "span_and_event"})
"""Its values that do, in lower case; ours are no events."""
CONTENT = frozenset(
    {
        "gen_ai.input.messages",
        "gen_ai.output.messages",
        "gen_ai.system_instructions",
        "gen_ai.tool.call.arguments",
        "gen_ai.tool.call.result",
    }
)
MAX_CONTENT_CHARS = 64_000
"""Of one attribute in `CONTENT`."""
MAX_CONTENT_TEXT_CHARS = 8_000
"""Of one text in it."""
END_SECONDS = 2.0
"""How long the end of a process waits until the last spans are sent."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
SCOPE = "deckhands"
KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
"""Kinds of spans, with their OTLP numbers."""
FAILED = 2
"""The OTLP status of a failed span."""
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200
"""Flags of a span: it is known whether its parent is in another process, and it is."""

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | list[str] | int | float | bool

_log = logging.getLogger(__name__)


def parse_traceparent(value: object) -> str | None:
    """Return a valid W3C Trace Context; None for anything else, which is not an error."""
    return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else None


def make_traceparent(conversation_id: str) -> str:
    """Return the context of a conversation that was submitted without one. Every process computes the same context."""
    digest = sha256(conversation_id.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


class OpenSpan:
    """A span in progress. This class records nothing: tracing is off, or the span was not sampled."""

    __slots__ = ("traceparent",)

    captures_content = False
    """Whether it gets what models and tools read and write, as an operator asks for."""

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the span."""

    def add(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""

    def fail(self, code: str) -> None:
        """Mark the span as failed, with the error's code."""


class RecordedSpan(OpenSpan):
    """A span that is sent when it has ended.

    Attributes:
        parent_id: the parent span, 16 hexadecimal digits; empty for the first span of a trace.
        begun_ns, ended_ns: nanoseconds since the epoch; 0 if not yet.
        error: the code of its failure; empty for none.
    """

    __slots__ = (
        "_sink",
        "attributes",
        "begun_ns",
        "captures_content",
        "ended_ns",
        "error",
        "kind",
        "name",
        "parent_id",
    )

    context: ClassVar = SimpleNamespace(trace_flags=SimpleNamespace(sampled=True))
    """The attributes of a span that the SDK's batch processor reads."""

    def __init__(
        self,
        traceparent: str,
        sink: Callable[[RecordedSpan], None],
        name: str,
        kind: Kind,
        *,
        parent_id: str,
        attributes: Mapping[str, Value],
        begun_ns: int,
        captures_content: bool,
    ) -> None:
        self.traceparent: str = traceparent
        self.captures_content = captures_content
        self._sink = sink
        self.name = name
        self.kind = kind
        self.parent_id = parent_id
        self.attributes = dict(attributes)
        self.begun_ns = begun_ns
        self.ended_ns = 0
        self.error = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return self.traceparent[36:52]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(getattr(error, "code", None) or type(error).__name__)
        self.ended_ns = now_nanos()
        self._sink(self)

    def add(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        self.attributes.update(attributes)

    def fail(self, code: str) -> None:
        """Mark the span as failed, with the error's code."""
        self.error = self.attributes["error.type"] = str(code)


class Tracing:
    """The spans of one process.

    Args:
        sink: receives each span as soon as it has ended; None makes no spans.
        sampler: decides which spans are recorded; None for all, except those with an unsampled parent.
        captures_content: an operator asks for content in recorded spans.
    """

    def __init__(
        self,
        sink: Callable[[RecordedSpan], None] | None = None,
        sampler: Sampler | None = None,
        *,
        captures_content: bool = False,
    ) -> None:
        self._sink = sink
        self._sampler = sampler
        self.is_on = sink is not None
        self._captures_content = captures_content

    def span(
        self,
        name: str,
        parent: str | None,
        *,
        kind: Kind = "internal",
        attributes: Mapping[str, Value] | None = None,
        begun: datetime | None = None,
    ) -> OpenSpan:
        """Make a span for a `with` block. An exception that leaves the block marks it as failed, by its class.

        Args:
            parent: the parent's context, if valid; None starts a trace.
            begun: start time; None for now.
        """
        if self._sink is None:
            return OpenSpan(parent)
        found, said = parse_traceparent(parent), attributes or {}
        trace_id, parent_id = (found[3:35], found[36:52]) if found is not None else (new_trace_id(), "")
        is_sampled = found is None or int(found[53:], 16) & 1 == 1
        if self._sampler is not None:
            is_sampled = _is_sampled(self._sampler, found, trace_id, name, kind=kind, attributes=said)
        own = f"00-{trace_id}-{new_span_id()}-0{is_sampled:d}"
        if not is_sampled:
            return OpenSpan(own)
        begun_ns = now_nanos() if begun is None else int(begun.timestamp() * 1_000_000_000)
        return RecordedSpan(
            own,
            self._sink,
            name,
            kind,
            parent_id=parent_id,
            attributes=said,
            begun_ns=begun_ns,
            captures_content=self._captures_content,
        )


@functools.cache
def open_tracing(role: str) -> Tracing:
    """Return the spans of this process. They record nothing unless a standard variable names a collector.

    Args:
        role: role of the process: `client`, `server`, `controller`, `tool`, …
    """
    from broker.runtime.settings import find_otel_variables

    env = find_otel_variables()
    is_wanted = any(env.get(name) for name in ENDPOINTS)
    if not is_wanted or env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none":
        return Tracing()
    try:
        captures_content = env.get(CAPTURE, "").lower() in CAPTURING
        return _make_exporter(role, is_named="OTEL_SERVICE_NAME" in env, captures_content=captures_content)
    except ImportError as error:
        _log.warning("no traces are sent, because packages are missing (pip install 'deckhands[otel]'): %s", error)
    except Exception:  # noqa: BLE001  (a variable of the SDK's that it cannot use must stop no work)
        _log.exception("no traces are sent, because a variable named OTEL_… cannot be used")
    return Tracing()


def _make_exporter(role: str, *, is_named: bool, captures_content: bool) -> Tracing:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK logs each failed attempt to reach a collector.
    seldom = _FirstReportOnly()
    for name in REPORTING:
        logging.getLogger(name).addFilter(seldom)
    named = {} if is_named else {"service.name": "deckhands"}
    resource = Resource.create({**named, "deckhands.role": role, "process.pid": os.getpid()})
    sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
    processor = BatchSpanProcessor(cast("SpanExporter", BatchExporter(OTLPSpanExporter(), resource)))
    atexit.register(_shut_down, processor)
    sink = cast("Callable[[RecordedSpan], None]", processor.on_end)
    return Tracing(sink, None if sampler is sampling.DEFAULT_ON else sampler, captures_content=captures_content)


class BatchExporter:
    """Encodes our spans as OTLP, and sends them with the SDK's client.

    If the SDK's client does not accept bytes, it gets the SDK's own spans and encodes them itself.

    Attributes:
        is_fast: the client accepts bytes.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._send = getattr(getattr(exporter, "_client", None), "export", None)
        self.is_fast = self._send is not None

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Send spans, or report a failure."""
        if self._send is None:
            self._exporter.export([to_sdk_span(span, self._resource) for span in spans])
        else:
            self._send(encode_finished_spans(spans, self._resource))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: this exporter has no buffer."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Stop sending."""
        self._exporter.shutdown()


def encode_finished_spans(spans: Iterable[RecordedSpan], resource: Resource) -> bytes:
    """Encode spans as the body of an OTLP request, in protobuf."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    of_resource.schema_url = resource.schema_url
    _add_attributes(of_resource.resource.attributes, resource.attributes)
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = SCOPE
    for span in spans:
        message = of_scope.spans.add()
        message.trace_id, message.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
        message.flags = HAS_IS_REMOTE
        if span.parent_id:
            message.parent_span_id = bytes.fromhex(span.parent_id)
            message.flags = HAS_IS_REMOTE | IS_REMOTE
        message.name, message.kind = _clean_text(span.name), KINDS[span.kind]
        message.start_time_unix_nano = span.begun_ns
        message.end_time_unix_nano = span.ended_ns
        message.status.code = FAILED if span.error else 0
        _add_attributes(message.attributes, span.attributes)
    return bytes(request.SerializeToString())


def to_sdk_span(span: RecordedSpan, resource: Resource) -> ReadableSpan:
    """Convert a span to one of the SDK's."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind, Status, StatusCode

    texts = {
        name: _clean_text(value, _limit_of(name)) if isinstance(value, str) else value
        for name, value in span.attributes.items()
    }
    return ReadableSpan(
        name=_clean_text(span.name),
        context=_span_context(span.traceparent, is_remote=False),
        parent=_span_context(f"00-{span.trace_id}-{span.parent_id}-01") if span.parent_id else None,
        resource=resource,
        attributes=texts,
        kind=SpanKind[span.kind.upper()],
        status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
        start_time=span.begun_ns,
        end_time=span.ended_ns,
        instrumentation_scope=InstrumentationScope(SCOPE),
    )


def _add_attributes(into: Any, attributes: Mapping[str, Any]) -> None:
    """Add attributes to the list of a message."""
    for name, value in attributes.items():
        pair = into.add()
        pair.key = name
        if isinstance(value, str):
            pair.value.string_value = _clean_text(value, _limit_of(name))
        elif isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, float):
            pair.value.double_value = value
        else:
            texts = pair.value.array_value.values
            for text in value:
                texts.add().string_value = _clean_text(text)


def _limit_of(name: str) -> int:
    return MAX_CONTENT_CHARS if name in CONTENT else MAX_TEXT_CHARS


def render_content(content: Any) -> str:
    """Return content as bounded JSON: long texts are cut, and of a long list, the last items are kept.

    Args:
        content: dicts, lists, texts and numbers, with masked secrets.
    """
    content = _cut_texts(content)
    if not isinstance(content, list):
        return _render_part(content)
    kept: list[str] = []
    left = MAX_CONTENT_CHARS
    for item in reversed(content):
        text = _render_part(item)
        left -= len(text) + 2
        if left < 0:
            break
        kept.insert(0, text)
    return f"[{', '.join(kept)}]"


def _render_part(part: Any) -> str:
    text = json.dumps(part)
    # a cut text is half as long, because each of its characters may be escaped again
    return text if len(text) < MAX_CONTENT_CHARS - 1 else json.dumps({"cut": text[: MAX_CONTENT_CHARS // 2 - 16]})


def _cut_texts(part: Any) -> Any:
    if isinstance(part, dict):
        return {_cut_texts(name): _cut_texts(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_cut_texts(item) for item in part]
    return part[:MAX_CONTENT_TEXT_CHARS] if isinstance(part, str) else part


def _clean_text(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return a text that protobuf can hold: bounded, without lone surrogates."""
    text = text[:limit]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _is_sampled(
    sampler: Sampler, parent: str | None, trace_id: str, name: str, *, kind: Kind, attributes: Mapping[str, Value]
) -> bool:
    from opentelemetry.sdk.trace.sampling import Decision
    from opentelemetry.trace import SpanKind

    found = sampler.should_sample(_context(parent), int(trace_id, 16), name, SpanKind[kind.upper()], attributes)
    return found.decision is Decision.RECORD_AND_SAMPLE


def _context(parent: str | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    if parent is None:
        return Context()
    return set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())


def _span_context(traceparent: str, *, is_remote: bool = True) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16) & 1))


def _shut_down(processor: BatchSpanProcessor) -> None:
    """Send the last spans, for at most `END_SECONDS`."""
    ending = threading.Thread(target=processor.shutdown, name="end of traces", daemon=True)
    ending.start()
    ending.join(END_SECONDS)


class _FirstReportOnly(logging.Filter):
    """A log filter that passes only the first report."""

    def __init__(self) -> None:
        super().__init__()
        self._has_reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_first, self._has_reported = not self._has_reported, True
        return is_first or record.levelno < logging.WARNING
