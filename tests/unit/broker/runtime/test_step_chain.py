"""A chain of steps around a call."""

from __future__ import annotations

import pytest

from broker.runtime.chain import Rest, Step, make_chain


def noting(name: str, notes: list[str]) -> Step[str, str]:
    async def step(call: str, rest: Rest[str, str]) -> str:
        notes.append(f"{name} before")
        try:
            return f"{name}({await rest(call)})"
        finally:
            notes.append(f"{name} after")

    return step


async def answer(call: str) -> str:
    return call


async def refuse(call: str, rest: Rest[str, str]) -> str:
    return f"refused {call}"


async def fail(call: str) -> str:
    raise ValueError(call)


async def test_steps_wrap_those_after_them() -> None:
    notes: list[str] = []
    run = make_chain([noting("outer", notes), None, noting("inner", notes)], last=answer)
    assert await run("call") == "outer(inner(call))"
    assert notes == ["outer before", "inner before", "inner after", "outer after"]


async def test_a_step_answers_in_place_of_the_rest() -> None:
    notes: list[str] = []
    run = make_chain([noting("outer", notes), refuse, noting("inner", notes)], last=fail)
    assert await run("call") == "outer(refused call)"
    assert notes == ["outer before", "outer after"]


async def test_an_exception_passes_through_the_steps() -> None:
    notes: list[str] = []
    with pytest.raises(ValueError, match="call"):
        await make_chain([noting("outer", notes)], last=fail)("call")
    assert notes == ["outer before", "outer after"]
