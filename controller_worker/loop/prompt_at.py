"""Rebuilds the prompt of a model at a point of a conversation from its log.

Holds: it uses the View, the condenser and the memory of controller workers, so the messages are the same. No model and
no store is used.
Does not: know the settings of the workers. The real texts differ for a model without tool calls, which gets its tools
as text, for a model without images, and for a model with another maximum length of a message. Pictures are shown by
their size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from broker.contract import CondensationAction, ConversationCreated, Event, find_rolled_back
from broker.log import parse_lines
from broker.runtime import DeckhandsError, UsageError
from controller_worker.agents import create_agent, is_acp_agent, is_sdk_agent, should_show_pages
from controller_worker.core import State, apply
from controller_worker.memory import ConversationMemory, Inquiry, PromptOptions, ViewFold, create_condenser
from controller_worker.providers import ImagePart, Message, TextPart

PICTURE_CHARS = 200
"""The part of a picture's address that is kept, unless the address holds the picture."""


def build_prompt(events: Sequence[Event]) -> dict[str, Any]:
    """Return the prompt of the call after these first events of a log, as plain JSON values.

    Raises:
        UsageError: there is no prompt: the log is incomplete, another program has the prompt, or a condensation without
            a model comes first.
    """
    if not events or not isinstance(events[0], ConversationCreated):
        raise UsageError(
            "The log does not start with the creation of its conversation.", remedy="Export the whole log."
        )
    state, fold, without = State(), ViewFold(), find_rolled_back(events)
    for event in events:
        state = apply(state, event)
        if event.id in without:
            fold.skip(event)
        else:
            fold.add(event)
    spec = state.setup.agent
    agent = create_agent(spec)
    if is_acp_agent(agent) or is_sdk_agent(agent):
        raise UsageError(
            f"The program of the agent {spec.name} makes its prompts itself.",
            remedy="Read the events of the conversation instead.",
        )
    condensed = create_condenser(spec.condenser).condense(fold.view(overflows=state.calls.overflows))
    if isinstance(condensed, CondensationAction):
        raise UsageError(
            "The next step at this event is a condensation without a model call.", remedy="Choose a later event."
        )
    if isinstance(condensed, Inquiry):
        llm, service, tools, messages = condensed.llm or spec.llm, "condenser", condensed.tools, condensed.messages
    else:
        options = PromptOptions(
            shows_pages=spec.enable_som_visual_browsing and should_show_pages(agent),
            shows_recalls=spec.enable_prompt_extensions,
            disabled_skills=spec.disabled_microagents,
        )
        memory = ConversationMemory(options)
        for event in fold.list_events(condensed.events):
            memory.add(event)
        llm, service, tools, messages = spec.llm, "agent", tuple(agent.tools), tuple(memory.messages())
    return {
        "after": state.version,
        "model": llm.model or "",
        "service": service,
        "tools": [tool.name for tool in tools],
        "messages": [_to_json(message) for message in messages],
    }


def _to_json(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    found = {"role": message.role, "content": [_to_text(part) for part in message.content], "tool_calls": calls}
    return found | {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}


def _to_text(part: TextPart | ImagePart) -> str:
    if isinstance(part, TextPart):
        return part.text
    is_held = part.url.startswith("data:")
    return f"[picture of {len(part.url):,} characters]" if is_held else f"[picture: {part.url[:PICTURE_CHARS]}]"


def main() -> None:
    """Read the log on standard input, one event per line, and print the prompt as JSON."""
    try:
        report = build_prompt(parse_lines(sys.stdin, source="the log"))
    except DeckhandsError as error:
        report = {"error": error.message, "remedy": error.remedy, "code": error.code}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
