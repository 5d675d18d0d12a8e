"""A turn: a reply of the model, its actions, and their results.

The text of an observation has the prefixes, suffixes and notes of OpenHands (7.2).

Holds: a call is shown if both its action and its result exist. A call without an action is answered by an observation
without a cause. If a user edited an action before it ran, the result names the edited action, because the call shows
the model's version. A rendering is a function of the event. Texts over the limit lose their middle, except for files,
recalls and images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker.contract import (
    Action,
    BrowserOutputObservation,
    Event,
    EventSource,
    ModelReply,
    Observation,
    PlanAction,
    RiskyAction,
    truncate_content,
)
from controller_worker.providers import NOT_SEEN, ImagePart, Message, TextPart, ToolCall

Content = tuple[TextPart | ImagePart, ...]

MAX_IMAGE_CHARS = 5 * 2**20
"""Length of a picture in base64; Anthropic refuses longer ones."""

_BEGINNINGS = {
    "data:image/png;base64": re.compile("iVBORw0KGgo"),
    "data:image/jpeg;base64": re.compile("/9j/"),
    "data:image/gif;base64": re.compile("R0lGOD"),
    "data:image/webp;base64": re.compile("UklGR.{6}XRUJQ"),
}
"""The first characters of a picture of each type, in base64."""
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_END = re.compile(r"[A-Za-z0-9+/]{2}|[A-Za-z0-9+/]=|==")

SCREENSHOT_NOTE = (
    "\nImage: the visible part of the page (the accessibility tree above is of the whole page; elements are marked "
    "with their ids where marks are shown)."
)
NO_SCREENSHOT_NOTE = "\nThere is no usable image of the page; go by its accessibility tree."


def render_observation(event: Observation, *, max_chars: int, sees_images: bool, shows_pages: bool = True) -> Content:
    """Return the content of an observation for the model; empty for hidden ones.

    Args:
        max_chars: longest text.
        sees_images: whether the model accepts images; if not, a note replaces each.
        shows_pages: whether pictures of pages are shown; if not, only their text.
    """
    if isinstance(event, BrowserOutputObservation):
        return _render_page(event, max_chars, is_shown=sees_images and shows_pages)
    text = truncate_content(event.agent_text, max_chars) if event.is_cut else event.agent_text
    urls: Sequence[str] = event.__dict__.get("image_urls") or ()
    usable = [url for url in urls if is_inline_image(url)]
    if len(usable) < len(urls) and sees_images:
        text += f"\n\nNote: {len(urls) - len(usable)} of {len(urls)} images cannot be shown."
    return (*((TextPart(text),) if text else ()), *(ImagePart(url) if sees_images else NOT_SEEN for url in usable))


def is_image_url(url: str) -> bool:
    """Return whether an image of a user's message can be given to a provider: an address, or the image itself."""
    return url.startswith(("https://", "http://")) or is_inline_image(url)


def is_inline_image(url: str) -> bool:
    """Return whether this is a complete image in a `data:` URL of a form that providers accept.

    A tool may return anything as an image. A provider that refuses an image refuses every later prompt with it, and a
    client that downloads images would fetch any address named by a tool from the controller's network.
    """
    head, _, encoded = url.partition(",")
    beginning = _BEGINNINGS.get(head)
    if beginning is None or not beginning.match(encoded) or len(encoded) > MAX_IMAGE_CHARS or len(encoded) % 4:
        return False
    return not encoded[:-2].encode("utf-8", "replace").translate(None, _BASE64) and bool(_END.fullmatch(encoded[-2:]))


def _render_page(event: BrowserOutputObservation, max_chars: int, *, is_shown: bool) -> Content:
    text = truncate_content(event.content, max_chars)
    if event.trigger_by_action != "browse_interactive" or not is_shown:
        return (TextPart(text),) if text else ()
    image = next((url for url in (event.set_of_marks, event.screenshot) if is_inline_image(url)), None)
    if image is None:
        return (TextPart(text + NO_SCREENSHOT_NOTE),)
    return (TextPart(text + SCREENSHOT_NOTE), ImagePart(image))


