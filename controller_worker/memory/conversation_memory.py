"""From events to messages: the model's view of a conversation (OpenHands section 7).

A `ConversationMemory` is fed events in order and keeps their messages, so that the cost of a step depends on the new
events and not on the whole history.

Holds: every shown tool call is directly followed by its result, in the order of the calls. Messages shown in one
request are unchanged in later ones, so that a provider's prompt cache and a backend's memo stay warm. If the View
leaves out a call's action or result, neither is shown.
Differs: a message that arrived after a reply's prompt was made, or between a call and its result, is shown after the
reply and its results; in the original it comes before, as if the reply answered it. A finish keeps its tool call, with
a result; later prompts of the original show a call without a result. A turn that is resumed without a message gets a
short one, because providers refuse a prompt that ends with the model's own text.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from broker.contract import (
    Action,
    AgentFinishAction,
    AgentState,
    AgentStateChangedObservation,
    CmdOutputObservation,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    Note,
    Observation,
    RecallObservation,
    SystemMessageAction,
    truncate_content,
)
from controller_worker.memory.turn import CallResult, Content, OpenTurn, is_image_url, render_observation
from controller_worker.memory.view import is_companion, is_shown
from controller_worker.providers import NOT_SEEN, ImagePart, Message, TextPart

MAX_MESSAGE_CHARS = 30_000
FINISH_RESULT = "The task was reported as finished."
NO_RESULT = "Done; there is nothing to show."
CONTINUE = "Please continue."
OWN_IMAGES = "Images of your message:"
SYSTEM_MESSAGES_KEPT = 64


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options for showing a conversation to a model.

    Attributes:
        max_message_chars: longest text of one observation; a longer text loses its middle.
        sees_images: whether the model accepts images.
        shows_pages: whether the model sees pictures of pages (`enable_som_visual_browsing`).
        shows_recalls: whether the results of recalls are shown (`enable_prompt_extensions`).
        disabled_skills: names of skills that are not shown (`disabled_microagents`).
    """

    max_message_chars: int = MAX_MESSAGE_CHARS
    sees_images: bool = True
    shows_pages: bool = True
    shows_recalls: bool = True
    disabled_skills: Collection[str] = ()


@dataclass(slots=True)
class _Shown:
    """A message in its place, and the event it was made from."""

    message: Message
    event_id: int = 0


@lru_cache(maxsize=SYSTEM_MESSAGES_KEPT)
def _make_system_message(text: str) -> Message:
    """Return the message of a system prompt. Conversations with the same prompt share it and its derived forms."""
    return Message("system", (TextPart(text),))


