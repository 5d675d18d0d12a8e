"""Front matter: the YAML at the start of a skill file. Its authors are untrusted.

Holds: the cost of parsing is linear in the length. Length, depth and number of values are bounded. Aliases, anchors and
tags, which can expand a short text or create foreign objects, are rejected before any value is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

MAX_CHARS = 16_000
MAX_DEPTH = 10
MAX_VALUES = 2_000

# The parser in C, if available, takes a thirtieth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = yaml.resolver.Resolver()
_TEXT, _NOTHING = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class Unquoted:
    """A scalar that YAML would parse as a number, date or boolean, as the original text."""

    text: str

    def __str__(self) -> str:
        return self.text


def parse_front_matter(text: str) -> dict[str, Any]:
    """Return the fields as strings, `Unquoted`, None, lists and dictionaries.

    Raises:
        ValueError: it is not YAML, not a mapping, or not plain. The text says why and how to fix it.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"the front matter has {len(text)} characters; {MAX_CHARS} are allowed")
    try:
        events = _check_plain(yaml.parse(text, Loader=_LOADER))
        next(events)  # the start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            return {}
        found = _build_value(next(events), events)
        next(events)  # the end of the document
        if not isinstance(next(events), yaml.StreamEndEvent):
            raise ValueError("the front matter holds several documents")  # noqa: TRY004  (it is of no value's type)
    except yaml.YAMLError as error:
        raise ValueError(f"the front matter is not YAML: {_describe_error(error)}") from error
    if found is not None and not isinstance(found, dict):
        raise ValueError("the front matter names nothing; write `name: value` in each line")
    return found or {}


def _check_plain(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    """Yield parser events; raise if they are not plain or exceed a bound."""
    depth = values = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError("the front matter has an anchor or an alias (& or *); write the value out, or quote it")
        if getattr(event, "tag", None) is not None:
            raise ValueError("the front matter has a tag (!); leave it out, or quote the value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"the front matter is nested more than {MAX_DEPTH} levels deep")
        if values > MAX_VALUES:
            raise ValueError(f"the front matter holds more than {MAX_VALUES} values")
        yield event


def _build_value(event: yaml.Event, events: Iterator[yaml.Event]) -> Any:
    """Build the value that starts with `event`, consuming its remaining events from `events`."""
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not _is_end(event := next(events)):
            items.append(_build_value(event, events))
        return items
    if isinstance(event, yaml.MappingStartEvent):
        fields: dict[str, Any] = {}
        while not _is_end(event := next(events)):
            if not isinstance(event, yaml.ScalarEvent):
                raise ValueError("the front matter has a name that is not text")  # noqa: TRY004  (as above)
            fields[event.value] = _build_value(next(events), events)
        return fields
    kind = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
    if kind == _TEXT:
        return event.value
    return None if kind == _NOTHING else Unquoted(event.value)


def _is_end(event: yaml.Event) -> bool:
    return isinstance(event, yaml.CollectionEndEvent)


def _describe_error(error: yaml.YAMLError) -> str:
    """Return the parser's error message without the parsed text."""
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 2}" if mark is not None else ""  # 1 for the `---` line
    return f"{getattr(error, 'problem', None) or 'it has a character that is not allowed'}{where}"
