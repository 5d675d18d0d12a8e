"""The outcome watcher: finds awaited conversations with progress, and answers their callers.

Most are found at once by notices. A sweep finds those whose notice was lost with a tail of the store or a dead worker.
A notice of progress is kept until the next report, which is at most one per second and conversation; if the
conversation ends before, it is checked only once.

Holds: the notice of an end is acknowledged after its conversation was checked; an unreadable conversation does not
affect others. Answers of conversations that end together are delivered together.
Keys: `deck:{k}:notices`, group `ingresses`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from broker.contract import Action
from broker.coordination import PARSE_ERRORS, Producers, Quarantine, find_conversation_keys
from broker.log import find_latest_event
from broker.runtime import DeckhandsError, StoreRefused, make_extra, shorten_randomly, wait_for_tick
from broker.store import Argument, GroupReader, ShardKeys
from deckhands.ingress.callers import CELERY, STREAM, Caller
from deckhands.ingress.context import Answer, IngressContext
from deckhands.ingress.replies import Replies
from deckhands.ingress.runs import Runs

GROUP = "ingresses"
BATCH = 128
MAX_CONCURRENT_CHECKS = 32
"""How many logs are in memory at once."""
MAX_ENDED = 1_000
"""How many ended runs wait for their completion in one worker; the sweep finds further ones."""
COMPLETED_AT_ONCE = 64
COMPLETERS = 2
"""How many batches of tasks are completed at the same time."""
FINISH_SECONDS = 3.0
"""How long a stopping worker waits for a completion in flight."""
MAINTENANCE_SECONDS = 1.0
FORSAKEN_AFTER_SECONDS = 5.0
"""How long a worker may hold a notice before another one claims it."""
SHOWN_CHARS = 200

_log = logging.getLogger(__name__)


class OutcomeWatcher:
    """Checks conversations for one worker."""

    def __init__(self, context: IngressContext, runs: Runs, worker_id: str) -> None:
        self._context = context
        self._runs = runs
        self._worker_id = worker_id
        self._store = context.store
        self._replies = Replies(context.store)
        self._unreadable = Quarantine(context.store)
        self._at_once = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)
        self._progressing: set[str] = set()
        self._ended: asyncio.Queue[Answer] = asyncio.Queue(MAX_ENDED)
        self._ended_ids: set[str] = set()
        self._forsaken_after: dict[int, Argument] = {}
        self.looks = 0

    async def read_notices(self, names: ShardKeys) -> None:
        """Process the notices of a shard, forever."""
        reader = GroupReader(self._store, GROUP, self._worker_id, [names.notices])
        try:
            while True:
                found = await reader.read(limit=BATCH)
                await self._check_entries(names, [(entry, fields) for _, entry, fields in found])
        finally:
            await reader.aclose()

    async def run_maintenance(self) -> None:
        """Run the sweep and claim the notices of dead workers, each second, forever.

        It does not use the ticks of this process, with which the same one of two ingress workers would always find a
        conversation first.
        """
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS * shorten_randomly())
            for part in (self._check_forsaken, self._check_overdue):
                try:
                    await part()
                except (DeckhandsError, *PARSE_ERRORS):
                    _log.exception("a sweep over callers failed")

    async def _check_forsaken(self) -> None:
        async def check(names: ShardKeys) -> None:
            await self._check_entries(names, await self._claim_forsaken(names))

        await asyncio.gather(*map(check, self._store.all_shards))

    async def _check_overdue(self) -> None:
        async def check(names: ShardKeys) -> None:
            overdue = await self._context.callers.overdue(names, limit=BATCH)
            await self._check_all(overdue, is_sweep=True)

        await asyncio.gather(*map(check, self._store.all_shards))

    async def report_progress(self) -> None:
        """Report the progress of conversations to their callers, each second, forever."""
        while True:
            await wait_for_tick(MAINTENANCE_SECONDS)
            getting_on = self._progressing
            self._progressing = set()
            await asyncio.gather(*map(self._report, getting_on))

    async def _check_entries(self, names: ShardKeys, entries: list[tuple[bytes, list[bytes]]]) -> None:
        noticed: dict[str, bool] = {}
        done: list[bytes] = []
        for entry, fields in entries:
            try:
                about = dict(zip(fields[::2], fields[1::2], strict=True))
                conversation_id = (await find_conversation_keys(self._store, names, about[b"c"])).conversation_id
                may_have_ended = about.get(b"e") != b"0"  # notices of an earlier version do not say it
                noticed[conversation_id] = noticed.get(conversation_id, False) or may_have_ended
            except PARSE_ERRORS as error:
                await self._unreadable.quarantine(names, names.notices, entry.decode(), fields, error, group=GROUP)
            done.append(entry)
        self._progressing |= {
            conversation_id for conversation_id, may_have_ended in noticed.items() if not may_have_ended
        }
        await self._check_all(
            [conversation_id for conversation_id, may_have_ended in noticed.items() if may_have_ended]
        )
        if done:
            commands: list[tuple[Argument, ...]] = [("XACK", names.notices, GROUP, *done)]
            commands.append(("XDEL", names.notices, *done))
            with suppress(StoreRefused):  # the stream was overwritten or removed meanwhile
                await self._store.call_many(commands)

    async def _claim_forsaken(self, names: ShardKeys) -> list[tuple[bytes, list[bytes]]]:
        """Claim notices that another worker has held too long."""
        idle_ms = int(FORSAKEN_AFTER_SECONDS * 1000)
        after = self._forsaken_after.get(names.shard, "0-0")
        command = ("XAUTOCLAIM", names.notices, GROUP, self._worker_id, idle_ms, after, "COUNT", BATCH)
        self._forsaken_after[names.shard], entries, *_ = await self._store.call(*command)
        return [(entry, fields) for entry, fields in entries if fields]

    async def _check_all(self, conversation_ids: Sequence[str], *, is_sweep: bool = False) -> None:
        found = await asyncio.gather(*(self._check(each, is_sweep=is_sweep) for each in conversation_ids))
        self._progressing |= {progress[0].conversation_id for progress in found if progress is not None}

    async def _check(self, conversation_id: str, *, is_sweep: bool = False) -> tuple[Caller, dict[str, str]] | None:
        """Answer the caller of a conversation if it has ended.

        Returns:
            The caller and the meta hash if the conversation has not ended; None if it has, or if another worker
                answers.
        """
        async with self._at_once:
            self.looks += 1
            try:
                reset = await self._context.callers.reset_notice(conversation_id)
                caller, meta, _ = await self._context.load(conversation_id, reset)
                if caller is None or caller.is_answered:
                    await self._context.callers.mark_answered(conversation_id)
                elif not self._context.may_answer(caller):
                    await self._context.callers.leave_to_others(caller, is_news=not is_sweep)
                elif answer := await self._context.find_answer(caller, meta):
                    await self._answer(answer, meta)
                else:
                    await self._runs.announce_start(caller)
                    if is_sweep:
                        await self._context.callers.schedule_check(caller)
                    return caller, meta
            except Exception:  # noqa: BLE001  (the outer edge: one conversation, or the result backend)
                _log.exception("cannot check conversation %s", conversation_id, extra=make_extra(conversation_id))
        return None

    async def _answer(self, answer: Answer, meta: Mapping[str, str]) -> None:
        caller = answer.caller
        if caller.kind == STREAM:
            await answer_stream(self._context, self._replies, answer, meta)
        elif caller.kind == CELERY and caller.conversation_id not in self._ended_ids:
            with suppress(asyncio.QueueFull):
                self._ended.put_nowait(answer)
                self._ended_ids.add(caller.conversation_id)

    async def complete_ended(self) -> None:
        """Complete the tasks of ended runs, waiting ones together, forever.

        This is separate from the checks, which must not wait for an unavailable result backend.
        """
        while True:
            answers = [await self._ended.get()]
            while len(answers) < COMPLETED_AT_ONCE and not self._ended.empty():
                answers.append(self._ended.get_nowait())
            completion = asyncio.create_task(self._complete(answers))
            try:
                await asyncio.shield(completion)
            except asyncio.CancelledError:
                await asyncio.wait([completion], timeout=FINISH_SECONDS)
                raise

    async def _complete(self, answers: Sequence[Answer]) -> None:
        try:
            await self._runs.complete_all(answers)
        except Exception:  # noqa: BLE001  (the outer edge: the sweep tries again)
            _log.exception("cannot answer the callers of %d conversations", len(answers))
        finally:
            self._ended_ids -= {answer.caller.conversation_id for answer in answers}

    async def _report(self, conversation_id: str) -> None:
        """Report the progress of a conversation, or answer its caller. Its end does not wait for the result backend."""
        found = await self._check(conversation_id)
        if found is None:
            return
        caller, meta = found
        if caller.kind != CELERY or not meta or (caller.kept or {}).get("ignore_result"):
            return
        try:
            latest = await find_latest_event(self._store, conversation_id, Action)
            progress = {
                "conversation_id": conversation_id,
                "state": meta.get("state", ""),
                "iterations": int(meta.get("iterations", "0")),
                "cost_usd": float(meta.get("cost_usd", "0")),
                "last_action": latest.sentence[:SHOWN_CHARS] if latest else "",
            }
            if await asyncio.to_thread(self._context.results.report_progress, caller.name, progress):
                await self._runs.revoke(caller.name)
        except Exception:  # noqa: BLE001  (progress is news, and the next one follows; the result backend may be away)
            text = "cannot report the progress of conversation %s"
            _log.warning(text, conversation_id, exc_info=True, extra=make_extra(conversation_id))


async def answer_stream(context: IngressContext, replies: Replies, answer: Answer, meta: Mapping[str, str]) -> None:
    """Send a producer of the inbox the outcome of its conversation, unless another check currently sends it."""
    taken = await context.callers.take_answer(answer.caller, answer.outcome, answer.started_ms)
    if taken is not None:
        outcome, _ = taken
        try:
            await send_outcome(context, replies, answer.caller, outcome, meta)
        except DeckhandsError:
            await context.callers.give_back_answer(answer.caller)
            raise
        await context.callers.mark_answered(answer.caller.conversation_id)


async def send_outcome(
    context: IngressContext, replies: Replies, caller: Caller, text: str, meta: Mapping[str, str]
) -> None:
    """Send a producer of the inbox a decided outcome, as JSON.

    If its name now belongs to a producer of another tenant, the outcome is dropped.
    """
    conversation_id = caller.conversation_id
    if await Producers(context.store).may_read(caller.name, meta.get("tenant", "")):
        outcome = json.loads(text)
        content = outcome.get("summary") or outcome
        await replies.send(caller.name, caller.request_id, "settled", conversation_id=conversation_id, content=content)
    else:
        warning = "the caller of conversation %s gets no answer: the producer %s now belongs to another tenant"
        _log.warning(warning, conversation_id, caller.name, extra=make_extra(conversation_id))
