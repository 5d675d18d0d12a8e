"""Labels: what producers write on conversations, to find them again.

Holds: names and values are short, plain ASCII, and safe in a command line, a file name and a key.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

MAX_LABELS = 32
LABEL_NAME = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9_.:/@+-]{0,126}[A-Za-z0-9])?)?$"

LabelName = Annotated[str, StringConstraints(pattern=LABEL_NAME)]
LabelValue = Annotated[str, StringConstraints(pattern=LABEL_VALUE)]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=MAX_LABELS)]
"""At most 32 by name; names of 1 to 64, values of 0 to 128 characters."""
