"""An event that a newer version has written, for those who only show a log.

Holds: what it was made of is kept as it is, so that an export loses nothing.
Does not: take part in a conversation: a worker that meets such an event leaves the conversation to a newer one.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from broker.contract import codec
from broker.contract.events import Event, JsonObject
from broker.contract.paragraphs import Paragraph
from broker.runtime.errors import StoreTooNew, UnknownKind

_TIME: TypeAdapter[datetime] = TypeAdapter(datetime)


class UnknownEvent(Event):
    """An event of a kind or a schema that this version does not know; `fields` is its wire form."""

    is_shown_to_people: ClassVar[bool] = True

    fields: JsonObject

    def wire(self) -> JsonObject:
        """Return the fields as they were written."""
        return {"kind": self.kind, "source": self.source.value} | self.fields

    @property
    def sentence(self) -> str:
        """One line for a person."""
        return f"An event of the kind {self.kind}, which this version of Deckhands does not know."

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(f"[{self.id}] {self.sentence}", "dim"),)


def decode_any(entry: bytes, event_id: int) -> Event:
    """Turn an entry's bytes into an event, into an `UnknownEvent` where a newer version has written it.

    Raises:
        CorruptEntry: checksum, bounds or structure do not hold.
    """
    try:
        return codec.decode(entry, event_id)
    except (UnknownKind, StoreTooNew):
        wire = codec.decode_wire(entry, current=max(entry[0], codec.SCHEMA_VERSION))
    try:
        timestamp = _TIME.validate_python(wire.get("timestamp"))
    except ValidationError:
        timestamp = None
    return UnknownEvent(id=event_id, kind=str(wire.get("kind")), timestamp=timestamp, fields=wire)
