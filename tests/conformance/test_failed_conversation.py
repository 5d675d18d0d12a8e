"""A conversation with an unforeseen error fails, and its watchers are notified."""

from __future__ import annotations

from broker.contract.actions import CmdRunAction, MessageAction
from broker.contract.events import ConversationCreated, DelegateEnded, EventSource, Parent
from broker.contract.observations import ErrorObservation
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.limits.quotas import QuotaTable
from broker.log.event_log import EventLog
from broker.store.store import Store
from controller_worker.core.effects import Append
from controller_worker.loop.failed_conversation import rest_in_error
from controller_worker.loop.owned_log import OwnedLog
from controller_worker.loop.services import Services
from controller_worker.model.models import Models
from tests.broker_parts import CID, begin, enter

DELEGATE = "delegate-1"


async def owned_by(store: Store, worker_id: str, conversation_id: str) -> tuple[Services, OwnedLog]:
    log, owners = EventLog(store), Owners(store)
    services = Services(store, log, owners, Models({}, store.clock, QuotaTable()), QuotaTable())
    await enter(store, worker_id)
    claimed = await owners.claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation)
    return services, OwnedLog(claimed, services)


async def test_a_worker_that_lost_a_delegate_reports_no_failure(memory_store: Store) -> None:
    log = await begin(memory_store)
    created = ConversationCreated(conversation_id=DELEGATE, parent=Parent(conversation_id=CID, delegate_id=1))
    await log.create(created)
    services, owned = await owned_by(memory_store, "w1", DELEGATE)
    await memory_store.connection.call("HSET", memory_store.known_keys(DELEGATE).meta, "owner", "w2")
    assert await rest_in_error(services, owned, RuntimeError("unforeseen"))
    assert not [event for event in await log.read(CID) if isinstance(event, DelegateEnded)]


async def test_pending_actions_are_settled_although_an_event_has_arrived(memory_store: Store) -> None:
    log = await begin(memory_store)
    services, owned = await owned_by(memory_store, "w1", CID)
    await owned.restore()
    await owned.append(Append((CmdRunAction(command="sleep 60"),)))
    await log.append(CID, [MessageAction(content="Are you there?", source=EventSource.USER)])
    assert await rest_in_error(services, owned, RuntimeError("unforeseen"))
    events = await log.read(CID)
    (action,) = [event for event in events if isinstance(event, CmdRunAction)]
    assert [event.cause for event in events if isinstance(event, ErrorObservation)] == [action.id]
