"""Bugs planted in front of the store: each changes a function of the store, or a call of the log.

Holds: a bug is a change of behaviour. It wraps the correct function, and undoes or repeats a part of its effect; the
implementation of the function does not matter.
"""

from dataclasses import replace
from typing import Any

import msgpack

from broker.contract.codec import decode
from broker.testing.keyspace import Arguments
from controller_worker.core.controller import fold
from controller_worker.core.state import State, parse_snapshot, to_snapshot
from tests.simulation.wire import Commands, Execute, Send, StoreBug

BASE, SHARD, CID, NAMED = 3, 4, 5, 6
"""Where the arguments of `deck_append` stand in its command."""


def _is_append(command: Arguments, by: str = "") -> bool:
    return command[:2] == [b"FCALL", b"deck_append"] and by in ("", _named(command)["by"])


def _is_call(command: Arguments, function: bytes) -> bool:
    return command[:2] == [b"FCALL", function]


def _named(command: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(command[NAMED], unicode_errors="surrogateescape")
    return found


def _changed(command: Arguments, **named: Any) -> Arguments:
    packed = msgpack.packb(_named(command) | named, unicode_errors="surrogateescape", use_bin_type=False)
    return [*command[:NAMED], packed, *command[NAMED + 1 :]]


def accept_stale_tokens(execute: Execute, command: Arguments) -> Any:
    """An owner's append under an old token is accepted."""
    reply = execute(command)
    if not _is_append(command, "owner") or reply != [b"fenced"]:
        return reply
    meta = command[BASE] + b":meta"
    owner, token = execute([b"HMGET", meta, b"owner", b"token"])
    writer = _named(command)
    execute([b"HSET", meta, b"owner", writer["worker"].encode(), b"token", writer["token"].encode()])
    reply = execute(command)
    execute([b"HSET", meta, b"token", token or b"0"])
    execute([b"HSET", meta, b"owner", owner] if owner else [b"HDEL", meta, b"owner"])
    return reply


def accept_stale_decisions(execute: Execute, command: Arguments) -> Any:
    """An owner's append is accepted although the log has grown since it was decided."""
    reply = execute(command)
    if _is_append(command, "owner") and reply[0] == b"conflict":
        return execute(_changed(command, seen=str(reply[1]), checksum=""))
    return reply


def forget_owners_key(execute: Execute, command: Arguments) -> Any:
    """An owner's append that is repeated, because its reply was lost, is not known again."""
    if _is_append(command, "owner"):
        execute([b"HDEL", command[BASE] + b":meta", b"append_key"])
    return execute(command)


def forget_producers_key() -> StoreBug:
    """A repeated append of a user is written twice."""
    calls = 0

    def bug(execute: Execute, command: Arguments) -> Any:
        nonlocal calls
        if _is_append(command, "producer"):
            calls += 1
            command = _changed(command, key=f"{_named(command)['key']}#{calls}")
        return execute(command)

    return bug


def forget_answers(execute: Execute, command: Arguments) -> Any:
    """An action that is answered again gets a second observation."""
    if _is_append(command, "tool"):
        execute([b"HDEL", command[BASE] + b":once", f"o:{_named(command)['action']}".encode()])
    return execute(command)


def ring_nobody(execute: Execute, command: Arguments) -> Any:
    """An append wakes no worker."""
    if not _is_append(command):
        return execute(command)
    meta = command[BASE] + b":meta"
    rung = execute([b"HGET", meta, b"rung"])
    if execute([b"EXISTS", meta]):
        execute([b"HSET", meta, b"rung", b"1"])
    reply = execute(command)
    if rung is None:
        execute([b"HDEL", meta, b"rung"])
    return reply


def keep_entries(execute: Execute, command: Arguments) -> Any:
    """An observation leaves the entry of its action unacknowledged."""
    return execute(_changed(command, place=None) if _is_append(command, "tool") else command)


def acknowledge_before_append(execute: Execute, command: Arguments) -> Any:
    """A claim acknowledges the entry of its action, before there is an observation."""
    reply = execute(command)
    if _is_call(command, b"deck_claim_action") and reply[0] in (b"claimed", b"reclaimed"):
        execute([b"XACK", command[9], b"tools", command[10]])
    return reply


def release_blindly(execute: Execute, command: Arguments) -> Any:
    """A conversation is given up although it has news."""
    if _is_call(command, b"deck_release"):
        last = execute([b"HGET", command[BASE] + b":meta", b"last_id"])
        command = [*command[:8], last, command[9], b""]
    return execute(command)


def keep_rung_at_release(execute: Execute, command: Arguments) -> Any:
    """The mark of an unanswered wake-up outlives the owner, and suppresses the next wake-up."""
    if not _is_call(command, b"deck_release"):
        return execute(command)
    meta = command[BASE] + b":meta"
    rung = execute([b"HGET", meta, b"rung"])
    reply = execute(command)
    if rung is not None and reply == [b"released"]:
        execute([b"HSET", meta, b"rung", rung])
    return reply


async def clear_rung_after_reading(send: Send, commands: Commands) -> list[Any]:
    """A woken worker reads the news first, and removes the mark afterwards."""
    name, _, *fields = commands[0]
    if name != "HDEL" or fields != ["rung"]:
        return await send(commands)
    read = await send(commands[1:])
    return [*await send(commands[:1]), *read]


def bury_half(execute: Execute, command: Arguments) -> Any:
    """A burial hands on 256 conversations of the dead and forgets the others."""
    reply = execute(command)
    if _is_call(command, b"deck_tick"):
        shard = command[3]
        for worker in execute([b"ZRANGEBYSCORE", shard + b":workers", b"0", b"0"]):
            own = shard + b":worker:" + worker
            execute([b"DEL", own + b":owned", own + b":mail", own + b":about"])
            execute([b"ZREM", shard + b":workers", worker])
    return reply


def bury_silently(execute: Execute, command: Arguments) -> Any:
    """A burial rings none of the conversations that it hands on."""
    reply = execute(command)
    if _is_call(command, b"deck_tick") and reply[0] == b"alive" and reply[1]:
        shard = command[3]
        for cid in execute([b"ZRANGE", shard + b":index", b"0", b"-1"]):
            meta = shard + b":c:" + cid + b":meta"
            owner, orphan, entry = execute([b"HMGET", meta, b"owner", b"orphan_of", b"ready_id"])
            if owner is None and orphan and entry:
                execute([b"XACK", shard + b":ready", b"controllers", entry])
                execute([b"XDEL", shard + b":ready", entry])
                execute([b"ZREM", shard + b":unread", cid])
                execute([b"HDEL", meta, b"rung", b"ready_id"])
    return reply


def forget_parked(execute: Execute, command: Arguments) -> Any:
    """Parked conversations are never woken."""
    if not _is_call(command, b"deck_tick"):
        return execute(command)
    parked, hidden = command[3] + b":parked", command[3] + b":hidden"
    if execute([b"EXISTS", parked]):
        execute([b"RENAME", parked, hidden])
    reply = execute(command)
    if execute([b"EXISTS", hidden]):
        execute([b"RENAME", hidden, parked])
    return reply


def leave_last_event_out_of_snapshots(execute: Execute, command: Arguments) -> Any:
    """A snapshot has the state before the event that it says it ends with."""
    if _is_call(command, b"deck_snapshot"):
        state = parse_snapshot(command[7])
        assert state is not None
        entries = execute([b"XRANGE", command[BASE] + b":events", b"-", b"%d-0" % (state.version - 1)])
        events = [decode(fields[1], number) for number, (_, fields) in enumerate(entries, 1)]
        command = [*command[:7], to_snapshot(replace(fold(State(), events), version=state.version)), *command[8:]]
    return execute(command)


def renew_no_token(execute: Execute, command: Arguments) -> Any:
    """A claim gives the token of the owner before again."""
    if not _is_call(command, b"deck_claim"):
        return execute(command)
    meta = command[BASE] + b":meta"
    before = execute([b"HGET", meta, b"token"])
    reply = execute(command)
    if reply[0] == b"claimed" and before not in (None, b"0"):
        execute([b"HSET", meta, b"token", before])
        reply = [reply[0], before, *reply[2:]]
    return reply


def keep_owner_at_release(execute: Execute, command: Arguments) -> Any:
    """A conversation that was given up still has its owner."""
    if not _is_call(command, b"deck_release"):
        return execute(command)
    meta = command[BASE] + b":meta"
    owner = execute([b"HGET", meta, b"owner"])
    reply = execute(command)
    if reply == [b"released"] and owner:
        execute([b"HSET", meta, b"owner", owner])
    return reply


def confirm_unwritten() -> StoreBug:
    """Each fourth append of a user is confirmed and not written."""
    calls = 0

    def bug(execute: Execute, command: Arguments) -> Any:
        nonlocal calls
        if _is_append(command, "producer"):
            calls += 1
            if calls % 4 == 0:
                last = int(execute([b"HGET", command[BASE] + b":meta", b"last_id"]) or 0)
                return [b"appended", last + 1, last + 1]
        return execute(command)

    return bug


def say_silently(execute: Execute, command: Arguments) -> Any:
    """A user's message wakes no worker."""
    return ring_nobody(execute, command) if _is_append(command, "producer") else execute(command)


def leave_index_behind(execute: Execute, command: Arguments) -> Any:
    """An append does not change the state in the index."""
    if not _is_append(command, "owner"):
        return execute(command)
    meta = command[BASE] + b":meta"
    state = execute([b"HGET", meta, b"state"])
    reply = execute(command)
    if state is not None:
        execute([b"HSET", meta, b"state", state])
    return reply


def skip_an_id(execute: Execute, command: Arguments) -> Any:
    """An append after a burial leaves an id out."""
    if _is_append(command, "owner"):
        meta = command[BASE] + b":meta"
        token, last = execute([b"HMGET", meta, b"token", b"last_id"])
        if token not in (None, b"0", b"1") and last and execute([b"HGET", meta, b"skipped"]) != token:
            execute([b"HSET", meta, b"skipped", token, b"last_id", b"%d" % (int(last) + 1)])
            command = _changed(command, seen=str(int(last) + 1), checksum="")
    return execute(command)


def park_for_longer(execute: Execute, command: Arguments) -> Any:
    """A wait ends a minute late."""
    if _is_call(command, b"deck_release") and command[9]:
        command = [*command[:9], b"%d" % (int(command[9]) + 60_000), *command[10:]]
    return execute(command)


def charge_twice(execute: Execute, command: Arguments) -> Any:
    """A call that is charged again, because its worker died or its reply was lost, is added again."""
    if _is_call(command, b"deck_budget_settle"):
        execute(command)
        execute([b"HSET", command[3] + b":budget:" + command[8], b"own", b"0"])
    return execute(command)


def top_up_silently(execute: Execute, command: Arguments) -> Any:
    """Nobody who waits for a budget is woken."""
    reply = execute(command)
    if command[0] == b"FCALL" and command[1].startswith(b"deck_budget_"):
        return reply[:2]
    return reply


def leave_entries_of_the_dead(execute: Execute, command: Arguments) -> Any:
    """Entries of the inbox that a dead worker has read are found by no other one."""
    return [] if command[:2] == [b"XPENDING", b"deck:inbox"] else execute(command)


def forget_callers(execute: Execute, command: Arguments) -> Any:
    """Nobody looks for callers whose conversations have ended, and notices of the dead are lost."""
    if command[0] == b"XAUTOCLAIM" and command[1].endswith(b":notices"):
        return [b"0-0", [], []]
    if command[0] == b"ZRANGEBYSCORE" and command[1].endswith(b":awaited"):
        return []
    return execute(command)


def tell_of_later_events(execute: Execute, command: Arguments) -> Any:
    """Events that come while deliveries are planned count as planned."""
    return execute([*command[:-1], b"1000000"] if _is_call(command, b"deck_told") else command)


def keep_lines(execute: Execute, command: Arguments) -> Any:
    """A line of deliveries that a worker has taken is never due again."""
    if _is_call(command, b"deck_take_delivery"):
        command = [*command[:-1], b"100000000"]
    return execute(command)


def end_attempts_silently(execute: Execute, command: Arguments) -> Any:
    """A delivery that the receiver refused counts as delivered."""
    if _is_call(command, b"deck_end_attempt") and command[-2] != b"":
        command = [*command[:-2], b"", command[-1]]
    return execute(command)
