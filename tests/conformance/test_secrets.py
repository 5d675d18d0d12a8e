"""Secrets of conversations: encrypted in the store, given by name, hidden for ever."""

from __future__ import annotations

import base64
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, EventSource
from broker.contract.specs import Tenancy
from broker.coordination.action_streams import ActionQueue
from broker.log.append_call import Appended, Conflict
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from broker.secrets.masking import MASK
from broker.secrets.references import SecretReference, SecretUnavailable
from broker.secrets.secrets import ENDPOINT_KEY, ENDPOINT_URL, Secrets, SecretsLocked, load_key_file, load_secret_key
from broker.store.connection import Argument
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock
from tests.broker_parts import LosingConnection, begin, claim, dispatch_one, enter, no_key, take
from tests.broker_parts import queue as make_queue

CID = "conversation-1"
KEY = bytes(range(32))
TOKEN = "ghp_0123456789abcdef"


@pytest.fixture
def secrets(store: Store) -> Secrets:
    return Secrets(store, lambda: KEY)


async def test_a_command_gets_what_it_names(secrets: Secrets) -> None:
    await secrets.put(CID, "TOKEN", TOKEN)
    await secrets.put(CID, "OTHER", "other-value-1")
    assert await secrets.list_names(CID) == ["OTHER", "TOKEN"]
    assert await secrets.find_named(CID, 'curl -H "Authorization: $TOKEN"') == {"TOKEN": TOKEN}
    both = {"TOKEN": TOKEN, "OTHER": "other-value-1"}
    assert await secrets.find_named(CID, "echo ${TOKEN}:${OTHER}") == both
    assert await secrets.find_named(CID, "echo $MY_TOKEN TOKENS") == {}
    assert await secrets.find_named("another", "echo $TOKEN") == {}


async def test_no_command_gets_the_endpoint_of_a_conversation(secrets: Secrets) -> None:
    await secrets.put(CID, ENDPOINT_URL, "http://engine:8000/v1")
    await secrets.put(CID, ENDPOINT_KEY, TOKEN)
    assert await secrets.find_named(CID, f"echo ${ENDPOINT_URL} ${ENDPOINT_KEY}") == {}
    assert (await secrets.load_masker(CID)).mask_text(TOKEN) == MASK


async def test_delegates_have_the_endpoint_of_their_parent(secrets: Secrets) -> None:
    assert await secrets.find_endpoint(CID) is None
    await secrets.put(CID, ENDPOINT_URL, "http://engine:8000/v1")
    await secrets.lend(CID, "delegate-1")
    assert await secrets.find_endpoint("delegate-1") == ("http://engine:8000/v1", "")
    await secrets.put(CID, ENDPOINT_KEY, TOKEN)
    found = await secrets.find_endpoint("delegate-1")
    assert found == ("http://engine:8000/v1", TOKEN)
    assert TOKEN not in repr(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (ENDPOINT_URL, "engine:8000/v1"),
        (ENDPOINT_URL, "file:///etc/passwd"),
        (ENDPOINT_KEY, "a key of two lines\r\nX: y"),
        (ENDPOINT_KEY, SecretReference(source="vault")),
    ],
)
async def test_bad_parts_of_an_endpoint_are_refused(secrets: Secrets, name: str, value: str | SecretReference) -> None:
    with pytest.raises(UsageError, match=name):
        await secrets.put(CID, name, value)


async def test_replaced_or_removed_secret_is_withheld_but_masked(secrets: Secrets) -> None:
    await secrets.put(CID, "TOKEN", TOKEN)
    await secrets.put(CID, "TOKEN", "a-newer-token")
    assert await secrets.find_named(CID, "TOKEN") == {"TOKEN": "a-newer-token"}
    await secrets.remove(CID, "TOKEN")
    assert await secrets.find_named(CID, "TOKEN") == {}
    masker = await secrets.load_masker(CID)
    assert masker.mask_text(f"{TOKEN} a-newer-token") == f"{MASK} {MASK}"


async def test_the_store_sees_no_value(store: Store, secrets: Secrets) -> None:
    await secrets.put(CID, "TOKEN", TOKEN)
    name, value = await store.connection.call("HGETALL", store.known_keys(CID).secrets)
    assert name == b"TOKEN"
    assert await store.connection.call("SMEMBERS", store.known_keys(CID).masked) == [value]
    assert TOKEN.encode() not in value
    assert len(value) == 12 + len(TOKEN) + 16
    await store.connection.call("HSET", store.known_keys("thief").secrets, "TOKEN", value)
    with pytest.raises(SecretsLocked):
        await secrets.find_named("thief", "TOKEN")


