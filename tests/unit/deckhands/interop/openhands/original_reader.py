"""A reader of trajectories as strict as the original (OpenHands 0.62.0), based on its behaviour, not on our tables.

Holds: a class of events is built from its named fields; an unknown field, a missing one or an unknown kind is refused,
and one refusal refuses the whole trajectory. Keys at the top of an event that it does not ask for are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

REQUIRED = object()
RISKY = {"thought": "", "security_risk": -1}
ASKED = RISKY | {"confirmation_state": "confirmed"}

ACTIONS: Mapping[str, dict[str, Any]] = {
    "null": {},
    "message": {
        "content": REQUIRED,
        "file_urls": None,
        "image_urls": None,
        "wait_for_response": False,
        "security_risk": -1,
    },
    "system": {"content": REQUIRED, "tools": None, "openhands_version": "0.62.0", "agent_class": None},
    "run": ASKED
    | {"command": REQUIRED, "is_input": False, "blocking": False, "is_static": False, "cwd": None, "hidden": False},
    "run_ipython": ASKED | {"code": REQUIRED, "include_extra": True, "kernel_init_code": ""},
    "browse": RISKY | {"url": REQUIRED, "return_axtree": False},
    "browse_interactive": RISKY
    | {"browser_actions": REQUIRED, "browsergym_send_msg_to_user": "", "return_axtree": False},
    "read": RISKY | {"path": REQUIRED, "start": 0, "end": -1, "impl_source": "default", "view_range": None},
    "write": RISKY | {"path": REQUIRED, "content": REQUIRED, "start": 0, "end": -1},
    "edit": RISKY
    | {"path": REQUIRED, "command": "", "content": "", "start": 1, "end": -1, "impl_source": "oh_aci"}
    | dict.fromkeys(("file_text", "old_str", "new_str", "insert_line")),
    "call_tool_mcp": RISKY | {"name": REQUIRED, "arguments": {}},
    "think": {"thought": ""},
    "finish": {"final_thought": "", "outputs": {}, "thought": ""},
    "reject": {"outputs": {}, "thought": ""},
    "delegate": {"agent": REQUIRED, "inputs": REQUIRED, "thought": ""},
    "recall": {"recall_type": REQUIRED, "query": "", "thought": ""},
    "change_agent_state": {"agent_state": REQUIRED, "thought": ""},
    "condensation": dict.fromkeys(
        (*("forgotten_event_ids", "forgotten_events_start_id", "forgotten_events_end_id", "summary"), "summary_offset")
    ),
    "condensation_request": {},
    "task_tracking": {"command": "view", "task_list": [], "thought": ""},
    "loop_recovery": {"option": 1},
}
OBSERVATIONS: Mapping[str, dict[str, Any]] = {
    "null": {},
    "success": {},
    "error": {"error_id": ""},
    "user_rejected": {},
    "think": {},
    "condense": {},
    "loop_detection": {},
    "run": {"command": REQUIRED, "metadata": None, "hidden": False},
    "run_ipython": {"code": REQUIRED, "image_urls": None},
    "browse": {
        "url": REQUIRED,
        "trigger_by_action": REQUIRED,
        "screenshot": "",
        "screenshot_path": None,
        "set_of_marks": "",
        "error": False,
        "goal_image_urls": [],
        "open_pages_urls": [],
        "active_page_index": -1,
        "dom_object": {},
        "axtree_object": {},
        "extra_element_properties": {},
        "last_browser_action": "",
        "last_browser_action_error": "",
        "focused_element_bid": "",
        "filter_visible_only": False,
    },
    "read": {"path": REQUIRED, "impl_source": "default"},
    "write": {"path": REQUIRED},
    "edit": {"path": "", "prev_exist": False, "impl_source": "llm_based_edit"}
    | dict.fromkeys(("old_content", "new_content", "diff")),
    "delegate": {"outputs": REQUIRED},
    "agent_state_changed": {"agent_state": REQUIRED, "reason": ""},
    "recall": {"recall_type": REQUIRED, "runtime_hosts": {}, "custom_secrets_descriptions": {}}
    | {"microagent_knowledge": []}
    | dict.fromkeys(("repo_name", "repo_directory", "repo_branch", "repo_instructions"), "")
    | dict.fromkeys(("additional_agent_instructions", "date", "conversation_instructions", "working_dir"), ""),
    "mcp": {"name": "", "arguments": {}},
    "download": {"file_path": REQUIRED},
    "task_tracking": {"command": "", "task_list": []},
}
STATEFUL = {"timestamp", "source", "cause", "tool_call_metadata", "llm_metrics", "id"}
USAGE = {
    *("model", "prompt_tokens", "completion_tokens", "cache_read_tokens", "cache_write_tokens"),
    *("context_window", "per_turn_token", "response_id"),
}
SILENT = {"delegate", "agent_state_changed", "loop_detection", "loop_recovery", "edit"}
"""Events for which the original has no sentence for people, by name."""


class RefusedError(Exception):
    """The original does not read this."""


def event_from_dict(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's view of a recorded event: its named fields, and the head that it copies."""
    if "action" in fields:
        kind, known, own = fields["action"], ACTIONS, dict(fields.get("args", {}))
    elif "observation" in fields:
        kind, known, own = fields["observation"], OBSERVATIONS, dict(fields.get("extras", {}))
    else:
        raise RefusedError("neither an action nor an observation")
    if kind not in known:
        raise RefusedError(f"unknown: {kind}")
    found = _built(kind, known[kind], own)
    if "observation" in fields:
        found["content"] = fields.get("content", "")
        if not isinstance(found["content"], str):
            raise RefusedError("content is a text")
    elif "timeout" in fields:
        found["timeout"] = float(fields["timeout"])
    for name, check in CHECKS.items():
        if name in fields:
            check(fields[name])
    return found | {name: fields[name] for name in STATEFUL if name in fields}


