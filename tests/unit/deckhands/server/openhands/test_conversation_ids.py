"""Ids of conversations and UUIDs stand for each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.runtime import new_conversation_id
from broker.runtime.ids import make_delegate_id
from deckhands.client.tasks.tasks import derive_conversation_id
from deckhands.interop import from_uuid, to_uuid

UUIDS = st.integers(min_value=0, max_value=2**128 - 1).map(lambda number: UUID(int=number))
CHOSEN = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{2,18}", fullmatch=True)


@given(UUIDS)
def test_every_uuid_stands_for_one_conversation(uuid: UUID) -> None:
    assert to_uuid(from_uuid(uuid)) == uuid


@given(CHOSEN)
def test_short_id_is_packed_into_its_uuid(conversation_id: str) -> None:
    assert from_uuid(to_uuid(conversation_id)) == conversation_id
    assert to_uuid(conversation_id).version == 8


@pytest.mark.parametrize("make", [new_conversation_id, lambda: derive_conversation_id("key")], ids=["made", "derived"])
def test_id_of_deckhands_survives_the_way_through_a_uuid(make: Callable[[], str]) -> None:
    conversation_id = make()
    assert from_uuid(to_uuid(conversation_id)) == conversation_id


def test_id_of_a_delegate_is_packed_into_its_uuid() -> None:
    delegate = make_delegate_id("parent", 7)
    assert from_uuid(to_uuid(delegate)) == delegate


def test_id_that_is_a_uuid_stands_for_itself() -> None:
    known = UUID("5b5f7a3e-7f0f-4a55-9c0b-2b8a5f7c1d2e")
    assert to_uuid(str(known)) == to_uuid(known.hex) == known


def test_longer_ids_have_different_uuids_of_version_five() -> None:
    found = {to_uuid(f"a-conversation-with-a-long-name-{n}") for n in range(100)}
    assert len(found) == 100
    assert {uuid.version for uuid in found} == {5}


def test_random_uuids_of_clients_are_no_packed_ids() -> None:
    chance = random.Random(1)
    for _ in range(1_000):
        uuid = UUID(int=chance.getrandbits(128), version=4)
        assert len(from_uuid(uuid)) == 26
