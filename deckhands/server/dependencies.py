"""Dependencies of routes: the gateway, the principal with a required scope, and a conversation visible to it.

Holds: a route declares its scope by a parameter of its function; a test reads the scopes from the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StringConstraints
from starlette.requests import HTTPConnection
from starlette.responses import Response

from broker.runtime import DeckhandsError
from deckhands.server.auth.api_keys import Scope
from deckhands.server.auth.idempotency import StoredAnswer, parse_idempotency_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.problems import Problem, status_of_error

MAX_EVENT_ID = 2**53 - 1
"""Larger than any event id, and exact in every JSON parser."""
MAX_REASON = 500
OFFERS_SECONDS = 2.0
"""How long a request waits for a tool that no worker offers yet."""


class Needs:
    """A dependency that returns the principal of a request if it has a scope."""

    def __init__(self, scope: Scope, *, all_tenants: bool = False) -> None:
        self.scope = scope
        self.all_tenants = all_tenants

    async def __call__(self, connection: HTTPConnection) -> Principal:
        """Return the principal.

        Raises:
            Refused: its key lacks the scope.
        """
        principal: Principal = connection.state.principal
        principal.require(self.scope)
        if self.all_tenants:
            principal.require_all()
        return principal


async def gateway_of(connection: HTTPConnection) -> Gateway:
    """Return the server's gateway."""
    found: Gateway = connection.app.state.gateway
    return found


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
Reader = Annotated[Principal, Depends(Needs(Scope.READ))]
Writer = Annotated[Principal, Depends(Needs(Scope.WRITE))]
Operator = Annotated[Principal, Depends(Needs(Scope.OPERATE))]
OperatorOfAll = Annotated[Principal, Depends(Needs(Scope.OPERATE, all_tenants=True))]
AdminOfAll = Annotated[Principal, Depends(Needs(Scope.ADMIN, all_tenants=True))]

ConversationId = Annotated[str, Path(description="the id of a conversation", examples=["01K9QGZ1T2V3W4X5Y6Z7A8B9C0"])]
IdempotencyKey = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[ -~]{1,256}$")] | None,
    Header(
        alias="Idempotency-Key",
        description="for a day, a repeated request with the same key gets the same answer",
    ),
]
ReasonQuery = Annotated[
    str, Query(alias="reason", min_length=1, max_length=MAX_REASON, description="the reason, for the record")
]


class Reason(JsonBody):
    """The reason for an action on a conversation, recorded in the log."""

    reason: str = Field(min_length=1, max_length=MAX_REASON, examples=["the customer has changed their mind"])


def etag_of(shown: BaseModel) -> str:
    """Return the ETag of a representation. It changes whenever the representation does."""
    return f'"{sha256(shown.model_dump_json().encode()).hexdigest()[:32]}"'


class Precondition:
    """The If-Match condition of a request that changes a resource (RFC 9110, section 13.1.1; RFC 6585, section 3)."""

    def __init__(
        self,
        gateway: GatewayOf,
        if_match: Annotated[
            str | None,
            Header(alias="If-Match", max_length=1_000, description="the ETag that the resource must have; `*` for any"),
        ] = None,
    ) -> None:
        self._asked = if_match
        self._is_needed = gateway.options.needs_match

    @property
    def is_given(self) -> bool:
        """Whether there is an ETag to compare.

        Raises:
            Problem: the server requires If-Match, and it is missing.
        """
        if self._asked is None and self._is_needed:
            raise Problem(
                428,
                "precondition_required",
                "The request needs the header If-Match.",
                remedy="Read the resource, and send its ETag.",
            )
        return self._asked is not None and self._asked.strip() != "*"

    def check(self, etag: str) -> None:
        """Check that a resource has not changed since it was read. Weak ETags never match.

        Raises:
            Problem: it has changed, or the server requires If-Match and it is missing.
        """
        if self.is_given and etag not in [each.strip() for each in (self._asked or "").split(",")]:
            raise Problem(
                412, "precondition_failed", "The resource has changed since it was read.", remedy="Read it again."
            )


IfMatch = Annotated[Precondition, Depends()]
MATCHED: dict[int | str, dict[str, Any]] = {
    412: {"description": "the ETag differs from If-Match; nothing was changed"},
    428: {"description": "the server was started with --require-if-match, and the header is missing"},
}


def scoped_key(principal: Principal, key: str | None) -> str | None:
    """Return an idempotency key scoped to the tenant; None if the request has none.

    Raises:
        UsageError: the key is malformed.
    """
    return None if key is None else sha256(f"{principal.tenant}\n{parse_idempotency_key(key)}".encode()).hexdigest()


async def fingerprint(request: Request) -> bytes:
    """Return the bytes that identify a request: method, path and body."""
    return b"\n".join((request.method.encode(), request.url.path.encode(), await request.body()))


async def run_once(
    gateway: Gateway,
    request: Request,
    own: str | None,
    act: Callable[[], Awaitable[Mapping[str, Any]]],
    *,
    status: int = 200,
) -> Response:
    """Perform a request and return its answer, or the stored answer of an earlier request under the same key.

    Args:
        own: the idempotency key, see `scoped_key`; None if the request has none.
        act: performs the request, and returns the content of the answer.

    Raises:
        KeyReused: the key belongs to another request.
    """
    if own is None:
        return JSONResponse(dict(await act()), status)
    name = own
    sent = await fingerprint(request)
    answer = await gateway.repeated.start(name, sent)
    headers = {"Idempotency-Replayed": "true"}
    if answer is None:
        headers = {}
        try:
            content = JSONResponse(dict(await act()), status)
        except DeckhandsError as error:
            if status_of_error(error) < 500:
                await gateway.repeated.forget(name)
            raise
        answer = StoredAnswer(status, bytes(content.body).decode())
        await gateway.repeated.store_answer(name, sent, answer)
    return Response(answer.body, answer.status, headers, "application/json")