EDITED = "A person changed this action before it ran. What ran has:\n{fields}\n\n"
MAX_EDITED_CHARS = 2_000
NOT_EDITED = frozenset(
    {"id", "timestamp", "thought", "confirmation_state", "replaces", "security_risk", "blobs"}
    | {"answers", "asks", "questions"}
)
"""Fields in which a copy differs from the original action without an edit."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a tool call, and its event."""

    event_id: int
    content: Content


@dataclass(slots=True)
class OpenTurn:
    """A reply with calls that still need results.

    Attributes:
        meanwhile: messages since its prompt was made, with their event ids.
    """

    reply: ModelReply
    meanwhile: list[tuple[int, Message]]
    _called: set[str] = field(default_factory=set)
    _results: dict[str, CallResult] = field(default_factory=dict)
    _asked: dict[int, Action] = field(default_factory=dict)
    _edits: dict[str, str] = field(default_factory=dict)
    _is_spoken: bool = False
    _pictures: tuple[tuple[int, Message], ...] = ()

    def is_part(self, event: Event) -> bool:
        """Return whether an event belongs to this turn: by its tool call, or as the effect of a reply without calls."""
        metadata = event.tool_call_metadata
        if metadata is not None:
            return metadata.reply_id == self.reply.id
        is_effect = isinstance(event, Action) and event.source is EventSource.AGENT and event.id == self.reply.id + 1
        return is_effect and not self.reply.tool_calls

    def add(self, event: Event, result: CallResult | None, pictures: Message | None = None) -> None:
        """Add an event of the turn, the result it brings, and the images of its message."""
        metadata = event.tool_call_metadata
        if metadata is None:
            self._is_spoken = True
            self._pictures = ((event.id, pictures),) if pictures is not None else ()
            return
        if isinstance(event, Action):
            self._called.add(metadata.tool_call_id)
            self._asked[event.id] = event
        if isinstance(event, RiskyAction) and event.replaces in self._asked:
            self._edits[metadata.tool_call_id] = render_edit(self._asked[event.replaces], event)
        if result is not None and (event.cause is None or metadata.tool_call_id in self._called):
            self._results[metadata.tool_call_id] = _prepend(self._edits.get(metadata.tool_call_id, ""), result)

    def is_complete(self) -> bool:
        """Return whether nothing is missing."""
        return len(self._results) == len(self.reply.tool_calls) and (bool(self.reply.tool_calls) or self._is_spoken)

    def messages(self) -> list[tuple[int, Message]]:
        """Return the reply with its calls that have results, and the results; empty if there are none.

        Each message has the id of its event; 0 for the reply itself.
        """
        reply = self.reply
        calls = tuple(
            ToolCall(call.id, call.name, call.arguments) for call in reply.tool_calls if call.id in self._results
        )
        content = (TextPart(reply.content),) if reply.content.strip() else ()
        if not calls and (reply.tool_calls or not content or not self._is_spoken):
            return [*self._pictures]
        results = [(call, self._results[call.id]) for call in calls]
        return [
            (0, Message("assistant", content, tool_calls=calls, thinking_blocks=reply.thinking_blocks)),
            *(
                (result.event_id, Message("tool", result.content, tool_call_id=call.id, name=call.name))
                for call, result in results
            ),
            *self._pictures,
        ]


def render_edit(asked: Action, ran: Action) -> str:
    """Return a note for the model that an edited action ran.

    Empty if the model's own action ran, or if the result already says so.
    """
    fields = [] if isinstance(ran, PlanAction) else list(_find_edited(asked, ran))
    return EDITED.format(fields="\n".join(f"{name}: {value}" for name, value in fields)) if fields else ""


def _find_edited(asked: Action, ran: Action) -> Iterator[tuple[str, str]]:
    before = dict(asked)
    for name, value in dict(ran).items():
        if name not in NOT_EDITED and before.get(name) != value:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield name, truncate_content(text, MAX_EDITED_CHARS)


def _prepend(told: str, result: CallResult) -> CallResult:
    if not told:
        return result
    first, *rest = result.content or (TextPart(""),)
    if isinstance(first, TextPart):
        return CallResult(result.event_id, (TextPart(told + first.text), *rest))
    return CallResult(result.event_id, (TextPart(told.rstrip()), first, *rest))
