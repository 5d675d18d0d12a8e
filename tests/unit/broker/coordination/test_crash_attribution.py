"""Work that was running when a worker died runs under a mark, and one at a time."""

from __future__ import annotations

import asyncio

from broker.coordination.crash_attribution import CrashAttribution, Mark, SuspectTurns


class Suspects:
    """Suspects that share their turns, and the records about them in the store."""

    def __init__(self, **seconds: float) -> None:
        self.noted: list[tuple[str, Mark]] = []
        self._turns = SuspectTurns(**seconds)

    def suspect(self, name: str, *, deaths: int = 1) -> CrashAttribution:
        async def record(mark: Mark) -> None:
            self.noted.append((name, mark))

        return CrashAttribution(self._turns, record, deaths=deaths)

    @property
    def acting(self) -> list[str]:
        return [name for name, mark in self.noted if mark is Mark.ACTING]


async def until_all_wait() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_conversation_acts_at_a_time() -> None:
    suspects = Suspects()
    first, second = suspects.suspect("first"), suspects.suspect("second")
    await first.mark_acting()
    await first.mark_acting()
    waiting = asyncio.create_task(second.mark_acting())
    await until_all_wait()
    assert suspects.noted == [("first", Mark.ACTING)]
    await first.mark_waiting()
    await waiting
    assert suspects.noted == [("first", Mark.ACTING), ("first", Mark.WAITING), ("second", Mark.ACTING)]
    await first.mark_waiting()
    await first.mark_acting()  # it has started before, and need not wait for those that only start
    assert suspects.acting == ["first", "second", "first"]
    second.end_turn()


async def test_what_got_on_is_marked_no_more() -> None:
    suspects = Suspects()
    first, second = suspects.suspect("first"), suspects.suspect("second")
    await first.mark_acting()
    first.clear()
    await second.mark_acting()
    await first.mark_acting()
    await first.mark_waiting()
    assert suspects.noted == [("first", Mark.ACTING), ("second", Mark.ACTING)]
    second.end_turn()


async def test_what_waits_for_others_is_acquitted_and_acts_again() -> None:
    suspects = Suspects()
    first = suspects.suspect("first")
    await first.mark_acting()
    await first.acquit()
    await first.acquit()
    await first.mark_acting()
    assert [mark for _, mark in suspects.noted] == [Mark.ACTING, Mark.ACQUITTED, Mark.ACTING_AGAIN]


async def test_slow_action_keeps_its_mark_and_lets_the_next_start() -> None:
    suspects = Suspects(turn_seconds=0.05)
    first, second, third = (suspects.suspect(name) for name in ("first", "second", "third"))
    await first.mark_acting()
    await second.mark_acting()
    assert suspects.noted == [("first", Mark.ACTING), ("second", Mark.ACTING)]
    first.end_turn()  # its turn was over: this is not the second one's
    waiting = asyncio.create_task(third.mark_acting())
    await until_all_wait()
    assert suspects.acting == ["first", "second"]
    await waiting
    third.end_turn()


async def test_the_more_deaths_the_later() -> None:
    suspects = Suspects(pause_seconds=0.02)

    async def act(name: str, deaths: int) -> None:
        suspect = suspects.suspect(name, deaths=deaths)
        await suspect.mark_acting()
        await suspect.mark_waiting()

    await asyncio.gather(act("twice", 3), act("once more", 2), act("once", 1))
    assert suspects.acting == ["once", "once more", "twice"]


async def test_who_gives_up_waiting_takes_no_turn() -> None:
    suspects = Suspects()
    first, second, third = (suspects.suspect(name) for name in ("first", "second", "third"))
    await first.mark_acting()
    waiting = asyncio.create_task(second.mark_acting())
    await until_all_wait()
    waiting.cancel()
    await until_all_wait()
    second.end_turn()
    first.end_turn()
    await third.mark_acting()
    assert suspects.acting == ["first", "third"]
    third.end_turn()
