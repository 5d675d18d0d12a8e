"""Anthropic's Message Batches.

A batch has no client-chosen name, but each of its calls has one, and the results repeat these names. If the sender of a
batch died, the batch is recognized by its time and size, and by its results once it has ended.

Holds: at most 100,000 calls and 256 MB per batch (the provider's limits; ours are lower).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

from controller_worker.providers.batching import (
    CANCELLED,
    CLOCKS_DIFFER_MS,
    EXPIRED,
    PAGE_SIZE,
    PAGES_LIMIT,
    NotYetKnown,
    Outgoing,
    Send,
    Sought,
    custom_id,
    failed,
    json_lines,
    number_of,
    object_of,
    replied,
    text_of,
)
from controller_worker.providers.errors import ModelError
from controller_worker.providers.wires.provider_errors import StreamedError, model_error

PATH = "/v1/messages/batches"

_JSON = {"Content-Type": "application/json"}


class AnthropicBatches:
    """See `BatchProvider`."""

    def __init__(self, send: Send, close: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._close = close

    async def upload(self, _: Outgoing) -> str:
        """See `BatchProvider.upload`."""
        return ""

    async def submit(self, outgoing: Outgoing, _: str) -> str:
        """See `BatchProvider.submit`."""
        items = (
            b'{"custom_id":"%b","params":%b}' % (custom_id(outgoing.tag, number).encode(), body)
            for number, body in outgoing.bodies.items()
        )
        answer = await self._ask("POST", PATH, b'{"requests":[%b]}' % b",".join(items))
        return text_of(answer, "id")

    async def revoke(self, _: str) -> None:
        """See `BatchProvider.revoke`."""

    async def find(self, sought: Sought) -> str | None:
        """See `BatchProvider.find`."""
        is_sure = True
        for batch in await self._since(sought.sent_ms - CLOCKS_DIFFER_MS):
            provider_id = text_of(batch, "id")
            if provider_id in sought.known or sum(batch.get("request_counts", {}).values()) != sought.count:
                continue
            if batch.get("processing_status") != "ended":
                is_sure = False
            elif any(
                str(line.get("custom_id")).startswith(f"{sought.tag}-") for line in await self._lines(provider_id)
            ):
                return provider_id
        if not is_sure:
            raise NotYetKnown
        return None

    async def results(self, provider_id: str) -> dict[str, bytes] | None:
        """See `BatchProvider.results`."""
        batch = await self._ask("GET", f"{PATH}/{provider_id}")
        if batch.get("processing_status") != "ended":
            return None
        lines = await self._lines(provider_id)
        return {number_of(line): _result(line.get("result") or {}) for line in lines}

    async def aclose(self) -> None:
        """See `BatchProvider.aclose`."""
        await self._close()

    async def _since(self, created_ms: int) -> list[dict[str, Any]]:
        """Return the batches created at or after a time, newest first."""
        found: list[dict[str, Any]] = []
        after = ""
        for _ in range(PAGES_LIMIT):
            page = await self._ask("GET", f"{PATH}?limit={PAGE_SIZE}{after}")
            batches = page.get("data") or []
            recent = [batch for batch in batches if _created_ms(batch) >= created_ms]
            found += recent
            if len(recent) < len(batches) or not page.get("has_more"):
                break
            after = f"&after_id={page.get('last_id')}"
        return found

    async def _lines(self, provider_id: str) -> list[Any]:
        return json_lines(await self._send("GET", f"{PATH}/{provider_id}/results", b"", {}))

    async def _ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        return object_of(await self._send(method, path, body, _JSON if body else {}))


def _created_ms(batch: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(batch.get("created_at"))).timestamp() * 1000
    except ValueError:
        return float("inf")


def _result(result: Mapping[str, Any]) -> bytes:
    match result.get("type"):
        case "succeeded":
            return replied(result.get("message"))
        case "expired":
            return EXPIRED
        case "canceled":
            return CANCELLED
    error = result.get("error")
    told: ModelError = model_error(StreamedError(error if isinstance(error, dict) else {}))
    return failed(told)
