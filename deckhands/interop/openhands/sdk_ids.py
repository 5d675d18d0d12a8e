"""The ids of conversations as UUIDs, which is the form that OpenHands' clients use.

An id made by Deckhands has 128 bits, like a UUID, so each corresponds to exactly one of the other kind. Ids made from
an idempotency key, those of delegates, and ids of up to 19 characters that a program has chosen, are packed into UUIDs
of version 8. An id that is a UUID stands for itself. A longer id of another form becomes a UUID of version 5.

Holds: the UUID of a conversation never changes, in any process.
"""

from __future__ import annotations

import re
from uuid import UUID, uuid5

from broker.runtime import is_conversation_id

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_MADE = re.compile(rf"[0-7][{_BASE32}]{{25}}")
_DERIVED = re.compile(r"k[0-9a-f]{25}")
_DELEGATE = re.compile(r"d[0-9a-f]{24}")
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
MAX_PACKED_CHARS = 19
DERIVED_MARK, DELEGATE_MARK = 31, 30
"""Stand for the length of a packed id; no packed id has them."""
_LENGTH_BITS, _PACKED_BITS = 5, 122
_NAMESPACE = UUID("6d2b3c0e-52f7-5d0a-9a53-0c6f3f1f8f5e")


def to_uuid(conversation_id: str) -> UUID:
    """Return the UUID of a conversation."""
    if _MADE.fullmatch(conversation_id):
        found = UUID(int=_from_base32(conversation_id))
        if unpack_id(found) is None:
            return found
    if _DERIVED.fullmatch(conversation_id):
        return _pack(DERIVED_MARK, int(conversation_id[1:], 16))
    if _DELEGATE.fullmatch(conversation_id):
        return _pack(DELEGATE_MARK, int(conversation_id[1:], 16))
    if len(conversation_id) <= MAX_PACKED_CHARS:
        number = 0
        for character in conversation_id:
            number = number << 6 | _CHARACTERS.index(character)
        return _pack(len(conversation_id), number)
    try:
        found = UUID(conversation_id)
    except ValueError:
        return uuid5(_NAMESPACE, conversation_id)
    return found if unpack_id(found) is None else uuid5(_NAMESPACE, conversation_id)


def from_uuid(uuid: UUID) -> str:
    """Return the conversation id in the form of Deckhands for a UUID.

    It is another id if the conversation's own id is the UUID itself, or a longer id with a UUID of version 5.
    """
    return unpack_id(uuid) or _to_base32(uuid.int)


def _pack(length: int, number: int) -> UUID:
    """Return the UUID of version 8 with a length and a number in its 122 free bits."""
    packed = length << (_PACKED_BITS - _LENGTH_BITS) | number
    high, middle, low = packed >> 74, packed >> 62 & 0xFFF, packed & (1 << 62) - 1
    return UUID(int=high << 80 | 0x8 << 76 | middle << 64 | 0b10 << 62 | low)


def unpack_id(uuid: UUID) -> str | None:
    """Return the id that is packed into a UUID; None if it contains none."""
    value = uuid.int
    if value >> 76 & 0xF != 0x8 or value >> 62 & 0b11 != 0b10:
        return None
    packed = (value >> 80) << 74 | (value >> 64 & 0xFFF) << 62 | value & (1 << 62) - 1
    length = packed >> (_PACKED_BITS - _LENGTH_BITS)
    number = packed & (1 << _PACKED_BITS - _LENGTH_BITS) - 1
    if length == DERIVED_MARK:
        return f"k{number:025x}" if number < 1 << 100 else None
    if length == DELEGATE_MARK:
        return f"d{number:024x}" if number < 1 << 96 else None
    if not 0 < length <= MAX_PACKED_CHARS or number >> 6 * length:
        return None
    found = "".join(_CHARACTERS[number >> 6 * place & 0x3F] for place in reversed(range(length)))
    return found if is_conversation_id(found) else None


def _from_base32(text: str) -> int:
    number = 0
    for character in text:
        number = number << 5 | _BASE32.index(character)
    return number


def _to_base32(number: int) -> str:
    return "".join(_BASE32[number >> 5 * place & 0x1F] for place in reversed(range(26)))
