"""Operations on archived conversations: restore one into the store, lend its upload to a fork, or delete its files.

Holds: an archived file is untrusted input: it is checked as a whole before any part of it is written to the store.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import ConversationCreated, DelegateEnded, Event, UploadedSource, WorkspaceSpec
from broker.coordination import StoredFiles
from broker.limits import MAX_USD, Ledger, list_accounts
from broker.log import EventLog, check_blobs, find_violations, list_binary
from broker.runtime import CorruptEntry, UnknownConversation, UsageError, is_conversation_id
from broker.store import Store
from deckhands.client.archive.archive import Archive as Archive  # noqa: PLC0414  (callers get it from here)
from deckhands.client.archive.archive import ArchivedConversation as ArchivedConversation  # noqa: PLC0414
from deckhands.client.archive.archive import describe_all as describe_all  # noqa: PLC0414
from deckhands.client.errors import IsBeingDeleted
from deckhands.client.reading.metrics import compute_spending

MAX_FORGOTTEN = 10_000


async def restore(log: EventLog, archive: Archive | None, conversation_id: str) -> bool:
    """Restore a conversation into the store; see `Client.restore`."""
    store = log.store
    meta = (await store.locate(conversation_id)).meta
    last_id, deleted = await store.call("HMGET", meta, "last_id", "deleted")
    if deleted is not None:
        raise IsBeingDeleted(conversation_id)
    if last_id is not None:
        return False
    manifest = await archive.manifest(conversation_id) if archive is not None else None
    if archive is None or manifest is None:
        raise UnknownConversation(conversation_id)
    if manifest.parent:
        raise UsageError(
            f"The conversation {conversation_id} is a delegate of {manifest.parent}.",
            remedy="Restore the parent. The log of a delegate can be read in the archive.",
        )
    events = await archive.read_checked(conversation_id)
    created = events[0]
    if not isinstance(created, ConversationCreated) or created.conversation_id != conversation_id:
        raise UsageError(f"The archived log of {conversation_id} does not start with that conversation.")
    wrong = find_violations(events, conversation_id=conversation_id, is_over=False)
    if wrong or any(isinstance(event, ConversationCreated) for event in events[1:]):
        why = wrong[0] if wrong else "it starts twice"
        raise UsageError(f"The archived log of {conversation_id} cannot be one: {why}.")
    own_usd = compute_spending(events).spent_usd
    new = events[created.forked_at :]  # the origin of a fork has paid for the delegates before
    delegates_usd = sum(event.cost_usd for event in new if isinstance(event, DelegateEnded))
    if not all(0 <= usd <= MAX_USD for usd in (own_usd, delegates_usd)):  # also rejects NaN
        raise UsageError(f"The archived log of {conversation_id} cannot be one: its costs are not valid amounts.")
    source = created.workspace.source
    content = await archive.upload(conversation_id, source.parcel) if isinstance(source, UploadedSource) else None
    tenancy = created.tenancy
    accounts = list_accounts(conversation_id, tenant=tenancy.tenant, experiment=tenancy.experiment) if tenancy else []
    await Ledger(store).restore_account(accounts, total_usd=own_usd, delegates_usd=delegates_usd)

    blobs = check_blobs(await archive.binary_blobs(conversation_id, events), list_binary(events))

    async def create(shards: int) -> None:
        if isinstance(source, UploadedSource):
            await StoredFiles(store).keep(conversation_id, content or b"")
        await log.create_from(created, events[1:], key=f"restore:{manifest.first_sha256}", shards=shards, blobs=blobs)

    await store.repeat_if_raised(conversation_id, create)
    return True


async def load_binary(
    log: EventLog, archive: Archive | None, conversation_id: str, events: Sequence[Event]
) -> dict[str, bytes]:
    """Return the binary blobs of a conversation's events, by address, from the store or the archive.

    Raises:
        CorruptEntry: a blob is missing in both, or damaged.
    """
    addresses = list_binary(events)
    if not addresses:
        return {}
    found = await log.blobs.fetch(conversation_id, addresses)
    if archive is not None and len(found) < len(set(addresses)):
        found = {**await archive.binary_blobs(conversation_id, events), **found}
    return check_blobs(found, addresses)


async def lend_upload(
    store: Store, archive: Archive | None, source_id: str, target_id: str, workspace: WorkspaceSpec
) -> None:
    """Give a fork the uploaded file that its origin started with, from the store or the archive. Idempotent.

    Raises:
        CorruptEntry: the file is in neither.
    """
    files, source = StoredFiles(store), workspace.source
    try:
        await files.copy_to(source_id, target_id, source)
    except CorruptEntry:
        content = None
        if archive is not None and isinstance(source, UploadedSource):
            content = await archive.upload(source_id, source.parcel)
        if content is None:
            raise
        await files.keep(target_id, content)


async def remove_files(archive: Archive, conversation_id: str, *, tenant: str | None = None) -> bool:
    """Delete the archived files of a conversation and its delegates; return whether it had one. Idempotent.

    A file that belongs to another conversation is kept, even if this conversation's file names it.

    Args:
        tenant: the tenant of the conversation; a file with the same id of another tenant is kept. None for any tenant.
    """
    manifest = await archive.manifest(conversation_id)
    if manifest is None or tenant not in (None, manifest.tenant):
        return False
    found = {conversation_id}
    wanted = [(conversation_id, name) for name in manifest.delegates]
    while wanted and len(found) < MAX_FORGOTTEN:
        parent_id, delegate_id = wanted.pop()
        delegate = await archive.manifest(delegate_id) if is_conversation_id(delegate_id) else None
        is_own = delegate is not None and (delegate.parent, delegate.tenant) == (parent_id, manifest.tenant)
        if delegate is not None and is_own and delegate_id not in found:
            found.add(delegate_id)
            wanted += [(delegate_id, name) for name in delegate.delegates]
    # its own file last, because it names the others
    for doomed in sorted(found, key=lambda name: name == conversation_id):
        await archive.remove(doomed)
    return True
