"""The question for a summary of forgotten events, shared by both summarizing condensers."""

from __future__ import annotations

from collections.abc import Callable

from broker.contract import AskingCondenserSpec, CondensationAction, Event, ModelReply, ToolSpec
from controller_worker.memory.condensers.condenser import Condensed, Inquiry, forgetting
from controller_worker.memory.condensers.event_text import event_blocks
from controller_worker.memory.condensers.rolling import (
    event_chars,
    previous_summary,
    should_condense,
    target_size,
    to_forget,
)
from controller_worker.memory.view import View
from controller_worker.providers import Message, TextPart


def summary_of_forgotten(
    spec: AskingCondenserSpec,
    view: View,
    conclude: Callable[[list[Event], ModelReply], CondensationAction],
    *,
    instructions: str,
    ending: str = "",
    tools: tuple[ToolSpec, ...] = (),
) -> Condensed:
    """Return the question if the View is too long or a condensation was requested.

    Args:
        conclude: makes the condensation from the forgotten events and the reply; never raises.
        ending: the text after the events.
    """
    if not should_condense(spec, view):
        return view
    head = min(spec.keep_first, len(view))
    forgotten = to_forget(spec, view, tail_size=target_size(spec, view) - head - 1)  # without the summary itself
    if not forgotten:
        return forgetting(view, ()) if view.has_request else view
    question = (
        f"{instructions}\n\n<PREVIOUS SUMMARY>\n{previous_summary(spec, view)}\n</PREVIOUS SUMMARY>\n\n"
        f"{event_blocks(forgotten, event_chars(spec.max_event_length, view))}{ending}"
    )
    messages = (Message("user", (TextPart(question),)),)
    return Inquiry(messages, tools, spec.llm, lambda reply: conclude(forgotten, reply))
