"""The providers' batch APIs: Anthropic's Message Batches, and OpenAI's files and batches.

A batch ends `seconds` after it was made. The items meet the plan's faults as calls do: error replies, `expired`,
`canceled` and `missing`. Making a batch meets those for the turn -1: error replies, and `reset`, which makes the batch
and then closes the connection. `GET /batches` shows every batch that was made, with its items.
"""

import email.parser
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from controller_worker.providers.scripted import Script
from tests.model_server import chat_format, messages_format
from tests.model_server.faults import STATUS_FAULTS, Fault, FaultPlan

MAKING = -1


@dataclass
class ProviderBatch:
    """A batch that was made. `results` are kept from its end on."""

    provider_id: str
    kind: str
    items: list[dict[str, Any]]
    metadata: dict[str, str]
    created: float
    ends: float
    input_file: str = ""
    results: list[dict[str, Any]] | None = None

    def has_ended(self) -> bool:
        return time.time() >= self.ends


@dataclass
class BatchShelf:
    """State and handlers of both APIs."""

    script: Script
    plan: Callable[[], FaultPlan]
    seconds: float
    batches: dict[str, ProviderBatch] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def routes(self) -> list[web.RouteDef]:
        messages = "/v1/messages/batches"
        return [
            web.post(messages, self._make_messages),
            web.get(messages, self._list_messages),
            web.get(messages + "/{id}", self._show_messages),
            web.get(messages + "/{id}/results", self._messages_results),
            web.post("/v1/files", self._upload),
            web.get("/v1/files/{id}/content", self._download),
            web.delete("/v1/files/{id}", self._remove),
            web.post("/v1/batches", self._make_chat),
            web.get("/v1/batches", self._list_chat),
            web.get("/v1/batches/{id}", self._show_chat),
            web.get("/batches", self._show_all),
        ]

    async def _make_messages(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        for item in body["requests"]:
            assert len(item["custom_id"]) <= 64
            complaint = messages_format.complaint(item["params"], {})
            if complaint is not None or "stream" in item["params"]:
                return refuse(messages_format, "bad_request", complaint)
        items = [{"custom_id": item["custom_id"], "body": item["params"]} for item in body["requests"]]
        return self._made(request, "messages", items)

    async def _upload(self, request: web.Request) -> web.Response:
        head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
        parts = {
            part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
            for part in email.parser.BytesParser().parsebytes(head + await request.read()).walk()
            if not part.is_multipart()
        }
        assert parts["purpose"] == b"batch"
        name = f"file-{len(self.files)}"
        self.files[name] = parts["file"]  # type: ignore[assignment]
        return web.json_response({"id": name, "object": "file", "purpose": "batch"})

    async def _make_chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        assert (body["endpoint"], body["completion_window"]) == (chat_format.PATH, "24h")
        if body["input_file_id"] not in self.files:
            return refuse(chat_format, "unknown_model", "No such File object")
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines() if line.strip()]
        assert all((line["method"], line["url"]) == ("POST", chat_format.PATH) for line in lines)
        assert len({line["body"]["model"] for line in lines}) == 1
        items = [{"custom_id": line["custom_id"], "body": line["body"]} for line in lines]
        return self._made(request, "chat", items, metadata=body["metadata"], input_file=body["input_file_id"])

    def _made(self, request: web.Request, kind: str, items: list[dict[str, Any]], **further: Any) -> web.StreamResponse:
        fault = self.plan().next(MAKING)
        if fault is not None and fault.kind in STATUS_FAULTS:
            wire = messages_format if kind == "messages" else chat_format
            return refuse(wire, fault.kind, fault.text, fault.retry_after)
        now = time.time()
        metadata = further.pop("metadata", {})
        batch = ProviderBatch(f"batch_{len(self.batches)}", kind, items, metadata, now, now + self.seconds, **further)
        self.batches[batch.provider_id] = batch
        if fault is not None and fault.kind == "reset":
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(self._as_messages(batch) if kind == "messages" else self._as_chat(batch))

    async def _list_messages(self, _: web.Request) -> web.Response:
        return self._listed("messages", self._as_messages)

    async def _list_chat(self, _: web.Request) -> web.Response:
        return self._listed("chat", self._as_chat)

    def _listed(self, kind: str, shown: Callable[[ProviderBatch], dict[str, Any]]) -> web.Response:
        data = [shown(batch) for batch in reversed(self.batches.values()) if batch.kind == kind]
        last = data[-1]["id"] if data else None
        return web.json_response({"data": data, "has_more": False, "last_id": last})

    async def _show_messages(self, request: web.Request) -> web.Response:
        return web.json_response(self._as_messages(self.batches[request.match_info["id"]]))

    async def _show_chat(self, request: web.Request) -> web.Response:
        return web.json_response(self._as_chat(self.batches[request.match_info["id"]]))

    async def _messages_results(self, request: web.Request) -> web.Response:
        lines = [
            {"custom_id": result["custom_id"], "result": _messages_result(result)}
            for result in self._results(self.batches[request.match_info["id"]])
        ]
        return web.Response(body=_lines(lines), content_type="application/x-jsonl")

    async def _download(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["id"]], content_type="application/jsonl")

    async def _remove(self, request: web.Request) -> web.Response:
        if self.files.pop(request.match_info["id"], None) is None:
            return refuse(chat_format, "unknown_model", "No such File object")
        return web.json_response({"deleted": True})

    async def _show_all(self, _: web.Request) -> web.Response:
        return web.json_response(
            [{"id": b.provider_id, "items": b.items, "metadata": b.metadata} for b in self.batches.values()]
        )

    def _as_messages(self, batch: ProviderBatch) -> dict[str, Any]:
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        counts["succeeded" if batch.has_ended() else "processing"] = len(batch.items)
        return {
            "id": batch.provider_id,
            "type": "message_batch",
            "processing_status": "ended" if batch.has_ended() else "in_progress",
            "request_counts": counts,
            "created_at": datetime.fromtimestamp(batch.created, UTC).isoformat(),
        }

    def _as_chat(self, batch: ProviderBatch) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": batch.provider_id, "object": "batch", "metadata": batch.metadata}
        shown |= {"created_at": int(batch.created), "status": "in_progress", "input_file_id": batch.input_file}
        if batch.has_ended():
            shown["status"] = "completed"
            lines = [_chat_result(result) for result in self._results(batch)]
            for name, is_good in (("output_file_id", True), ("error_file_id", False)):
                chosen = [line for line in lines if (line["error"] is None) is is_good]
                if chosen:
                    shown[name] = f"{batch.provider_id}-{name}"
                    self.files[shown[name]] = _lines(chosen)
        return shown

    def _results(self, batch: ProviderBatch) -> list[dict[str, Any]]:
        """Return the result of each item, in another order; made once."""
        if batch.results is None:
            wire = messages_format if batch.kind == "messages" else chat_format
            batch.results = []
            for item in reversed(batch.items):
                body = item["body"]
                number = wire.replies_so_far(body)
                fault: Fault | None = self.plan().next(number)
                kind = fault.kind if fault is not None else "none"
                result = {"custom_id": item["custom_id"], "kind": kind, "body": None, "status": 200}
                if kind in STATUS_FAULTS:
                    result["status"], error = wire.error(kind, fault.text if fault else None)
                    result["body"] = json.loads(error)
                elif kind not in ("expired", "canceled"):
                    result["body"] = json.loads(wire.reply(self.script.get_turn(number), number, body["model"]))
                if kind != "missing":
                    batch.results.append(result)
        return batch.results


def _messages_result(result: dict[str, Any]) -> dict[str, Any]:
    if result["kind"] in ("expired", "canceled"):
        return {"type": result["kind"]}
    if result["status"] != 200:
        return {"type": "errored", "error": result["body"]}
    return {"type": "succeeded", "message": result["body"]}


def _chat_result(result: dict[str, Any]) -> dict[str, Any]:
    line = {"id": f"r-{result['custom_id']}", "custom_id": result["custom_id"], "response": None, "error": None}
    if result["kind"] in ("expired", "canceled"):
        code = {"expired": "batch_expired", "canceled": "batch_cancelled"}[result["kind"]]
        return line | {"error": {"code": code, "message": "This request was not executed."}}
    response = {"status_code": result["status"], "request_id": "req", "body": result["body"]}
    is_good = result["status"] == 200
    return line | {"response": response, "error": None if is_good else {"code": "failed", "message": "It failed."}}


def _lines(values: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def refuse(wire: Any, kind: str, text: str | None = None, retry_after: str | None = None) -> web.Response:
    """Return an error reply in the provider's own form."""
    status, body = wire.error(kind, text)
    headers = {"Retry-After": retry_after} if retry_after is not None else None
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
