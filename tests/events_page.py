"""docs/events.md, generated from the classes of events. `make docs` writes it, and a test compares it.

Holds: the writers of an event are found in the code: the packages in which its class is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache

from pydantic import BaseModel

from broker.contract.actions import RiskyAction
from broker.contract.codec import UnknownEvent, find_kinds
from broker.contract.kinds import Action, Event, EventSource, Observation
from tests.class_reference import NAMES, attributes, first_sentences, shown_default, shown_type, table, types_in
from tests.source_code import tracked_sources

WRITERS: Mapping[str, str] = {"controller_worker": "controller", "tool_worker": "tool worker", "deckhands": "client"}
NOT_WRITERS = "deckhands/interop/openhands/"
"""Imports write events that others have written before."""
IN_BROKER: Mapping[str, set[str]] = {
    "broker/log/lost_tails.py": set(WRITERS.values()),
    "broker/contract/actions.py": {WRITERS["controller_worker"]},
    "broker/contract/long_work.py": {WRITERS["controller_worker"]},
    "broker/contract/task_list.py": {WRITERS["controller_worker"]},
}
"""The files of `broker` that write events, and for whom."""
JSON_NAMES: Mapping[object, str] = {**NAMES, bool: "true or false"}
FAMILIES: Mapping[str, tuple[str, str]] = {
    "conversation": ("Conversations", "The definition of a conversation, and the reports of its delegates."),
    "model": ("Model calls", "The model sees none of these as they are: the prompt is made from them."),
    "action": ("Actions", "Requests of the agent or a user."),
    "observation": ("Observations", "The result of an action, named by `cause`, or a report of the environment."),
}
HEAD = ("kind", "class", "written by", "the model sees it", "counts for loops", "sentence")

INTRODUCTION = """# Events

Everything that happens in a conversation is an event in its log. `deckhands export ID` prints the events, `deckhands logs ID` shows them as text, and `Client.events` returns them as values of these classes. `make docs` writes this page from the classes, and a test compares the two.

