"""How the server misbehaves, by plan.

A plan is a list of faults. Each request takes the first fault that fits its turn and has not been used up; a request
that none fits is answered properly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from controller_worker.providers.scripted import Script, ScriptedCall, ScriptedTurn, ScriptedUsage

STATUS_FAULTS = {
    *("rate_limit", "server_error", "bad_gateway", "unavailable", "gateway_timeout", "overloaded", "unauthorized"),
    *("forbidden", "unknown_model", "too_large", "no_credits", "context_overflow", "content_policy", "bad_request"),
}
"""Error replies in the provider's own form."""

Kind = Literal[
    # error replies
    "rate_limit", "server_error", "bad_gateway", "unavailable", "gateway_timeout", "overloaded", "unauthorized",
    "forbidden", "unknown_model", "too_large", "no_credits", "context_overflow", "content_policy", "bad_request",
    # how the bytes travel
    "none", "redirect", "reset", "hang", "hang_body", "drip", "cut", "flood", "held_open", "reset_behind",
    # content of the bytes
    "truncated", "empty_body", "html", "not_an_object", "error_as_reply", "wrong_type",
    # of streams only
    "error_event", "crlf", "no_done", "no_finish", "split", "not_streamed",
    # content of the reply
    "empty_choices", "empty_text", "blank_text", "only_thoughts", "bad_arguments", "unknown_tool", "duplicate_ids",
    "many_calls", "length", "refusal", "wrong_usage",
    "cut_call", "refused_call",
    # of batches only
    "expired", "canceled", "missing",
]  # fmt: skip

KIND_BY_ERROR_CODE: dict[str, Kind] = {
    "authentication": "unauthorized",
    "rate_limit": "rate_limit",
    "context_window": "context_overflow",
    "content_policy": "content_policy",
    "out_of_credits": "no_credits",
    "service_unavailable": "unavailable",
    "internal": "server_error",
    "timeout": "hang",
    "bad_request": "bad_request",
    "not_found": "unknown_model",
    "malformed_reply": "truncated",
    "no_response": "empty_choices",
}
"""What a script's `error` becomes here."""


class Fault(BaseModel):
    """One entry of a plan.

    Attributes:
        times: how many requests it meets; None for all.
        turn: only requests of this turn, from 0; None for any; -1 for the making of a batch, -2 for
            the counting of tokens.
        retry_after: header of an error reply, seconds or an HTTP date.
        text: the error's message instead of the provider's usual one.
        interval_seconds: between two bytes of a drip.
        left_out: how many of a stream's last events are not sent, of `held_open` and `reset_behind`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    times: int | None = Field(default=1, ge=1)
    turn: int | None = None
    retry_after: str | None = None
    text: str | None = None
    interval_seconds: float = Field(default=0.05, gt=0)
    left_out: int = Field(default=0, ge=0)


class FaultPlan:
    """Which request meets which fault."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._times_left = [fault.times for fault in faults]

    @classmethod
    def of_script(cls, script: Script) -> FaultPlan:
        """Plan the script's own errors."""
        faults = []
        for number, turn in enumerate(script.turns):
            if (error := turn.error) is not None:
                retry_after = None if error.retry_after_seconds is None else f"{error.retry_after_seconds:g}"
                kind = KIND_BY_ERROR_CODE[error.code]
                fault = Fault(
                    kind=kind, times=error.times, turn=number, text=error.text or None, retry_after=retry_after
                )
                faults.append(fault)
        return cls(faults)

    def next(self, turn: int) -> Fault | None:
        """Use up and return the fault that a request of this turn meets."""
        for index, fault in enumerate(self._faults):
            times = self._times_left[index]
            is_meant = fault.turn == turn or (fault.turn is None and turn >= 0)
            if is_meant and times != 0:
                self._times_left[index] = None if times is None else times - 1
                return fault if fault.kind != "none" else None
        return None


def spoil_turn(kind: str, turn: ScriptedTurn) -> ScriptedTurn:
    """Return the model's reply under a fault of its content."""
    call = turn.tool_calls[0] if turn.tool_calls else ScriptedCall(name="execute_bash", arguments={"command": "true"})
    changes: dict[str, dict[str, object]] = {
        "bad_arguments": {"tool_calls": (call.model_copy(update={"arguments": '{"command": "ls'}),)},
        "unknown_tool": {"tool_calls": (call.model_copy(update={"name": "no_such_tool"}),)},
        "duplicate_ids": {"tool_calls": (call.model_copy(update={"id": "call_same"}),) * 2},
        "many_calls": {"tool_calls": (call,) * 50},
        "length": {"stop_reason": "length", "tool_calls": (), "text": "This reply was cut"},
        "cut_call": {"stop_reason": "length"},
        "refused_call": {"stop_reason": "content_filter"},
        "refusal": {"stop_reason": "content_filter", "tool_calls": (), "text": ""},
        "empty_text": {"tool_calls": (), "text": "", "thinking": ""},
        "blank_text": {"tool_calls": (), "text": " \n\n ", "thinking": ""},
        "only_thoughts": {"tool_calls": (), "text": "", "thinking": "Hm.", "stop_reason": "length"},
        "wrong_usage": {"usage": ScriptedUsage.model_construct(prompt_tokens=-5, completion_tokens=-7)},
    }
    return turn.model_copy(update=changes.get(kind, {}))


def stopped(turn: ScriptedTurn, stops: Sequence[str]) -> ScriptedTurn:
    """Return the turn as it is when the model stops before the first of these texts."""
    ends = [position for stop in stops if (position := turn.text.find(stop)) >= 0]
    return turn.model_copy(update={"text": turn.text[: min(ends)]}) if ends else turn


def spoil_body(kind: str, body: bytes) -> bytes:
    """Return the bytes of a reply under a fault of its form."""
    match kind:
        case "truncated" | "cut":
            return body[: len(body) * 2 // 3]
        case "empty_body":
            return b""
        case "html":
            return b"<html><body>It works!</body></html>"
        case "not_an_object":
            return b"[1, 2, 3]"
        case "no_finish":
            return b"".join(event + b"\n\n" for event in body.split(b"\n\n") if event and b'_reason": "' not in event)
        case "crlf":
            return body.replace(b"\n", b"\r\n")
        case "no_done":
            return body.removesuffix(b"data: [DONE]\n\n")
    return body
