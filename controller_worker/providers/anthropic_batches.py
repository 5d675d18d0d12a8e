"""Anthropic's Message Batches.

Anthropic assigns no client-chosen name to a batch, but its calls have one each, which the results repeat. If the sender
of a batch died, the batch is found again by its time and size and, once it has ended, by the names in its results.

Holds: at most 100,000 calls and 256 MB per batch (the provider's limits; ours are lower).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

from controller_worker.providers.batching import (
    CANCELLED,
    CLOCK_SKEW_MS,
    EXPIRED,
    PAGE_SIZE,
    PAGES_LIMIT,
    BatchSearch,
    BatchUnconfirmed,
    OutgoingBatch,
    Send,
    get_text,
    make_custom_id,
    parse_json_lines,
    parse_number,
    parse_object,
    to_stored_failure,
    to_stored_reply,
)
from controller_worker.providers.errors import ModelError
from controller_worker.providers.wires.provider_errors import StreamedError, to_model_error

PATH = "/v1/messages/batches"

_JSON = {"Content-Type": "application/json"}


class AnthropicBatches:
    """See `BatchProvider`."""

    def __init__(self, send: Send, close: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._close = close

    async def upload(self, _: OutgoingBatch) -> str:
        """See `BatchProvider.upload`."""
        return ""

    async def submit(self, outgoing: OutgoingBatch, _: str) -> str:
        """See `BatchProvider.submit`."""
        items = (
            b'{"custom_id":"%b","params":%b}' % (make_custom_id(outgoing.tag, number).encode(), body)
            for number, body in outgoing.bodies.items()
        )
        answer = await self._ask("POST", PATH, b'{"requests":[%b]}' % b",".join(items))
        return get_text(answer, "id")

    async def revoke(self, _: str) -> None:
        """See `BatchProvider.revoke`."""

    async def find(self, sought: BatchSearch) -> str | None:
        """See `BatchProvider.find`."""
        is_sure = True
        for batch in await self._list_since(sought.sent_ms - CLOCK_SKEW_MS):
            provider_id = get_text(batch, "id")
            if provider_id in sought.known or sum(batch.get("request_counts", {}).values()) != sought.count:
                continue
            if batch.get("processing_status") != "ended":
                is_sure = False
            elif any(
                str(line.get("custom_id")).startswith(f"{sought.tag}-")
                for line in await self._load_results(provider_id)
            ):
                return provider_id
        if not is_sure:
            raise BatchUnconfirmed
        return None

    async def results(self, provider_id: str) -> dict[str, bytes] | None:
        """See `BatchProvider.results`."""
        batch = await self._ask("GET", f"{PATH}/{provider_id}")
        if batch.get("processing_status") != "ended":
            return None
        lines = await self._load_results(provider_id)
        return {parse_number(line): _to_stored_result(line.get("result") or {}) for line in lines}

    async def aclose(self) -> None:
        """See `BatchProvider.aclose`."""
        await self._close()

    async def _list_since(self, created_ms: int) -> list[dict[str, Any]]:
        """Return the batches created at or after a time, newest first."""
        found: list[dict[str, Any]] = []
        after = ""
        for _ in range(PAGES_LIMIT):
            page = await self._ask("GET", f"{PATH}?limit={PAGE_SIZE}{after}")
            batches = page.get("data") or []
            recent = [batch for batch in batches if _parse_created_ms(batch) >= created_ms]
            found += recent
            if len(recent) < len(batches) or not page.get("has_more"):
                break
            after = f"&after_id={page.get('last_id')}"
        return found

    async def _load_results(self, provider_id: str) -> list[Any]:
        return parse_json_lines(await self._send("GET", f"{PATH}/{provider_id}/results", b"", {}))

    async def _ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        return parse_object(await self._send(method, path, body, _JSON if body else {}))


def _parse_created_ms(batch: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(batch.get("created_at"))).timestamp() * 1000
    except ValueError:
        return float("inf")


def _to_stored_result(result: Mapping[str, Any]) -> bytes:
    match result.get("type"):
        case "succeeded":
            return to_stored_reply(result.get("message"))
        case "expired":
            return EXPIRED
        case "canceled":
            return CANCELLED
    error = result.get("error")
    reported: ModelError = to_model_error(StreamedError(error if isinstance(error, dict) else {}))
    return to_stored_failure(reported)
