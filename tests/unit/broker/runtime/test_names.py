"""Ids, keys, clocks and the errors' tree."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.runtime import errors
from broker.runtime.clock import from_millis, to_millis
from broker.runtime.errors import DeckhandsError, UsageError
from broker.runtime.ids import check_conversation_id, draw_jitter, new_conversation_id, new_key
from broker.store import keys


def test_conversation_ids_sort_by_time_and_never_repeat() -> None:
    ids = [new_conversation_id() for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    assert {len(cid) for cid in ids} == {26}
    times = [cid[:12] for cid in ids]
    assert times == sorted(times)
    assert all(check_conversation_id(cid) == cid for cid in ids)


@pytest.mark.parametrize("good", ["abc", "a-b_c", "0" * 64, "A1_"])
def test_ids_that_can_be_used(good: str) -> None:
    assert check_conversation_id(good) == good


@pytest.mark.parametrize(
    "bad", ["", "ab", "-abc", "_abc", "a b", "a:b", "a|bc", "a/bc", "ünï", "a" * 65, "abc\n", "{a}b"]
)
def test_ids_that_cannot_be_used(bad: str) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        check_conversation_id(bad)


def test_keys_and_jitter_are_drawn_anew() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    factors = [draw_jitter() for _ in range(200)]
    assert 0.5 <= min(factors) < 0.7
    assert 1.3 < max(factors) < 1.5


def test_shards_are_chosen_as_redis_cluster_chooses_slots() -> None:
    assert keys.shard_of("123456789", 1 << 16) == 0x31C3  # the check value of CRC-16/XMODEM
    assert keys.shard_of("foo", 16_384) == 12_182  # CLUSTER KEYSLOT foo
    assert {keys.shard_of(f"conversation-{n}", 8) for n in range(200)} == set(range(8))
    assert keys.shard_of("anything", 1) == 0


def test_every_key_of_a_conversation_is_in_its_shards_slot() -> None:
    names = keys.conversation_keys("conversation-1", 16)
    tag = f"deck:{{{keys.shard_of('conversation-1', 16)}}}"
    assert names.events == f"{tag}:c:conversation-1:events"
    assert names.blob("ab") == f"{tag}:c:conversation-1:blob:ab"
    shard = names.shard
    for name in (
        *(names.meta, names.once, names.snapshot),
        *(shard.ready, shard.index, shard.dead, shard.parked, shard.workers, shard.takeovers),
        *(shard.mailbox("w"), shard.worker_facts("w"), shard.actions("pool:bash")),
    ):
        assert name.startswith(f"{tag}:")


def test_milliseconds_are_for_the_store_only() -> None:
    assert from_millis(1_767_225_600_123) == datetime(2026, 1, 1, 0, 0, 0, 123_000, tzinfo=UTC)
    assert to_millis(datetime(2026, 1, 1, 0, 0, 0, 123_999, tzinfo=UTC)) == 1_767_225_600_123


def _subclasses(error_class: type[DeckhandsError]) -> list[type[DeckhandsError]]:
    return [error_class, *(below for child in error_class.__subclasses__() for below in _subclasses(child))]


def test_the_tree_of_errors_is_drawn_whole() -> None:
    drawn = errors.__doc__ or ""
    ours = [
        error_class for error_class in _subclasses(DeckhandsError) if error_class.__module__ == "broker.runtime.errors"
    ]
    assert [error_class.__name__ for error_class in ours if error_class.__name__ not in drawn] == []
    assert len({error_class.code for error_class in ours}) == len(ours)
    retryable = {error_class.__name__ for error_class in ours if error_class.retryable}
    assert retryable == {
        *("AdmissionRefused", "ConversationBusy", "FunctionsTooOld", "OutcomeUnknown", "ShardsRaised"),
        "StoreUnavailable",
    }
