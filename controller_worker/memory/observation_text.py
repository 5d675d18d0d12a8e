"""Observations as text for the model (OpenHands 7.2: prefixes, suffixes, notes).

Holds: a function of the event. Texts over the limit lose their middle, except for files, recalls and images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from broker.contract import BrowserOutputObservation, Observation, truncate_content
from controller_worker.providers import NOT_SEEN, ImagePart, TextPart

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
