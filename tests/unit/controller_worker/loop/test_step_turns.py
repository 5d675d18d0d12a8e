"""Turns of steps: few at once, interactive work first, tenants by weight; the order is checked, not the time."""

import asyncio
from collections import Counter

import pytest

from controller_worker.loop.step_turns import (
    AT_ONCE,
    BESIDE_INTERACTIVE,
    INTERACTIVE_EXTRA,
    LONGEST_SECONDS,
    StepTurn,
    StepTurns,
)


def turn(turns: StepTurns, rank: int = 2, tenant: str = "", weight: float = 1.0, *, is_new: bool = True) -> StepTurn:
    return StepTurn(turns, rank, tenant, weight, is_new=is_new)


async def stepped(turns: StepTurns, waiting: list[StepTurn], names: list[str], count: int) -> list[str]:
    """Let all wait behind one step, then give one turn after another; return the owners of the first `count`."""
    order: list[str] = []
    blocker = turn(turns, 1)
    await blocker.take()

    async def step(turn: StepTurn, name: str) -> None:
        await turn.take()
        order.append(name)
        await asyncio.sleep(0)
        turn.give()

    tasks = [asyncio.create_task(step(turn, name)) for turn, name in zip(waiting, names, strict=True)]
    await asyncio.sleep(0)
    blocker.give()
    while len(order) < count:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return order[:count]


async def test_turns_are_kept_for_interactive_work_only() -> None:
    turns = StepTurns(1)
    assert turns.try_take(turn(turns))
    assert not turns.try_take(turn(turns))
    people = [turn(turns, 0) for _ in range(INTERACTIVE_EXTRA + 1)]
    assert [turns.try_take(person) for person in people] == [True] * INTERACTIVE_EXTRA + [False]


async def test_tenants_step_by_weight() -> None:
    turns = StepTurns(1)
    names = ["acme", "globex"] * 40
    weights = {"acme": 3.0, "globex": 1.0}
    waiting = [StepTurn(turns, 2, name, weights[name], is_new=False) for name in names]
    assert Counter(await stepped(turns, waiting, names, 40)) == {"acme": 30, "globex": 10}


async def test_a_tenant_that_comes_late_is_owed_nothing() -> None:
    turns = StepTurns(1)
    early = [StepTurn(turns, 2, "early", 1.0, is_new=False) for _ in range(20)]
    await stepped(turns, early, ["early"] * 20, 20)
    names = ["early", "late"] * 10
    found = await stepped(turns, [StepTurn(turns, 2, name, 1.0, is_new=False) for name in names], names, 10)
    assert Counter(found) == {"early": 5, "late": 5}


async def test_batch_work_has_each_eighth_turn() -> None:
    turns = StepTurns(1)
    names = ["batch", "normal"] * 40
    ranks = {"batch": 2, "normal": 1}
    found = await stepped(turns, [StepTurn(turns, ranks[name], "", 1.0, is_new=False) for name in names], names, 32)
    assert Counter(found) == {"normal": 28, "batch": 4}


async def test_newly_claimed_conversation_steps_first() -> None:
    turns = StepTurns(1)
    names = ["old"] * 20 + ["new"] * 2
    waiting = [StepTurn(turns, 2, "acme", 1.0, is_new=name == "new") for name in names]
    assert Counter(await stepped(turns, waiting, names, 3)) == {"old": 1, "new": 2}


async def test_between_two_steps_others_pass() -> None:
    turns = StepTurns(1)
    long, short = (StepTurn(turns, 2, name, 1.0, is_new=False) for name in "ab")
    order = []

    async def steps(turn: StepTurn, name: str, count: int) -> None:
        await turn.take()
        for _ in range(count):
            order.append(name)
            await asyncio.sleep(0)
            await turn.take_next()
        turn.give()

    await asyncio.gather(steps(long, "long", 4), steps(short, "short", 2))
    assert order == ["long", "short", "long", "short", "long", "long"]


async def test_beside_interactive_work_few_others_step() -> None:
    turns = StepTurns()
    person = turn(turns, 0)
    others = [turn(turns) for _ in range(AT_ONCE)]
    with turns.hurry():  # it is being claimed
        assert [turns.try_take(other) for other in others].count(True) == BESIDE_INTERACTIVE
        await person.take()
    assert not turns.try_take(others[-1])
    person.give()
    assert turns.try_take(others[-1])


@pytest.mark.parametrize("people", [BESIDE_INTERACTIVE, AT_ONCE, 2 * AT_ONCE])
async def test_much_interactive_work_starves_neither_others_nor_itself(people: int) -> None:
    turns, rounds = StepTurns(), 50
    had = Counter[str]()

    async def steps(turn: StepTurn, name: str) -> None:
        await turn.take()
        while True:
            had[name] += 1
            await asyncio.sleep(0)
            await turn.take_next()

    ranks = {f"person {n}": 0 for n in range(people)} | {f"batch {n}": 2 for n in range(2 * BESIDE_INTERACTIVE)}
    turn_of = {name: StepTurn(turns, rank, "", 1.0, is_new=False) for name, rank in ranks.items()}
    tasks = [asyncio.create_task(steps(turn, name)) for name, turn in turn_of.items()]
    while had["person 0"] < rounds:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(had) == set(ranks)


async def test_one_that_takes_long_holds_up_nobody() -> None:
    """A hook that waits for something elsewhere."""
    turns = StepTurns(1)
    slow, other = turn(turns), turn(turns)
    await slow.take()
    async with asyncio.timeout(100 * LONGEST_SECONDS):
        await other.take()
    slow.give()
    third = turn(turns)
    assert not turns.try_take(third)  # the other still has the only turn
    other.give()
    assert turns.try_take(third)


@pytest.mark.parametrize("is_granted", [False, True], ids=["while it waits", "at its turn"])
async def test_cancelled_waiter_costs_others_no_turn(is_granted: bool) -> None:
    turns = StepTurns(1)
    holder, gone, last = (turn(turns) for _ in range(3))
    await holder.take()
    tasks = [asyncio.create_task(waiting.take()) for waiting in (gone, last)]
    await asyncio.sleep(0)
    if is_granted:
        holder.give()  # it is granted to the first, which has not run yet
    tasks[0].cancel()
    if not is_granted:
        holder.give()
    await tasks[1]
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert not turns.has_waiters