class ConversationMemory:
    """The messages of one conversation."""

    def __init__(self, options: PromptOptions | None = None) -> None:
        """Create an empty memory."""
        self._options = options or PromptOptions()
        self._shown: list[_Shown] = []
        self._places: dict[int, _Shown] = {}
        self._masks: dict[int, str] = {}
        self._skills: frozenset[str] = frozenset()
        self._notes: frozenset[Note] = frozenset()
        self._turn: OpenTurn | None = None
        # Messages since the latest reply, as they were before joining. The next reply may not have seen them.
        self._since_reply: list[tuple[int, Message]] = []

    def add(self, event: Event) -> None:
        """Add the next event; events outside the View are ignored, except its companions."""
        if not is_shown(event) and not is_companion(event):
            return
        if isinstance(event, ModelReply):
            self._open_turn(event)
            return
        turn = self._turn
        if turn is not None and turn.is_part(event):
            turn.add(event, self._make_result(event), self._make_pictures(event))
            if turn.is_complete():
                self._close_turn()
            return
        if isinstance(event, SystemMessageAction):
            # No request has shown anything yet: an agent greets before its first step.
            self._shown.insert(0, _Shown(_make_system_message(event.content), event.id))
            return
        messages = (self._to_message(event), self._make_pictures(event))
        came = [(event.id, message) for message in messages if message is not None]
        if turn is not None:
            turn.meanwhile += came
        else:
            self._keep_since_reply(came)

    def mask(self, event_id: int, text: str) -> None:
        """From now on, show a text in place of an observation."""
        self._masks[event_id] = text
        shown = self._places.get(event_id)
        if shown is not None:
            shown.message = _replace_text(shown.message, text)

    def messages(self) -> list[Message]:
        """Return the messages so far; a turn with open calls shows only the calls with results."""
        if self._turn is None:
            return [shown.message for shown in self._shown]
        whole = list(self._shown)
        for event_id, message in (*self._turn.messages(), *self._turn.meanwhile):
            self._join(whole, event_id, message)
        return [shown.message for shown in whole]

    def _open_turn(self, reply: ModelReply) -> None:
        self._close_turn()
        unseen = [(event_id, message) for event_id, message in self._since_reply if event_id > reply.seen_id]
        if unseen:
            del self._shown[-len(unseen) :]
        self._since_reply = []
        self._turn = OpenTurn(reply, unseen)

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            for event_id, message in turn.messages():
                self._place(self._join(self._shown, event_id, message))
            self._keep_since_reply(turn.meanwhile)

    def _keep_since_reply(self, came: list[tuple[int, Message]]) -> None:
        self._since_reply += came
        for event_id, message in came:
            self._place(self._join(self._shown, event_id, message))

    def _join(self, whole: list[_Shown], event_id: int, message: Message) -> _Shown:
        """Append a message; a second user message in a row starts with a blank line (OpenHands 7.3)."""
        mask = self._masks.get(event_id) if event_id else None
        if mask is not None:
            message = _replace_text(message, mask)
        if message.role == "user" and whole and whole[-1].message.role == "user":
            first, *rest = message.content
            if isinstance(first, TextPart):
                message = replace(message, content=(TextPart("\n\n" + first.text), *rest))
        whole.append(_Shown(message, event_id))
        return whole[-1]

    def _place(self, shown: _Shown) -> None:
        if shown.event_id:
            self._places[shown.event_id] = shown

    def _to_message(self, event: Event) -> Message | None:
        """Return the message of an event that belongs to no open turn."""
        match event:
            case MessageAction(source=EventSource.USER):
                return Message("user", (TextPart(event.content), *self._make_images(event)))
            case MessageAction(source=EventSource.AGENT) if event.content.strip():
                return Message("assistant", (TextPart(event.content),))
            case Action(source=EventSource.USER, runnable=True):
                return _make_user_message(event.user_text)
            case CmdOutputObservation(tool_call_metadata=None):
                text = f"\nObserved result of command executed by user:\n{event.agent_text}"
                return _make_user_message(truncate_content(text, self._options.max_message_chars))
            case AgentStateChangedObservation(agent_state=AgentState.RUNNING):
                return _make_user_message(CONTINUE) if self._is_model_last() else None
            case RecallObservation():
                return self._render_recall(event)
            case Observation(tool_call_metadata=None):
                content = self._render_content(event)
                return Message("user", content) if content else None
        return None

    def _make_pictures(self, event: Event) -> Message | None:
        """Return the images of an agent's own message: providers accept none in the model's messages."""
        if not isinstance(event, MessageAction) or event.source is not EventSource.AGENT:
            return None
        images = self._make_images(event)
        return Message("user", (TextPart(OWN_IMAGES), *images)) if images else None

    def _make_images(self, message: MessageAction) -> Content:
        """Return the images of a message, each after its number."""
        urls = [url for url in message.image_urls or () if is_image_url(url)]
        if not self._options.sees_images:
            return (NOT_SEEN,) * len(urls)
        return tuple(part for n, url in enumerate(urls, 1) for part in (TextPart(f"Image {n}:"), ImagePart(url)))

    def _render_recall(self, recall: RecallObservation) -> Message | None:
        """Return the result of a recall, without skills and notes that are already shown."""
        options = self._options
        if not options.shows_recalls:
            return None
        skills = tuple(
            skill
            for skill in recall.microagent_knowledge
            if skill.name not in self._skills and skill.name not in options.disabled_skills
        )
        self._skills |= {skill.name for skill in recall.microagent_knowledge}
        notes = tuple(note for note in recall.notes or () if note not in self._notes)
        self._notes |= set(notes)
        content = self._render_content(recall.model_copy(update={"microagent_knowledge": skills, "notes": notes}))
        return Message("user", content) if content else None

    def _is_model_last(self) -> bool:
        """Return whether the last message is the model's."""
        return self._turn is None and bool(self._shown) and self._shown[-1].message.role == "assistant"

    def _make_result(self, event: Event) -> CallResult | None:
        """Return the result that the event brings for its tool call, or None."""
        if isinstance(event, AgentFinishAction):
            return CallResult(event.id, (TextPart(FINISH_RESULT),))
        if not isinstance(event, Observation):
            return None
        mask = self._masks.get(event.id)
        content = self._render_content(event) if mask is None else (TextPart(mask),)
        has_words = any(isinstance(part, ImagePart) or part.text.strip() for part in content)
        return CallResult(event.id, content if has_words else (TextPart(NO_RESULT),))

    def _render_content(self, event: Observation) -> Content:
        options = self._options
        return render_observation(
            event,
            max_chars=options.max_message_chars,
            sees_images=options.sees_images,
            shows_pages=options.shows_pages,
        )


def _make_user_message(text: str) -> Message:
    return Message("user", (TextPart(text),))


def _replace_text(message: Message, text: str) -> Message:
    """Return the message with another text, still joined to its neighbor as before."""
    first = message.content[0] if message.content else None
    is_joined = message.role == "user" and isinstance(first, TextPart) and first.text.startswith("\n\n")
    return replace(message, content=(TextPart(f"\n\n{text}" if is_joined else text),))