async def test_another_worker_knows_within_a_second(memory_store: Store, clock: ManualClock) -> None:
    here, elsewhere = Secrets(memory_store, lambda: KEY), Secrets(memory_store, lambda: KEY)
    assert not await elsewhere.load_masker(CID)
    await here.put(CID, "TOKEN", TOKEN)
    assert await here.load_masker(CID)
    clock.advance(0.9)
    assert not await elsewhere.load_masker(CID)
    clock.advance(0.1)
    assert await elsewhere.load_masker(CID)
    await here.put(CID, "TOKEN", "a-newer-token")
    assert await elsewhere.find_named(CID, "TOKEN") == {"TOKEN": "a-newer-token"}
    assert (await elsewhere.load_masker(CID)).mask_text("a-newer-token") == MASK


async def test_without_the_key_nothing_is_written(store: Store, secrets: Secrets) -> None:
    log = EventLog(store, Secrets(store, no_key))
    await log.create(ConversationCreated(conversation_id=CID))
    await secrets.put(CID, "TOKEN", TOKEN)
    locked = EventLog(store, Secrets(store, no_key))
    with pytest.raises(SecretsLocked, match="There are secrets, and no key for them"):
        await locked.append(CID, [MessageAction(content="x", source=EventSource.USER)])
    with pytest.raises(SecretsLocked, match="were encrypted with another key"):
        await Secrets(store, lambda: b"x" * 32).find_named(CID, "TOKEN")


async def test_everything_appended_is_hidden_and_the_title_too(store: Store, secrets: Secrets) -> None:
    await secrets.put(CID, "TOKEN", TOKEN)
    log = EventLog(store, secrets)
    await log.create(ConversationCreated(conversation_id=CID, title=f"use {TOKEN}"))
    encoded = base64.b64encode(TOKEN.encode()).decode()
    message, hidden = MessageAction(content=f"it is {TOKEN}, {encoded}"), f"it is {MASK}, {MASK}{encoded[-2:]}"
    assert [event.content for event in (await log.mask(CID, [message])).events] == [hidden]
    await log.append(CID, [message])
    created, said = await log.read(CID)
    assert (created.title, said.content) == (f"use {MASK}", hidden)
    assert await store.connection.call("HGET", store.known_keys(CID).meta, "title") == f"use {MASK}".encode()


async def test_owner_masks_once_but_never_misses_a_new_secret(store: Store, secrets: Secrets) -> None:
    await secrets.put(CID, "TOKEN", TOKEN)
    log = EventLog(store, secrets)
    await log.create(ConversationCreated(conversation_id=CID))
    await enter(store, "w1")
    ownership = await claim(store, "w1", CID)
    later = "another-secret-of-the-same-conversation"
    masked = await log.mask(CID, [MessageAction(content=f"{TOKEN} {later}")])
    assert masked.is_masked(0, await log.load_masker(CID))
    assert not masked.is_masked(1, await log.load_masker(CID))
    await secrets.put(CID, "LATER", later)
    assert not masked.is_masked(0, await log.load_masker(CID))
    events = [*masked.events, MessageAction(content=f"also {TOKEN}")]
    # The owner's fold does not match the log: it decides again.
    assert await log.append_as_owner(ownership, events, expected_last_id=1, masked=masked) == Conflict(1)
    masked = await log.mask(CID, masked.events)
    events = [*masked.events, events[1]]
    assert isinstance(await log.append_as_owner(ownership, events, expected_last_id=1, masked=masked), Appended)
    assert [event.content for event in await log.read(CID, after=1)] == [f"{MASK} {MASK}", f"also {MASK}"]


async def test_an_append_looks_up_secrets_that_came_a_moment_ago(store: Store, secrets: Secrets) -> None:
    log = EventLog(store, Secrets(store, lambda: KEY))
    await log.create(ConversationCreated(conversation_id=CID))
    await log.append(CID, [MessageAction(content="nothing to hide yet")])
    await secrets.put(CID, "TOKEN", TOKEN)  # elsewhere
    await log.append(CID, [MessageAction(content=f"it is {TOKEN}")])
    await secrets.put(CID, "OTHER", "other-value-1")
    await store.connection.call("SET", store.known_keys(CID).secrets_of, "parent")
    await secrets.put("parent", "LENT", "lent-value-1")
    await log.append(CID, [MessageAction(content="lent-value-1 other-value-1")])
    *_, said, lent = await log.read(CID)
    assert (said.content, lent.content) == (f"it is {MASK}", f"{MASK} {MASK}")


