"""Maps UUIDs to conversations that a principal may see, and checks ids chosen by clients.

The UUID of a longer id has version 5, and is compared with those of the tenant's latest conversations.
"""

from __future__ import annotations

import contextlib
from uuid import UUID

from broker.log import ConversationQuery, Selection
from broker.runtime import UnknownConversation, new_conversation_id
from deckhands.interop import from_uuid, to_uuid, unpack_id
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.problems import Problem

MAX_COMPARED = 500
"""How many conversations are compared with a UUID of version 5."""


async def find_conversation(gateway: Gateway, principal: Principal, text: str) -> str:
    """Return the conversation of a UUID, or of an id of Deckhands, if the principal may see it.

    Raises:
        UnknownConversation: the conversation does not exist, or belongs to another tenant.
    """
    try:
        uuid = UUID(text)
    except ValueError:
        return await gateway.require_visible(principal, text)
    for name in (from_uuid(uuid), str(uuid), uuid.hex):
        with contextlib.suppress(UnknownConversation):
            return await gateway.require_visible(principal, name)
    if uuid.version != 5:
        raise UnknownConversation(text)
    tenant = None if principal.is_for_all_tenants else principal.tenant
    rows, _ = await ConversationQuery(gateway.store, Selection(tenant=tenant)).load_page(None, limit=MAX_COMPARED)
    for row in rows:
        if to_uuid(row.conversation_id) == uuid:
            return await gateway.require_visible(principal, row.conversation_id)
    raise UnknownConversation(text)


async def choose_id(gateway: Gateway, uuid: UUID | None, name: str) -> str:
    """Return the id of a new conversation, which a client may have chosen.

    Ids in Deckhands' own forms are reserved for its other interfaces, which may derive them from keys of other tenants.

    Args:
        name: the field that has the UUID, for errors.

    Raises:
        Problem: the UUID stands for an id in Deckhands' own form, or another conversation has it, in the store or the
            archive.
    """
    if uuid is None:
        return new_conversation_id()
    if unpack_id(uuid) is not None:
        raise Problem(422, "bad_id", f"{name}: it has the form of an id of Deckhands.", remedy="Send a random UUID.")
    conversation_id = from_uuid(uuid)
    try:
        await gateway.tenant_of(conversation_id)
    except UnknownConversation:
        return conversation_id
    raise Problem(409, "conflict", f"{name}: another conversation has it.", remedy="Send another one, or none.")
