"""The events of OpenHands V0 by name, each with the fields that its reader accepts (OpenHands 3.2, 3.3).

Holds: the original builds an event from exactly these fields and refuses the whole trajectory for an unknown one.
Further fields of ours are under `EXTENSION`, which it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.contract import find_kinds

EXTENSION = "deckhands"
"""A key at the top of a recorded event for the data of Deckhands that OpenHands has no name for."""

_RISKY = "thought security_risk"
_ASKED = f"{_RISKY} confirmation_state"


def _fields(table: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {name: frozenset(fields.split()) for name, fields in table.items()}


ACTIONS = _fields(
    {
        "null": "",
        "message": "content file_urls image_urls wait_for_response security_risk",
        "system": "content tools openhands_version agent_class",
        "run": f"command is_input blocking is_static cwd hidden {_ASKED}",
        "run_ipython": f"code include_extra kernel_init_code {_ASKED}",
        "browse": f"url return_axtree {_RISKY}",
        "browse_interactive": f"browser_actions browsergym_send_msg_to_user return_axtree {_RISKY}",
        "read": f"path start end impl_source view_range {_RISKY}",
        "write": f"path content start end {_RISKY}",
        "edit": f"path command file_text old_str new_str insert_line content start end impl_source {_RISKY}",
        "call_tool_mcp": f"name arguments {_RISKY}",
        "think": "thought",
        "finish": "final_thought outputs thought",
        "reject": "outputs thought",
        "delegate": "agent inputs thought",
        "recall": "recall_type query thought",
        "change_agent_state": "agent_state thought",
        "condensation": (
            "forgotten_event_ids forgotten_events_start_id forgotten_events_end_id summary summary_offset"
        ),
        "condensation_request": "",
        "task_tracking": "command task_list thought",
        "loop_recovery": "option",
    }
)
OBSERVATIONS = _fields(
    {
        **dict.fromkeys(("null", "success", "user_rejected", "think", "condense", "loop_detection"), ""),
        "error": "error_id",
        "run": "command metadata hidden",
        "run_ipython": "code image_urls",
        "browse": (
            "url trigger_by_action screenshot screenshot_path set_of_marks error goal_image_urls open_pages_urls "
            "active_page_index dom_object axtree_object extra_element_properties last_browser_action "
            "last_browser_action_error focused_element_bid filter_visible_only"
        ),
        "read": "path impl_source",
        "write": "path",
        "edit": "path prev_exist old_content new_content impl_source diff",
        "delegate": "outputs",
        "agent_state_changed": "agent_state reason",
        "recall": (
            "recall_type repo_name repo_directory repo_branch repo_instructions runtime_hosts "
            "additional_agent_instructions date custom_secrets_descriptions conversation_instructions working_dir "
            "microagent_knowledge"
        ),
        "mcp": "name arguments",
        "download": "file_path",
        "task_tracking": "command task_list",
    }
)
FAMILIES = {"action": ACTIONS, "observation": OBSERVATIONS}

SUBSTITUTES = {
    "action.search_code": ("run_ipython",),
    "observation.events_lost": ("error",),
    "observation.finish_refused": ("error",),
    "observation.finish_verdict": ("success", "error"),
    "observation.outcome_unknown": ("error",),
    "observation.plan_accepted": ("success",),
    "observation.search_code": ("run_ipython",),
}
"""Names that replace kinds that OpenHands has no name for; see `names_of`."""
OTHER_TOOLS = {"action": "call_tool_mcp", "observation": "mcp"}


def list_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind in a trajectory; none if it does not occur there.

    Our other events for the model are written as calls of another tool, so their kinds need no entry here.
    """
    family, _, name = kind.partition(".")
    if family not in FAMILIES or kind not in find_kinds():
        return ()
    if name in FAMILIES[family]:
        return (name,)
    is_shown = find_kinds()[kind].is_shown_to_model
    return SUBSTITUTES.get(kind, (OTHER_TOOLS[family],) if is_shown else ())


HEAD = frozenset({"kind", "id", "timestamp", "source", "cause", "tool_call_metadata", "blobs"})
"""Fields of every event, which a recorded event may not set itself."""

EARLIER_EVENTS = ("replaces", "action_id", "delegate_id", "finish_id")
"""Fields that refer to an earlier event, or to none."""
PLACES = ("last_id", "known_id")
"""Fields that refer to a place in the log, which may be past its end."""