async def test_long_texts_are_kept_in_several_requests(memory_store: Store) -> None:
    sent: list[int] = []

    class Counting(LosingConnection):
        async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
            sent.append(sum(len(part) for each in commands for part in each if isinstance(part, bytes)))
            return await super().call_many(commands)

    await begin(memory_store)
    counted = replace(memory_store, connection=Counting(memory_store.connection, lambda _: False))
    texts = [str(n) * (3 << 20) for n in range(4)]
    await EventLog(counted).append(CID, [MessageAction(content=text) for text in texts])
    assert max(sent) <= 2 * (4 << 20)
    blobs = EventLog(memory_store).blobs
    events = (await EventLog(memory_store).read(CID))[1:]
    assert [(await blobs.restore_event(CID, event)).content for event in events] == texts


async def test_a_claim_brings_the_secrets(store: Store, secrets: Secrets, queue: Callable[..., ActionQueue]) -> None:
    await dispatch_one(store, t1="n1")
    await secrets.put(CID, "TOKEN", TOKEN)
    reader = queue()
    claimed = await reader.claim(await take(reader))
    for name in ("secrets", "masked"):  # nothing is looked up
        await store.connection.call("DEL", getattr(store.known_keys(CID), name))
    held = Secrets(store, lambda: KEY)
    assert await held.find_named(CID, "echo $TOKEN", claimed=claimed.secrets) == {"TOKEN": TOKEN}
    assert (await held.load_masker(CID)).mask_text(TOKEN) == MASK


async def test_a_secret_is_hidden_after_its_conversation_id_is_reused(store: Store, secrets: Secrets) -> None:
    log = EventLog(store, Secrets(store, lambda: KEY))
    await log.create(ConversationCreated(conversation_id=CID))
    await secrets.put(CID, "TOKEN", TOKEN)
    await log.append(CID, [MessageAction(content=TOKEN)])
    await Deletion(store).delete(CID, last_id=2)
    await EventLog(store).create(ConversationCreated(conversation_id=CID))
    await secrets.put(CID, "TOKEN", "another-secret-1")
    await log.append(CID, [MessageAction(content="it is another-secret-1")])
    assert (await log.read(CID))[-1].content == f"it is {MASK}"


async def test_an_owner_writes_though_its_masker_was_evicted(store: Store, secrets: Secrets) -> None:
    log = EventLog(store, Secrets(store, lambda: KEY, remembered=1))
    await enter(store, "w1")
    for conversation_id in ("conversation-1", "conversation-2"):
        await log.create(ConversationCreated(conversation_id=conversation_id))
        await secrets.put(conversation_id, "TOKEN", TOKEN)
    ownership = await claim(store, "w1", CID)
    await log.secrets.look_up(CID)
    masked = await log.mask("conversation-1", [MessageAction(content=TOKEN)])
    assert [event.content for event in masked.events] == [MASK]
    others = await log.mask("conversation-2", [MessageAction(content=TOKEN)])
    assert [event.content for event in others.events] == [MASK]
    outcome = await log.append_as_owner(ownership, masked.events, expected_last_id=1, masked=masked)
    assert isinstance(outcome, Appended)


async def test_secrets_used_last_are_remembered_longest(store: Store, secrets: Secrets) -> None:
    held = Secrets(store, lambda: KEY, remembered=2)
    for conversation_id in ("one", "two", "three"):
        await secrets.put(conversation_id, "TOKEN", TOKEN)
    await held.look_up("one")
    await held.look_up("two")
    await held.get_cached_masker("one")
    await held.look_up("three")
    assert (await held.get_cached_masker("one"))[0].values == {TOKEN}
    assert not (await held.get_cached_masker("two"))[0]


async def test_an_old_claim_gives_a_command_no_replaced_secret(memory_store: Store, clock: ManualClock) -> None:
    here, held = (Secrets(memory_store, lambda: KEY) for _ in range(2))
    await dispatch_one(memory_store, t1="n1")
    await here.put(CID, "TOKEN", TOKEN)
    reader = make_queue(memory_store, "t1", node="n1")
    claimed = await reader.claim(await take(reader))
    await here.put(CID, "TOKEN", "a-newer-token")
    clock.advance(0.5)
    assert (await held.load_masker(CID)).mask_text("a-newer-token") == MASK
    assert await held.find_named(CID, "echo $TOKEN", claimed=claimed.secrets) == {"TOKEN": TOKEN}
    assert (await held.load_masker(CID)).mask_text("a-newer-token") == MASK  # newer knowledge stays
    clock.advance(1.5)
    assert await held.find_named(CID, "echo $TOKEN", claimed=claimed.secrets) == {"TOKEN": "a-newer-token"}
    await reader.aclose()