| column | meaning |
| --- | --- |
| kind | The name on the wire. It never changes and never gets another meaning. |
| written by | The process that appends such an event: the *controller* worker, a *tool worker*, or a *client* (the command line or the Python client, for a user). A tool worker runs an action that *runs*; a plan waits for its approval instead. |
| the model sees it | Whether the event itself is part of the prompt. An event that is not may still change the prompt. |
| counts for loops | Whether [loop detection](long-work.md#agents-that-repeat-themselves) compares it. |
| sentence | The line for readers, with the names of fields in braces. *Computed* means that it depends on the fields; — means that the fields are shown instead. |

In the tables of fields, a field whose default is empty is empty, false or null unless it is given; null fields are left out of an export.

A reader meets kinds of newer versions as `UnknownEvent`, which keeps all their fields.
"""


SHARED: Mapping[str, Mapping[type[Event], str]] = {
    "action": {Action: "Every action also has:", RiskyAction: "Every action that runs in a workspace also has:"},
    "observation": {Observation: "Every observation also has:"},
}
"""Classes whose fields stand once above the kinds that inherit them."""


def events_page() -> str:
    parts = [INTRODUCTION, "## Fields of every event\n", _fields_of(Event, set()), ""]
    for family, (title, text) in FAMILIES.items():
        kinds = [owner for kind, owner in _kinds().items() if kind.startswith(f"{family}.")]
        parts += [f"## {title}\n\n{text}\n", table(HEAD, [_row(owner) for owner in kinds]), ""]
        shared = {Event, *SHARED.get(family, {})}
        for owner, words in SHARED.get(family, {}).items():
            parts += [f"{words}\n", _fields_of(owner, shared - {owner}), ""]
        for owner in kinds:
            parts += list(_section(owner, shared))
    parts += ["## Types\n\nThe types of the fields above.\n", *_types()]
    return "\n".join(parts).rstrip("\n") + "\n"


@cache
def _kinds() -> dict[str, type[Event]]:
    ours = [owner for owner in find_kinds().values() if owner.__module__.startswith("broker.")]  # tests define others
    return {_kind(owner): owner for owner in sorted(ours, key=_kind) if owner is not UnknownEvent}


def _row(owner: type[Event]) -> tuple[str, ...]:
    kind = _kind(owner)
    return (
        f"[`{kind}`](#{kind.replace('.', '')})",
        f"`{owner.__name__}`",
        ", ".join(_writers()[owner.__name__]) + (", runs" if owner.runnable else ""),
        "yes" if owner.is_shown_to_model else "no",
        "yes" if owner.counts_for_loops else "no",
        _sentence(owner),
    )


def _kind(owner: type[Event]) -> str:
    return str(owner.model_fields["kind"].default)


def _sentence(owner: type[Event]) -> str:
    is_computed = any("sentence" in base.__dict__ for base in owner.__mro__ if base is not Event)
    if is_computed:
        return "computed"
    template = " ".join(owner.sentence_template.split())
    return "—" if template == "{kind}" else template


def _section(owner: type[Event], shared: set[type[Event]]) -> Iterator[str]:
    yield f"### `{_kind(owner)}`\n"
    spec = getattr(owner, "tool_spec", None)
    tool = f" The model asks for it with the tool `{spec.name}`." if spec else ""
    yield f"{first_sentences(owner)}{tool} (`{owner.__name__}` in `{owner.__module__.replace('.', '/')}.py`)\n"
    if fields := _fields_of(owner, shared):
        yield f"{fields}\n"


def _fields_of(owner: type[BaseModel], without: set[type[Event]]) -> str:
    said = attributes(owner)
    elsewhere = {name for other in without if issubclass(owner, other) for name in other.model_fields}
    rows = [
        (f"`{name}`", shown_type(field.annotation, JSON_NAMES), shown_default(field, "true"), said.get(name, ""))
        for name, field in owner.model_fields.items()
        if name not in elsewhere
    ]
    return table(("field", "type", "default", "meaning"), rows) if rows else ""


def _types() -> Iterator[str]:
    """Yield a section for each type of a field of an event, and recursively for their parts."""
    found: dict[str, type] = {}
    waiting: list[type] = list(_kinds().values())
    while waiting:
        owner = waiting.pop()
        for field in getattr(owner, "model_fields", {}).values():
            for part in types_in(field.annotation):
                if part.__name__ not in found:
                    found[part.__name__] = part
                    waiting.append(part)
    for name, owner in sorted(found.items()):
        yield f"### `{name}`\n"
        yield f"{first_sentences(owner)} (`{owner.__module__.replace('.', '/')}.py`)\n"
        if issubclass(owner, Enum):
            names = (f" ({member.name})" if isinstance(member.value, int) else "" for member in owner)
            yield ", ".join(f"`{member.value}`{name}" for member, name in zip(owner, names, strict=True)) + "\n"
        elif fields := _fields_of(owner, set()):
            yield f"{fields}\n"


@cache
def _writers() -> dict[str, list[str]]:
    """Return the parts whose code calls each class of events, or turns a model's call into it."""
    found: dict[str, set[str]] = {owner.__name__: set() for owner in _kinds().values()}
    for source in tracked_sources():
        if not source.path.endswith(".py") or source.path.startswith(NOT_WRITERS):
            continue
        writers = {WRITERS[source.package]} if source.package in WRITERS else IN_BROKER.get(source.path, set())
        for call in source.nodes(ast.Call) if writers else ():
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if name in found:
                found[name] |= writers
    for owner in _kinds().values():
        is_agents = owner.model_fields["source"].default is EventSource.AGENT
        if is_agents and (hasattr(owner, "tool_spec") or not found[owner.__name__]):
            found[owner.__name__].add(WRITERS["controller_worker"])
    named = {name: [part for part in WRITERS.values() if part in parts] for name, parts in found.items()}
    return {name: parts or ["none; imports have it"] for name, parts in named.items()}
