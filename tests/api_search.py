"""Rules for schemathesis to search the HTTP API: its program loads this file.

Holds: a request that fits its schema may meet a state in which it cannot be done, or break a rule across fields that no
JSON Schema says; it is never refused for the form of a part.
"""

from __future__ import annotations

from typing import Any

import schemathesis

LONGEST_SECONDS = 0.2
FORM_CODES = frozenset({"malformed_json", "unsupported_media_type", "method_not_allowed", "not_acceptable"})
RULE = "value_error"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Let no request wait for a run: whether it ends is not what is searched here."""
    seconds = (case.query or {}).get("timeout_seconds")
    if isinstance(seconds, int | float) and LONGEST_SECONDS < seconds <= 3_600:
        case.query["timeout_seconds"] = LONGEST_SECONDS


@schemathesis.check
def fitting_requests_are_not_refused_for_their_form(context: Any, response: Any, case: Any) -> None:
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code not in (400, 406, 415, 422):
        return
    problem = response.json()
    problem = problem.get("error", problem)
    codes = [each["code"] for each in problem.get("errors", ())]
    is_form = problem["code"] in FORM_CODES or (problem["code"] == "invalid_request" and RULE not in codes)
    assert not is_form, f"refused for its form: {problem}"
