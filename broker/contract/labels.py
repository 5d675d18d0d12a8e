"""Labels that producers attach to conversations to find them again.

Holds: names and values are short, plain ASCII, and safe in a command line, a file name and a key.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

MAX_LABELS = 32
LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.:/@+-]{0,126}[A-Za-z0-9])?)?")


def validate_labels(labels: dict[str, str]) -> dict[str, str]:
    """Validate labels and return them.

    Raises:
        ValueError: there are too many, or one is invalid; the text names it.
    """
    if len(labels) > MAX_LABELS:
        raise ValueError(f"there are {len(labels)} labels; the limit is {MAX_LABELS}")
    for name, value in labels.items():
        if LABEL_NAME.fullmatch(name) is None:
            raise ValueError(f"{ascii(name)[:100]} is not a valid name of a label")
        if LABEL_VALUE.fullmatch(value) is None:
            raise ValueError(f"{ascii(value)[:100]} is not a valid value of the label {name}")
    return labels


Labels = Annotated[
    dict[str, str],
    AfterValidator(validate_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LABELS,
            "propertyNames": {"pattern": f"^{LABEL_NAME.pattern}$"},
            "additionalProperties": {"type": "string", "pattern": f"^{LABEL_VALUE.pattern}$"},
        }
    ),
]
"""At most 32 labels; names have 1 to 64 characters, values 0 to 128."""
