"""Exported spans: the SDK's encoding of sampled spans, and no others."""

from __future__ import annotations

import contextlib
import json

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from broker.runtime.tracing import (
    MAX_CONTENT_CHARS,
    MAX_CONTENT_TEXT_CHARS,
    MAX_TEXT_CHARS,
    BatchExporter,
    RecordedSpan,
    Tracing,
    Value,
    encode_finished_spans,
    render_content,
    to_sdk_span,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{PARENT[:-2]}00"
RESOURCE = Resource({"service.name": "deckhands", "deckhands.role": "tool", "process.pid": 17})
ATTRIBUTES: dict[str, Value] = {
    "text": "ä€😀 plain",
    "names": ["stop", "length"],
    "count": 2**40,
    "share": 0.25,
    "is_so": True,
    "is_not": False,
    "less": -3,
    "none": "",
}


def recorded(parent: str | None = PARENT, *, error: BaseException | None = None) -> RecordedSpan:
    spans: list[RecordedSpan] = []
    with (
        contextlib.suppress(KeyError),
        Tracing(spans.append).span("chat a", parent, kind="client", attributes=ATTRIBUTES) as span,
    ):
        span.add({"later": "said"})
        if error is not None:
            raise error
    return spans[0]


@pytest.mark.parametrize("parent", [PARENT, None, "no context"])
@pytest.mark.parametrize("error", [None, KeyError("private")])
def test_sent_spans_equal_the_sdk_s_encoding(parent: str | None, error: BaseException | None) -> None:
    span = recorded(parent, error=error)
    ours = ExportTraceServiceRequest.FromString(encode_finished_spans([span, span], RESOURCE))
    assert ours == encode_spans([to_sdk_span(span, RESOURCE)] * 2)
    (sent, _) = ours.resource_spans[0].scope_spans[0].spans
    assert sent.parent_span_id.hex() == (PARENT.split("-")[2] if parent == PARENT else "")
    assert sent.start_time_unix_nano <= sent.end_time_unix_nano
    assert {each.key for each in sent.attributes} == {*ATTRIBUTES, "later", *(["error.type"] if error else [])}
    assert b"private" not in encode_finished_spans([span], RESOURCE)


def test_texts_too_long_for_a_message_are_cut() -> None:
    spans: list[RecordedSpan] = []
    with Tracing(spans.append).span("\ud800" * 500, None, attributes={"a": "\udfff", "b": ["x" * 500]}) as span:
        span.fail("y" * 500)
    sent = (
        ExportTraceServiceRequest.FromString(encode_finished_spans(spans, RESOURCE))
        .resource_spans[0]
        .scope_spans[0]
        .spans[0]
    )
    texts = {each.key: each.value for each in sent.attributes}
    assert sent.name == "?" * MAX_TEXT_CHARS
    assert texts["a"].string_value == "?"
    assert texts["b"].array_value.values[0].string_value == "x" * MAX_TEXT_CHARS
    assert texts["error.type"].string_value == "y" * MAX_TEXT_CHARS


def test_content_is_bounded_json_with_the_last_items() -> None:
    texts = [str(number) + '\ud800"' * 9_000 for number in range(20)]
    text = render_content([{"content": text} for text in texts])
    assert len(text) <= MAX_CONTENT_CHARS
    kept = [item["content"] for item in json.loads(text)]
    assert kept == [text[:MAX_CONTENT_TEXT_CHARS] for text in texts[-len(kept) :]]
    assert kept
    spans: list[RecordedSpan] = []
    with Tracing(spans.append).span("chat", None, attributes={"gen_ai.input.messages": text, "a": text}):
        pass
    sent = ExportTraceServiceRequest.FromString(encode_finished_spans(spans, RESOURCE)).resource_spans[0]
    found = {each.key: each.value.string_value for each in sent.scope_spans[0].spans[0].attributes}
    assert (found["gen_ai.input.messages"], len(found["a"])) == (text, MAX_TEXT_CHARS)


def test_large_content_of_one_item_stays_json() -> None:
    text = render_content({str(number): "x" * MAX_CONTENT_TEXT_CHARS for number in range(20)})
    assert len(text) <= MAX_CONTENT_CHARS
    assert json.loads(text)["cut"].startswith('{"0": "xxx')


@pytest.mark.parametrize("text", ["x", '"', "\\", "\U0001f600"])
def test_last_item_of_large_content_is_cut_and_kept(text: str) -> None:
    large = {"parts": [text * MAX_CONTENT_TEXT_CHARS] * 9}
    for content in ([{"first": 1}, large], large):
        rendered = render_content(content)
        assert len(rendered) <= MAX_CONTENT_CHARS
        kept = json.loads(rendered)
        assert (kept[-1] if isinstance(kept, list) else kept)["cut"].startswith('{"parts": ["')


@pytest.mark.parametrize(
    ("sampler", "parent", "is_sampled"),
    [
        (None, None, True),
        (None, PARENT, True),
        (None, UNSAMPLED, False),
        (ALWAYS_ON, UNSAMPLED, True),
        (ALWAYS_OFF, PARENT, False),
        (ParentBased(ALWAYS_OFF), None, False),
        (ParentBased(ALWAYS_OFF), PARENT, True),
    ],
)
def test_unsampled_span_tells_its_children(sampler: Sampler | None, parent: str | None, is_sampled: bool) -> None:
    spans: list[RecordedSpan] = []
    with Tracing(spans.append, sampler, captures_content=True).span("claim", parent) as span:
        span.add({"a": 1})
    assert len(spans) == is_sampled
    assert span.captures_content is is_sampled  # nothing is rendered for a span that is not sent
    assert span.traceparent.endswith("-01" if is_sampled else "-00")
    assert parent is None or span.traceparent[:35] == parent[:35]
    assert parent is None or span.traceparent[36:52] != parent[36:52]


def test_sdk_client_without_bytes_writes_its_own_spans() -> None:
    kept = InMemorySpanExporter()
    span = recorded()
    BatchExporter(kept, RESOURCE).export([span])
    (found,) = kept.get_finished_spans()
    assert encode_spans([found]) == ExportTraceServiceRequest.FromString(encode_finished_spans([span], RESOURCE))


def test_the_client_of_the_pinned_sdk_takes_bytes() -> None:
    exporter = OTLPSpanExporter(endpoint="http://127.0.0.1:9")
    try:
        assert BatchExporter(exporter, RESOURCE).is_fast
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
