"""Tokens that wait compressed are the same ones afterwards."""

from __future__ import annotations

from array import array

from controller_worker.providers.packed_tokens import PackedTokens


def test_unpacked_tokens_are_those_added_in_order() -> None:
    packed = PackedTokens(array("i", [1, 151_000, 0]))
    packed.add(array("i", [7]))
    packed.add(array("i"))
    assert packed.unpack() == array("i", [1, 151_000, 0, 7])
    assert len(packed) == 4


def test_no_tokens_are_an_empty_prefix() -> None:
    assert not PackedTokens()
    assert not PackedTokens(array("i"))
    assert PackedTokens().unpack() == array("i")


def test_repeated_tokens_take_less_memory() -> None:
    tokens = array("i", range(100)) * 100
    (part,) = PackedTokens(tokens)._parts
    assert len(part) < len(tokens.tobytes()) / 4
