"""The ids of conversations as UUIDs, which is the form that OpenHands' clients use.

An id that Deckhands makes has 128 bits, and so has a UUID: each stands for exactly one of the other kind. Ids made from
an idempotency key, and ids of up to 19 characters that a program has chosen, are packed into UUIDs of version 8. A
longer id of another form has a UUID of version 5, which is found by comparing it with the conversations of the tenant.

Holds: the UUID of a conversation never changes, at any server.
"""

from __future__ import annotations

import re
from uuid import UUID, uuid5

from broker.log import ConversationQuery, Selection
from broker.runtime import UnknownConversation, is_conversation_id, new_conversation_id
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.problems import Problem

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_MADE = re.compile(rf"[0-7][{_BASE32}]{{25}}")
_DERIVED = re.compile(r"k[0-9a-f]{25}")
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
MAX_PACKED_CHARS = 19
DERIVED_MARK = 31
"""Stands for the length of a packed id; no packed id has it."""
_LENGTH_BITS, _PACKED_BITS = 5, 122
_NAMESPACE = UUID("6d2b3c0e-52f7-5d0a-9a53-0c6f3f1f8f5e")


def to_uuid(conversation_id: str) -> UUID:
    """Return the UUID of a conversation."""
    if _MADE.fullmatch(conversation_id):
        found = UUID(int=_from_base32(conversation_id))
        if _unpack(found) is None:
            return found
    if _DERIVED.fullmatch(conversation_id):
        return _pack(DERIVED_MARK, int(conversation_id[1:], 16))
    if len(conversation_id) <= MAX_PACKED_CHARS:
        number = 0
        for character in conversation_id:
            number = number << 6 | _CHARACTERS.index(character)
        return _pack(len(conversation_id), number)
    return uuid5(_NAMESPACE, conversation_id)


def from_uuid(uuid: UUID) -> str:
    """Return the conversation that a UUID stands for, unless its version is 5 and it has a longer id."""
    return _unpack(uuid) or _to_base32(uuid.int)


async def find_conversation(gateway: Gateway, principal: Principal, text: str) -> str:
    """Return the conversation of a UUID, or of an id of Deckhands, if the principal may see it.

    Raises:
        UnknownConversation: it does not exist, or belongs to another tenant.
    """
    try:
        uuid = UUID(text)
    except ValueError:
        return await gateway.require_visible(principal, text)
    try:
        return await gateway.require_visible(principal, from_uuid(uuid))
    except UnknownConversation:
        if uuid.version != 5:
            raise
    tenant = None if principal.is_for_all_tenants else principal.tenant
    rows, _ = await ConversationQuery(gateway.store, Selection(tenant=tenant)).load_page(None, limit=500)
    for row in rows:
        if to_uuid(row.conversation_id) == uuid:
            return await gateway.require_visible(principal, row.conversation_id)
    raise UnknownConversation(text)


async def choose_id(gateway: Gateway, uuid: UUID | None, name: str) -> str:
    """Return the id of a new conversation, which a client may have chosen.

    Ids in the forms of Deckhands belong to its other ways in, which derive them from keys of other tenants.

    Args:
        name: the field that has the UUID, for errors.

    Raises:
        Problem: the UUID stands for an id of Deckhands' own form, or another conversation has it, here or archived.
    """
    if uuid is None:
        return new_conversation_id()
    if _unpack(uuid) is not None:
        raise Problem(422, "bad_id", f"{name}: it has the form of an id of Deckhands.", remedy="Send a random UUID.")
    conversation_id = from_uuid(uuid)
    try:
        await gateway.tenant_of(conversation_id)
    except UnknownConversation:
        return conversation_id
    raise Problem(409, "conflict", f"{name}: another conversation has it.", remedy="Send another one, or none.")


def _pack(length: int, number: int) -> UUID:
    """Return the UUID of version 8 with a length and a number in its 122 free bits."""
    packed = length << (_PACKED_BITS - _LENGTH_BITS) | number
    high, middle, low = packed >> 74, packed >> 62 & 0xFFF, packed & (1 << 62) - 1
    return UUID(int=high << 80 | 0x8 << 76 | middle << 64 | 0b10 << 62 | low)


def _unpack(uuid: UUID) -> str | None:
    """Return the id that is packed into a UUID; None if none is."""
    value = uuid.int
    if value >> 76 & 0xF != 0x8 or value >> 62 & 0b11 != 0b10:
        return None
    packed = (value >> 80) << 74 | (value >> 64 & 0xFFF) << 62 | value & (1 << 62) - 1
    length = packed >> (_PACKED_BITS - _LENGTH_BITS)
    number = packed & (1 << _PACKED_BITS - _LENGTH_BITS) - 1
    if length == DERIVED_MARK:
        return f"k{number:025x}" if number < 1 << 100 else None
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
