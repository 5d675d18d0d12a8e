"""Screenshots of a page: unchanged, and with a frame and the id around each clickable element."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

QUALITY = 80
FONT_PIXELS = 12
MARGIN_PIXELS = 2
COLOURS = ("#c0392b", "#1f618d", "#1e8449", "#7d3c98", "#b9770e", "#0e6655")


@dataclass(frozen=True, slots=True)
class ElementMark:
    """The position of an element in the screenshot, in pixels from the upper left corner."""

    bid: str
    left: int
    top: int
    right: int
    bottom: int


def render_pictures(png: bytes, marks: Sequence[ElementMark]) -> tuple[str, str]:
    """Return the screenshot without and with marks, each as a `data:` URL.

    Raises:
        OSError: `png` is not a picture.
    """
    with Image.open(io.BytesIO(png)) as opened:
        picture = opened.convert("RGB")
    plain = _url(picture)
    _draw(picture, marks)
    return plain, _url(picture)


def _draw(picture: Image.Image, marks: Sequence[ElementMark]) -> None:
    font = ImageFont.load_default(FONT_PIXELS)
    canvas = ImageDraw.Draw(picture)
    for number, mark in enumerate(marks):
        colour = COLOURS[number % len(COLOURS)]
        canvas.rectangle((mark.left, mark.top, mark.right - 1, mark.bottom - 1), outline=colour, width=2)
        width = canvas.textlength(mark.bid, font=font)
        # Draw the label above the element, so that it hides none of its text; inside only at the upper edge of the
        # picture.
        top = max(mark.top - FONT_PIXELS - 2 * MARGIN_PIXELS, 0)
        right = mark.left + width + 2 * MARGIN_PIXELS
        bottom = top + FONT_PIXELS + 2 * MARGIN_PIXELS
        canvas.rectangle((mark.left, top, right, bottom), fill=colour)
        canvas.text((mark.left + MARGIN_PIXELS, top + MARGIN_PIXELS - 1), mark.bid, fill="white", font=font)


def _url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
