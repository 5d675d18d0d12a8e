"""What a reader of a log sees of an event, as values: texts with a mark and a style.

Does not: colour or shorten anything; see `deckhands.reading.rendering`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Style = Literal["", "bold", "dim", "red", "green", "cyan"]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One text. A reader does not see an empty one.

    Attributes:
        mark: stands before its first line; the other lines are indented as far.
        max_lines: a longer text loses its middle where a log is shown.
    """

    text: str
    style: Style = ""
    mark: str = ""
    max_lines: int = 20
