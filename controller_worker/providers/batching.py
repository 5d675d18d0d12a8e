"""Calls through a provider's batch API: hours instead of seconds, at half the price.

A batched call passes its backend twice. The first time, the request's `carry` takes the body and raises `CallBatched`.
After the provider has answered, `carry` returns the answer and the backend reads it like any other.

Holds: the result of a call is the provider's reply or one of our errors, as text that the store can keep.
Does not: use a store; see `broker.limits.batches` for the queue and `batch_keeper` for sending and fetching.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from broker.contract import LLMSpec
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import (
    MODEL_ERRORS,
    BadRequestError,
    InternalServerError,
    MalformedReplyError,
    ModelError,
    ServiceUnavailableError,
)

PAGE_SIZE = 100
PAGES_LIMIT = 50
CLOCK_SKEW_MS = 60_000
"""The maximum difference between the provider's clock and ours."""

Send = Callable[[str, str, bytes, Mapping[str, str]], Awaitable[bytes]]
"""One request at the provider: method, path, body and headers; returns the body of the answer or raises ModelError."""


class CallBatched(Exception):
    """The call waits for a batch. This is not an error."""


class BatchUnconfirmed(Exception):
    """The provider cannot tell yet whether it has a batch."""


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """A batch to send: our name for it, and the body of each call by its number."""

    tag: str
    bodies: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """A batch that may have been sent.

    Attributes:
        count: the number of its calls.
        sent_ms: the earliest time at which it was sent.
        known: the provider's ids of other batches.
    """

    tag: str
    count: int
    sent_ms: int
    known: frozenset[str]


class BatchProvider(Protocol):
    """A provider's batch API. All methods raise `ModelError`."""

    async def upload(self, outgoing: OutgoingBatch, /) -> str:
        """Upload the batch to the provider; this costs nothing yet.

        Returns:
            The provider's id of the upload; empty if the provider has no separate upload.
        """
        ...

    async def submit(self, outgoing: OutgoingBatch, uploaded: str, /) -> str:
        """Submit the calls, which incurs their cost. Return the provider's id of the batch."""
        ...

    async def revoke(self, uploaded: str, /) -> None:
        """Delete an upload, so that a delayed worker can no longer submit it."""
        ...

    async def find(self, sought: BatchSearch, /) -> str | None:
        """Return the provider's id of a batch that was sent, or None if there is none.

        Raises:
            NotYetKnown: a batch matches, but only its results can confirm it.
        """
        ...

    async def results(self, provider_id: str) -> dict[str, bytes] | None:
        """Return the result of each call, by number, or None while the batch is in progress."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


def make_lane(spec: LLMSpec, config: LLMConfig) -> str:
    """Return the name that the calls of one batch share: address, key and model.

    The profile's name stands for the key. A replaced key therefore strands no calls, and no key is in the store.
    """
    named = [spec.model, config.backend, config.base_url, config.model]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:24]


def make_custom_id(tag: str, number: str) -> str:
    """Return the provider-side name of a batch's call: at most 64 letters, digits and hyphens."""
    return f"{tag}-{number}"


def parse_number(line: Mapping[str, Any]) -> str:
    """Return the call's number from the `make_custom_id` of a result."""
    return str(line.get("custom_id")).rpartition("-")[2]


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse an answer.

    Raises:
        MalformedReplyError: it is not a JSON object.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedReplyError(f"The answer about a batch is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise MalformedReplyError("The answer about a batch is not a JSON object.")
    return found


def get_text(answer: Mapping[str, Any], name: str) -> str:
    """Return a text field of an answer.

    Raises:
        MalformedReplyError: the field is missing or not a text.
    """
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise MalformedReplyError(f"The answer about a batch has no {name}.")
    return value


def parse_json_lines(content: bytes) -> list[Any]:
    """Parse JSON lines.

    Raises:
        MalformedReplyError: a line is not an object.
    """
    try:
        found = [json.loads(line) for line in content.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise MalformedReplyError(f"The results of a batch are not JSON lines: {error}.") from error
    if not all(isinstance(line, dict) for line in found):
        raise MalformedReplyError("The results of a batch are not JSON objects.")
    return found


def to_stored_reply(reply: Any) -> bytes:
    """Return the stored form of a call's answer."""
    return json.dumps({"reply": reply}).encode()


def to_stored_failure(error: ModelError) -> bytes:
    """Return the stored form of a call's failure."""
    return json.dumps({"code": error.code, "message": error.message, "text": error.provider_text}).encode()


EXPIRED = to_stored_failure(ServiceUnavailableError("The batch expired before the provider came to this call."))
CANCELLED = to_stored_failure(BadRequestError("The batch was cancelled at the provider."))


def load_reply(result: bytes) -> Any:
    """Return the answer that `replied` stored.

    Raises:
        ModelError: the failure that `failed` stored.
    """
    found = json.loads(result)
    if "reply" in found:
        return found["reply"]
    raise MODEL_ERRORS.get(found["code"], InternalServerError)(found["message"], provider_text=found["text"])
