"""Errors as problem details (RFC 9457): the codes of our errors, and the HTTP status of each.

Holds: every error answer is such an object; details of internal failures appear only in the server's log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from broker.coordination import NoWorkspace, TransferFailed
from broker.runtime import (
    AdmissionRefused,
    ConversationBusy,
    ConversationMoved,
    DataLocked,
    DeckhandsError,
    EventsLost,
    EventUnfit,
    OutcomeUnknown,
    StoreUnavailable,
    UnknownConversation,
    UsageError,
)
from broker.secrets import SecretsLocked
from deckhands.client import CommandFailed, IsArchived, IsBeingDeleted, NotStopped
from deckhands.operations import UnknownWebhook
from deckhands.server.auth.api_keys import AccessDenied, TooManyRequests
from deckhands.server.auth.idempotency import KeyReused
from deckhands.server.auth.uploads import TooManyUploads

MEDIA_TYPE = "application/problem+json"
TYPE = "urn:deckhands:problem:"
MAX_ERRORS = 10
RETRY_SECONDS = 2
STATUS: tuple[tuple[type[DeckhandsError], int], ...] = (
    (TooManyRequests, 429),
    (TooManyUploads, 429),
    (AdmissionRefused, 429),
    (KeyReused, 422),
    (IsArchived, 409),
    (UnknownConversation, 404),
    (UnknownWebhook, 404),
    (ConversationBusy, 409),
    (ConversationMoved, 412),
    (IsBeingDeleted, 409),
    (EventUnfit, 413),
    (NoWorkspace, 409),
    (UsageError, 422),
    (EventsLost, 409),
    (NotStopped, 503),
    (StoreUnavailable, 503),
    (OutcomeUnknown, 503),
    (SecretsLocked, 503),
    (DataLocked, 503),
    (TransferFailed, 502),
    (CommandFailed, 502),
)
"""By class, first match; all others are 500."""
TRANSFER_STATUS = {
    "no_such_file": 404,
    "file_unfit": 422,
    "workspace_lost": 409,
    "source_unusable": 409,
    "workspace_too_large": 413,
}
"""Of a tool worker's transfer errors, by code; all others are 502."""
REFUSED = {"forbidden": 403, "forbidden_origin": 403, "other_tenant": 403}
OPENAI_PATHS = "/v1/"
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
STATUS_CODES = {404: "not_found", 405: "method_not_allowed", 406: "not_acceptable"}

_log = logging.getLogger(__name__)


class Problem(DeckhandsError):
    """An error of HTTP itself.

    Attributes:
        status: of the answer.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        remedy: str = "",
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        self.errors = [dict(error) for error in errors]


def status_of_error(error: DeckhandsError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Problem):
        return error.status
    if isinstance(error, AccessDenied):
        return REFUSED.get(error.code, 401)
    if isinstance(error, TransferFailed) and error.code in TRANSFER_STATUS:
        return TRANSFER_STATUS[error.code]
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def to_problem(error: DeckhandsError) -> dict[str, Any]:
    """Convert an error to problem details."""
    details = {
        "type": f"{TYPE}{error.code}",
        "title": error.code.replace("_", " ").capitalize(),
        "status": status_of_error(error),
        "detail": error.message,
        "code": error.code,
        "retryable": error.retryable,
        "remedy": error.remedy,
    }
    if isinstance(error, Problem) and error.errors:
        details["errors"] = error.errors
    return details


def to_openai_error(details: Mapping[str, Any]) -> dict[str, Any]:
    """Convert problem details to the error format of OpenAI's API."""
    kind = OPENAI_TYPES.get(details["status"], "server_error" if details["status"] >= 500 else "invalid_request_error")
    message = f"{details['detail']} {details['remedy']}".strip()
    return {"error": {"message": message, "type": kind, "param": None, "code": details["code"]}}


def error_response(error: DeckhandsError, path: str = "") -> Response:
    """Return the answer to a failed request.

    Args:
        path: the path of the request; below `/v1/`, the answer has the form of OpenAI's errors.
    """
    details = to_problem(error)
    headers: dict[str, str] = dict(error.headers) if isinstance(error, Problem) else {}
    if details["status"] == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, AdmissionRefused | TooManyRequests):
        headers["Retry-After"] = str(max(1, round(error.retry_after_seconds)))
    elif error.retryable:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if path.startswith(OPENAI_PATHS):
        # OpenAI's clients retry by the status alone. A request that may have created a conversation must not be
        # retried.
        is_safe = error.retryable and not isinstance(error, OutcomeUnknown)
        headers["X-Should-Retry"] = "true" if is_safe else "false"
        return Response(json.dumps(to_openai_error(details)), details["status"], headers, "application/json")
    return Response(json.dumps(details), details["status"], headers, MEDIA_TYPE)


def add_problems(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Make an application answer every failure with problem details.

    Args:
        routes: all its routes, to find the methods of a path.
    """

    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, DeckhandsError)
        if status_of_error(error) == 500:
            _log.error("a request failed: %s", error)
        return error_response(error, request.url.path)

    async def unfit(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_problem(error), request.url.path)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = STATUS_CODES.get(error.status_code, "http_error")
        headers = {"Allow": _methods_of_path(routes, request)} if error.status_code == 405 else error.headers
        problem = Problem(error.status_code, code, f"{error.detail}.", headers=headers)
        return error_response(problem, request.url.path)

    async def unexpected(request: Request, error: Exception) -> Response:
        _log.error("a request failed unexpectedly", exc_info=error)
        problem = Problem(500, "internal_error", "The server failed.", remedy="Its log says why.")
        return error_response(problem, request.url.path)

    app.add_exception_handler(DeckhandsError, expected)
    app.add_exception_handler(RequestValidationError, unfit)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unexpected)


def _methods_of_path(routes: Sequence[BaseRoute], request: Request) -> str:
    """Return the methods of a path, over all its routes."""
    found = [route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in found for method in route.methods or ()}))


def _validation_problem(error: RequestValidationError) -> Problem:
    """Return the faults of each part of a request, without the values, which may be secret."""
    errors = [
        {
            "in": ".".join(map(str, each["loc"])),
            "code": each["type"],
            "detail": str(each["msg"]).removeprefix("Value error, ")[:500],
        }
        for each in error.errors()[:MAX_ERRORS]
    ]
    what = "; ".join(f"{each['in']}: {each['detail']}" for each in errors[:3])
    return Problem(422, "invalid_request", f"The request cannot be used: {what}.", errors=errors)