def _built(kind: str, known: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    unknown = own.keys() - known.keys()
    missing = {name for name, default in known.items() if default is REQUIRED} - own.keys()
    if unknown or missing:
        raise RefusedError(f"{kind}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    if own.get("security_risk", -1) not in (-1, 0, 1, 2):
        raise RefusedError("no such risk")
    if own.get("recall_type", "knowledge") not in ("knowledge", "workspace_context"):
        raise RefusedError("no such recall")
    for knowledge in own.get("microagent_knowledge", ()):
        if knowledge.keys() != {"name", "trigger", "content"}:
            raise RefusedError(f"knowledge: {sorted(knowledge)}")
    if known is ACTIONS["condensation"]:
        has_ids = own.get("forgotten_event_ids") is not None
        ends = [own.get(f"forgotten_events_{end}_id") for end in ("start", "end")]
        if has_ids == (None not in ends) or (own.get("summary") is None) != (own.get("summary_offset") is None):
            raise RefusedError("invalid configuration of a condensation")
    return {name: default for name, default in known.items() if default is not REQUIRED} | own


def _metadata(value: Any) -> None:
    expected = {"function_name", "tool_call_id", "model_response", "total_calls_in_response"}
    if not expected <= value.keys():
        raise RefusedError(f"a call without {sorted(expected - value.keys())}")
    response = value["model_response"]
    if not isinstance(response["choices"][0]["message"], dict) or not isinstance(response["id"], str):
        raise RefusedError("a call without a response")


def _metrics(value: Any) -> None:
    if value["accumulated_cost"] < 0 or not value["accumulated_token_usage"].keys() <= USAGE:
        raise RefusedError("no metrics")
    if not all(isinstance(value[name], list) for name in ("costs", "response_latencies", "token_usages")):
        raise RefusedError("no lists")


def _source(value: Any) -> None:
    if value not in ("agent", "user", "environment"):
        raise RefusedError(f"the source {value}")


def _number(value: Any) -> None:
    if type(value) is not int:
        raise RefusedError(f"no id: {value!r}")


CHECKS: Mapping[str, Callable[[Any], None]] = {
    "tool_call_metadata": _metadata,
    "llm_metrics": _metrics,
    "source": _source,
    "cause": _number,
    "id": _number,
}
