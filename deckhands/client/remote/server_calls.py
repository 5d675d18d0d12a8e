"""Requests to a server: retried while it does not answer, with its problem details converted to our errors.

Holds: every request that changes something has an idempotency key, so a repeated one takes effect once. The API key is
sent to no other address.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2

from broker.coordination import TransferFailed
from broker.runtime import (
    ConversationBusy,
    CorruptEntry,
    DeckhandsError,
    EventsLost,
    StoreUnavailable,
    UnknownConversation,
    UsageError,
    draw_jitter,
    new_key,
)
from deckhands.client.errors import IsArchived
from deckhands.client.transfers.commands import CommandFailed

PATIENCE_SECONDS = 30.0
PAUSE_SECONDS = 0.5
READ_SECONDS = 60.0
"""A stream sends a sign of life at least every 15 s."""
TRANSFER_CODES = frozenset(
    {"transfer_failed", "no_such_file", "file_unfit", "workspace_lost", "source_unusable", "workspace_too_large"}
)
REPEATED = frozenset({429, 503})
OF_PROXIES = frozenset({502, 504})
"""A proxy's answers while there is no server behind it; from a server itself, they are final."""


class ServerUnavailable(StoreUnavailable):
    """The server does not answer."""

    code = "server_unavailable"


class ServerUntrusted(DeckhandsError):
    """The server's certificate has an untrusted authority or another name."""

    code = "server_untrusted"


class ServerRefused(DeckhandsError):
    """The server refused the request; the error has the server's code."""

    code = "refused"

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem.get("detail", "The server refuses.")), remedy=str(problem.get("remedy", "")))
        self.code = str(problem.get("code", self.code))
        self.retryable = bool(problem.get("retryable", False))


class ServerCalls:
    """The requests of one program to one server.

    Args:
        url: the address of the server.
        api_key: an API key of the server; empty for none.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=httpx2.Timeout(READ_SECONDS), follow_redirects=False
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        key: str | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> httpx2.Response:
        """Return the answer to a request.

        Args:
            key: the idempotency key of a request that changes something; None for a new one.
            read_seconds: the time limit for the answer.

        Raises:
            ServerUnavailable: the server does not answer for 30 s.
            ServerUntrusted: its certificate is not trusted.
            DeckhandsError: the error in its answer, see `to_error`.
        """
        is_named = key is not None or method not in ("GET", "PUT")
        headers = {"Idempotency-Key": key or new_key()} if is_named else {}
        timeout = httpx2.Timeout(READ_SECONDS, read=read_seconds)
        end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        failed: DeckhandsError
        while True:
            try:
                answer = await self._http.request(
                    method, path, json=body, content=content, params=query, headers=headers, timeout=timeout
                )
            except httpx2.TransportError as error:
                failed = self._unavailable(error)
                if not failed.retryable:
                    raise failed from error
            else:
                if answer.is_success:
                    return answer
                failed = to_error(answer, path)
                is_of_proxy = answer.status_code in OF_PROXIES and isinstance(failed, ServerUnavailable)
                if answer.status_code not in REPEATED and not is_of_proxy:
                    raise failed
            if asyncio.get_running_loop().time() >= end:
                raise failed
            await asyncio.sleep(PAUSE_SECONDS * draw_jitter())

    async def stream(self, path: str, query: Mapping[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Yield the kind and the content of each message of a stream, until it ends or the connection is lost.

        Raises:
            ServerUnavailable: the connection was lost.
            ServerUntrusted: its certificate is not trusted.
            DeckhandsError: the error in its answer, see `to_error`.
        """
        try:
            async with self._http.stream("GET", path, params=query) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise to_error(answer, path)
                name = "event"
                async for line in answer.aiter_lines():
                    if line.startswith("event: "):
                        name = line[7:]
                    elif line.startswith("data: "):
                        yield name, json.loads(line[6:])
                        name = "event"
        except (httpx2.TransportError, httpx2.StreamError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> ServerUnavailable | ServerUntrusted:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            return ServerUntrusted(
                f"The certificate of the server at {self._url} is not trusted: {cause.verify_message}.",
                remedy="Set SSL_CERT_FILE to a file with the certificate of its authority.",
            )
        return ServerUnavailable(
            f"The server at {self._url} does not answer: {error or type(error).__name__}.",
            remedy="Start it, or correct the address.",
        )


def to_error(answer: httpx2.Response, path: str) -> DeckhandsError:
    """Return the error for an error response."""
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "code" not in problem:
        return ServerUnavailable(f"The answer has the status {answer.status_code} and is no problem of Deckhands.")
    parts = path.strip("/").split("/")
    return problem_as_error(problem, parts[1] if len(parts) > 1 else "")


def problem_as_error(problem: Mapping[str, Any], conversation_id: str) -> DeckhandsError:
    """Return the error for problem details."""
    code, status = str(problem["code"]), int(problem.get("status", 500))
    named = {"unknown_conversation": UnknownConversation, "archived": IsArchived, "busy": ConversationBusy}
    if code in named:
        return named[code](conversation_id)
    if code == EventsLost.code:
        return EventsLost(conversation_id, 0, 0)
    kinds: dict[bool, type[DeckhandsError]] = {
        status in (400, 409, 413, 415, 422): UsageError,
        status == 503: ServerUnavailable,
        code == CommandFailed.code: CommandFailed,
        code == CorruptEntry.code: CorruptEntry,
        code in TRANSFER_CODES: TransferFailed,
    }
    kind = kinds.get(True)
    if kind is None:
        return ServerRefused(problem)
    error = kind(str(problem.get("detail", "")), remedy=str(problem.get("remedy", "")))
    error.code = code
    return error
