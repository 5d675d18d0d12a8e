"""OpenAI's Batch API for Chat Completions: a file of calls, a batch created from it, and result files.

Holds: at most 50,000 calls and 200 MB per batch (the provider's limits; ours are lower). A batch has a name of ours, by
which it is found again. A deleted file cannot become a batch.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from controller_worker.providers.batching import (
    CANCELLED,
    CLOCK_SKEW_MS,
    EXPIRED,
    PAGE_SIZE,
    PAGES_LIMIT,
    BatchSearch,
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
from controller_worker.providers.errors import BadRequestError, NotFoundError
from controller_worker.providers.wires.provider_errors import BatchedError, to_model_error

ENDPOINT = "/v1/chat/completions"
TAG = "deckhands"
"""The field of a batch's metadata with our name for it."""
WINDOW = "24h"

_UNDER_WAY = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_JSON = {"Content-Type": "application/json"}
_BODY = b'{"custom_id":"%b","method":"POST","url":"' + ENDPOINT.encode() + b'","body":%b}\n'


class OpenAIBatches:
    """See `BatchProvider`."""

    def __init__(
        self, send: Send, upload: Callable[[str, bytes], Awaitable[bytes]], close: Callable[[], Awaitable[None]]
    ) -> None:
        self._send = send
        self._upload = upload
        self._close = close

    async def upload(self, outgoing: OutgoingBatch) -> str:
        """See `BatchProvider.upload`."""
        tag = outgoing.tag
        lines = (_BODY % (make_custom_id(tag, number).encode(), body) for number, body in outgoing.bodies.items())
        return get_text(parse_object(await self._upload(f"{tag}.jsonl", b"".join(lines))), "id")

    async def submit(self, outgoing: OutgoingBatch, uploaded: str) -> str:
        """See `BatchProvider.submit`."""
        wanted: dict[str, Any] = {"input_file_id": uploaded, "endpoint": ENDPOINT, "completion_window": WINDOW}
        wanted["metadata"] = {TAG: outgoing.tag}
        return get_text(parse_object(await self._send("POST", "/batches", json.dumps(wanted).encode(), _JSON)), "id")

    async def revoke(self, uploaded: str) -> None:
        """See `BatchProvider.revoke`."""
        try:
            await self._send("DELETE", f"/files/{uploaded}", b"", {})
        except NotFoundError:
            return  # an earlier sender deleted it

    async def find(self, sought: BatchSearch) -> str | None:
        """See `BatchProvider.find`."""
        after = ""
        for _ in range(PAGES_LIMIT):
            page = parse_object(await self._send("GET", f"/batches?limit={PAGE_SIZE}{after}", b"", {}))
            batches = page.get("data") or []
            for batch in batches:
                if (batch.get("metadata") or {}).get(TAG) == sought.tag:
                    return get_text(batch, "id")
            is_last = not batches or not page.get("has_more")
            if is_last or batches[-1]["created_at"] * 1000 < sought.sent_ms - CLOCK_SKEW_MS:
                return None
            after = f"&after={batches[-1]['id']}"
        return None

    async def results(self, provider_id: str) -> dict[str, bytes] | None:
        """See `BatchProvider.results`."""
        batch = parse_object(await self._send("GET", f"/batches/{provider_id}", b"", {}))
        if batch.get("status") in _UNDER_WAY:
            return None
        if batch.get("status") == "failed":
            reported: Mapping[str, Any] = next(iter((batch.get("errors") or {}).get("data") or ()), {})
            raise BadRequestError("The provider refuses the batch.", provider_text=str(reported.get("message") or ""))
        results: dict[str, bytes] = {}
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                lines = parse_json_lines(await self._send("GET", f"/files/{batch[name]}/content", b"", {}))
                results |= {parse_number(line): _to_stored_result(line) for line in lines}
        return results

    async def aclose(self) -> None:
        """See `BatchProvider.aclose`."""
        await self._close()


def _to_stored_result(line: Mapping[str, Any]) -> bytes:
    error = line.get("error")
    response = line.get("response")
    if isinstance(error, dict) and error.get("code") == "batch_expired":
        return EXPIRED
    if isinstance(error, dict) and error.get("code") in ("batch_cancelled", "batch_canceled"):
        return CANCELLED
    if not isinstance(response, dict):
        return to_stored_failure(to_model_error(BatchedError(error if isinstance(error, dict) else {}, 500)))
    status = response.get("status_code")
    body = response.get("body")
    if status == 200:
        return to_stored_reply(body)
    return to_stored_failure(to_model_error(BatchedError(body if isinstance(body, dict) else {}, status or 500)))