@pytest.mark.parametrize(
    ("name", "value"), [("1X", TOKEN), ("A-B", TOKEN), ("", TOKEN), ("X", "k9w2"), ("X", "a\0bcdefgh")]
)
async def test_invalid_secrets_are_refused(secrets: Secrets, name: str, value: str) -> None:
    with pytest.raises(UsageError) as refused:
        await secrets.put(CID, name, value)
    assert value not in str(refused.value)


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    text = base64.b64encode(KEY).decode()
    (tmp_path / "file").write_text(f"{text}\n")
    home = BrokerSettings(home=tmp_path / "home")
    assert load_secret_key(BrokerSettings(secret_key=text)) == KEY
    assert load_secret_key(BrokerSettings(secret_key_file=str(tmp_path / "file"))) == KEY
    assert load_secret_key(home) is None
    made = load_secret_key(home, is_made=True)
    assert made is not None
    assert len(made) == 32
    assert load_secret_key(home) == made == load_secret_key(home, is_made=True)
    assert stat.S_IMODE((tmp_path / "home" / "secret.key").stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="is not 32 bytes in base64"):
        load_secret_key(BrokerSettings(secret_key="c2hvcnQ="))
    with pytest.raises(UsageError, match=r"The key file .* does not exist"):
        load_secret_key(BrokerSettings(secret_key_file=str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="cannot be read"):
        load_key_file(tmp_path, is_made=False)


async def test_delegate_has_the_current_secrets_of_its_ancestors(store: Store, secrets: Secrets) -> None:
    await secrets.lend("parent", "child")
    await secrets.lend("child", "grandchild")
    assert not await secrets.load_masker("grandchild")
    elsewhere = Secrets(store, lambda: KEY)
    await elsewhere.put("parent", "TOKEN", TOKEN)
    assert await secrets.find_named("grandchild", "echo $TOKEN") == {"TOKEN": TOKEN}
    assert (await secrets.load_masker("grandchild")).mask_text(TOKEN) == MASK
    await secrets.put("child", "TOKEN", "a-token-of-its-own")
    assert await secrets.find_named("grandchild", "echo $TOKEN") == {"TOKEN": "a-token-of-its-own"}
    assert await secrets.find_named("parent", "echo $TOKEN") == {"TOKEN": TOKEN}
    assert (await secrets.load_masker("parent")).mask_text("a-token-of-its-own") == "a-token-of-its-own"
    assert await secrets.list_names("child") == ["TOKEN"]


async def test_a_ring_of_lenders_ends(secrets: Secrets) -> None:
    await secrets.lend("a", "b")
    await secrets.lend("b", "a")
    await secrets.put("a", "TOKEN", TOKEN)
    assert await secrets.find_named("b", "$TOKEN") == {"TOKEN": TOKEN}


async def test_secrets_of_the_worker_are_masked_everywhere(store: Store) -> None:
    log = EventLog(store, Secrets(store, lambda: KEY, own=("servers-own-token", "short")))
    for conversation_id in ("number-one", "number-two"):
        await log.create(ConversationCreated(conversation_id=conversation_id))
        await log.secrets.put(conversation_id, "TOKEN", f"secret-of-{conversation_id}")
        text = f"servers-own-token secret-of-{conversation_id} short secret-of-nobody"
        await log.append(conversation_id, [MessageAction(content=text, source=EventSource.USER)])
        assert (await log.read(conversation_id))[-1].content == f"{MASK} {MASK} short secret-of-nobody"


class Rotating:
    """A source whose value changes; it notes who asked."""

    def __init__(self) -> None:
        self.value = "first-value"
        self.asked: list[tuple[str, str]] = []

    async def look_up(self, reference: SecretReference, *, tenant: str) -> str:
        self.asked.append((str(reference), tenant))
        if not self.value:
            raise SecretUnavailable("the source vault answered with status 503.", remedy="Try again.")
        return self.value


REFERENCE = SecretReference(source="vault", path="team/api", field="token")


async def test_referenced_secret_is_looked_up_at_each_use(store: Store) -> None:
    source = Rotating()
    secrets, elsewhere = Secrets(store, lambda: KEY, sources=source), Secrets(store, lambda: KEY)
    await elsewhere.put(CID, "TOKEN", REFERENCE)
    assert await secrets.list_names(CID) == ["TOKEN"]
    assert await secrets.find_named(CID, "echo hello") == {}
    assert source.asked == []
    assert await secrets.find_named(CID, "curl $TOKEN") == {"TOKEN": "first-value"}
    source.value = "rotated-value"
    assert await secrets.find_named(CID, "curl $TOKEN") == {"TOKEN": "rotated-value"}
    assert source.asked == [("vault:team/api#token", "")] * 2
    masker = await Secrets(store, lambda: KEY).load_masker(CID)  # in any other process
    assert masker.mask_text("first-value rotated-value") == f"{MASK} {MASK}"
    assert (await secrets.load_masker(CID)).mask_text("rotated-value") == MASK


async def test_looked_up_value_is_stored_once_and_encrypted(store: Store) -> None:
    secrets = Secrets(store, lambda: KEY, sources=Rotating())
    await secrets.put(CID, "TOKEN", REFERENCE)
    for _ in range(3):
        await secrets.find_named(CID, "$TOKEN")
    names = store.known_keys(CID)
    hidden = await store.connection.call("SMEMBERS", names.masked)
    _, kept = await store.connection.call("HGETALL", names.secrets)
    assert len(hidden) == 2  # the reference and the value
    assert b"first-value" not in b"".join([kept, *hidden])
    assert b"vault" not in b"".join([kept, *hidden])


async def test_append_waits_for_a_value_that_was_just_looked_up(store: Store) -> None:
    log = EventLog(store, Secrets(store, lambda: KEY))
    await log.create(ConversationCreated(conversation_id=CID))
    await log.append(CID, [MessageAction(content="It is first-value.", source=EventSource.USER)])
    assert (await log.read(CID))[-1].content == "It is first-value."  # type: ignore[attr-defined]
    secrets = Secrets(store, lambda: KEY, sources=Rotating())
    await secrets.put(CID, "TOKEN", REFERENCE)
    await secrets.find_named(CID, "$TOKEN")
    await log.append(CID, [MessageAction(content="It is first-value.", source=EventSource.USER)])
    assert (await log.read(CID))[-1].content == f"It is {MASK}."  # type: ignore[attr-defined]


async def test_source_that_fails_names_the_secret(store: Store) -> None:
    source = Rotating()
    secrets = Secrets(store, lambda: KEY, sources=source)
    await secrets.put(CID, "TOKEN", REFERENCE)
    source.value = ""
    with pytest.raises(SecretUnavailable, match=r"TOKEN cannot be looked up, so nothing was run: .*status 503"):
        await secrets.find_named(CID, "$TOKEN")
    source.value = "short"
    with pytest.raises(SecretUnavailable, match=r"TOKEN has 5 characters.*Change it in the source vault"):
        await secrets.find_named(CID, "$TOKEN")
    source.value = "first-value"
    assert await secrets.find_named(CID, "$TOKEN") == {"TOKEN": "first-value"}


async def test_delegate_looks_up_for_its_parent(store: Store) -> None:
    source = Rotating()
    secrets = Secrets(store, lambda: KEY, sources=source)
    await EventLog(store).create(ConversationCreated(conversation_id=CID, tenancy=Tenancy(tenant="acme")))
    await secrets.put(CID, "TOKEN", REFERENCE)
    await secrets.lend(CID, "delegate")
    assert await secrets.find_named("delegate", "$TOKEN") == {"TOKEN": "first-value"}
    assert source.asked == [("vault:team/api#token", "acme")]
    for conversation_id in (CID, "delegate"):
        masker = await Secrets(store, lambda: KEY).load_masker(conversation_id)
        assert masker.mask_text("first-value") == MASK


async def test_endless_rotation_ends_in_an_error(store: Store) -> None:
    source = Rotating()
    secrets = Secrets(store, lambda: KEY, sources=source, max_hidden=3)
    await secrets.put(CID, "TOKEN", REFERENCE)
    for value in ("first-value", "second-value"):
        source.value = value
        await secrets.find_named(CID, "$TOKEN")
    source.value = "third-value"
    with pytest.raises(SecretUnavailable, match="TOKEN has a new value, and 3 values are hidden"):
        await secrets.find_named(CID, "$TOKEN")
    source.value = "second-value"
    assert await secrets.find_named(CID, "$TOKEN") == {"TOKEN": "second-value"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("vault", ("vault", "", "")),
        ("vault:team/api", ("vault", "team/api", "")),
        ("vault:team/api#data.token", ("vault", "team/api", "data.token")),
        ("vault#token", ("vault", "", "token")),
        ("", None),
        (":a", None),
        ("vault:a b", None),
        ("vault:a#b#c", None),
        ("va ult:a", None),
    ],
)
def test_reference_is_written_as_text(text: str, found: tuple[str, str, str] | None) -> None:
    if found is None:
        with pytest.raises(UsageError, match="does not name the source of a secret"):
            SecretReference.parse(text)
    else:
        reference = SecretReference.parse(text)
        assert (reference.source, reference.path, reference.field) == found
        assert str(reference) == text
