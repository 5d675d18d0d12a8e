"""Replies in progress: shown to watchers, not stored, and the same in the log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyte

from broker.log.event_log import EventLog
from broker.log.live_text import MAX_PIECE_CHARS, LivePiece, LiveText
from broker.secrets.masking import MASK
from broker.secrets.secrets import Secrets
from broker.store.connection import MultiplexedConnection
from broker.store.store import Store
from controller_worker.model.streaming import stream_reply
from controller_worker.providers.llm import Delta, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from tests.integration.command_line import COMMAND, Done, environment, on_terminal, run_command
from tests.model_server.running_server import RunningModelServer
from tests.turns import finish, script

pytest_plugins = ("tests.model_server.fixtures",)

REQUEST = ModelRequest((Message("user", (TextPart("hi"),)),), (), "c1", 2, "/w")


async def watched(store: Store, count: int) -> list[LivePiece]:
    """The next pieces of c1, to the limit of the test."""
    async with contextlib.aclosing(LiveText(store, "c1").watch()) as pieces:
        found: list[LivePiece] = []
        async for piece in pieces:
            found.append(piece)
            if len(found) == count:
                break
    return found


async def test_watcher_sees_pieces(valkey_store: Store) -> None:
    live = LiveText(valkey_store, "c1")
    await live.register_watcher()
    watching = asyncio.create_task(watched(valkey_store, 3))
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=1, is_watched=True) as request:
        assert request.on_delta is not None
        for delta in (Delta("thinking", "Hm."), Delta("text", "Good "), Delta("text", "day, 你"), Delta("call", "f {")):
            request.on_delta(delta)
    assert await asyncio.wait_for(watching, 60) == [
        LivePiece("3.1", "thinking", "Hm.", 0),
        LivePiece("3.1", "text", "Good day, 你", 3),
        LivePiece("3.1", "call", "f {", 14),
    ]


async def test_pieces_come_while_the_reply_is_on_its_way(valkey_store: Store) -> None:
    await LiveText(valkey_store, "c1").register_watcher()
    watching = asyncio.create_task(watched(valkey_store, 1))
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=2, is_watched=True) as request:
        assert request.on_delta is not None
        request.on_delta(Delta("text", "first"))
        assert await asyncio.wait_for(watching, 60) == [LivePiece("3.2", "text", "first", 0)]
        request.on_delta(Delta("text", "second"))


async def test_text_of_a_failed_call_is_void_on_fallback(valkey_store: Store) -> None:
    live = LiveText(valkey_store, "c1")
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=1, is_watched=True) as request:
        assert request.on_delta is not None
        for delta in (Delta("text", "half a"), Delta("superseded", ""), Delta("text", "whole")):
            request.on_delta(delta)
    assert await live.read_rest() == [
        LivePiece("3.1", "text", "half a", 0),
        LivePiece("3.1", "superseded", "", 6),
        LivePiece("3.1.1", "text", "whole", 0),
    ]


async def test_reply_without_a_watcher(valkey_store: Store) -> None:
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=1, is_watched=False) as request:
        assert request is REQUEST
    assert await valkey_store.connection.call("EXISTS", valkey_store.known_keys("c1").live) == 0


async def test_nothing_of_it_is_kept(valkey_store: Store) -> None:
    live, keys = LiveText(valkey_store, "c1"), valkey_store.known_keys("c1")
    await live.register_watcher()
    await live.add([LivePiece("1.1", "text", "x" * 100_000)] * 2_000)
    assert await valkey_store.connection.call("XLEN", keys.live) <= 700
    assert 0 < await valkey_store.connection.call("PTTL", keys.live) <= 60_000
    assert 0 < await valkey_store.connection.call("PTTL", keys.watcher_mark) <= 30_000


async def test_pieces_carry_positions_and_invalid_ones_are_skipped(valkey_store: Store) -> None:
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=1, is_watched=True) as request:
        assert request.on_delta is not None
        request.on_delta(Delta("text", "x" * (MAX_PIECE_CHARS + 5)))
    live = valkey_store.known_keys("c1").live
    good = {"call": "1.1", "kind": "text", "text": "a", "at": 1}
    for forged in ("", "{", "[]", "{}", "1", *(json.dumps({**good, name: []}) for name in good), "[" * 100_000):
        await valkey_store.connection.call("XADD", live, "*", "p", forged)
    await valkey_store.connection.call("XADD", live, "*", "p", json.dumps(good))
    assert await LiveText(valkey_store, "c1").read_rest() == [
        LivePiece("3.1", "text", "x" * MAX_PIECE_CHARS, 5),
        LivePiece("1.1", "text", "a", 1),
    ]


async def test_what_came_after_the_last_look_is_not_missed(valkey_store: Store) -> None:
    live = LiveText(valkey_store, "c1")
    first, second = LivePiece("1.1", "text", "first"), LivePiece("1.1", "call", "second")
    await live.add([first])
    async with contextlib.aclosing(live.watch()) as pieces:
        assert await anext(pieces) == first
    await live.add([second])
    assert await live.read_rest() == [second]
    assert await live.read_rest() == []


async def test_secrets_are_hidden_wherever_a_piece_ends(valkey_store: Store) -> None:
    token, words = "ghp_0123456789abcdef", "word " * 200
    secrets = Secrets(valkey_store, lambda: bytes(32))
    await secrets.put("c1", "TOKEN", token)
    watching = asyncio.create_task(watched(valkey_store, 1))
    async with stream_reply(
        valkey_store, EventLog(valkey_store, secrets), REQUEST, attempt=1, is_watched=True
    ) as request:
        assert request.on_delta is not None
        request.on_delta(Delta("text", words + token[:10]))
        first = (await asyncio.wait_for(watching, 60))[0].text
        request.on_delta(Delta("text", token[10:] + "."))
        request.on_delta(Delta("superseded", ""))
        for kind in ("text", "call"):
            request.on_delta(Delta(kind, f"{kind} {token[:4]}"))
            request.on_delta(Delta(kind, token[4:]))
    assert words.startswith(first)
    pieces = await LiveText(valkey_store, "c1").read_rest()
    assert "".join(piece.text for piece in pieces if piece.call == "3.1") == f"{words}{MASK}."
    assert [(piece.kind, piece.text) for piece in pieces if piece.call == "3.1.1"] == [
        ("text", f"text {MASK}"),
        ("call", f"call {MASK}"),
    ]


async def test_absent_store_costs_pieces_not_the_call(valkey_store: Store, tmp_path: Path) -> None:
    store = replace(valkey_store, connection=MultiplexedConnection(f"unix://{tmp_path}/nobody"))
    async with stream_reply(store, EventLog(store), REQUEST, attempt=1, is_watched=True) as request:
        assert request.on_delta is not None
        request.on_delta(Delta("text", "to nobody"))
    await LiveText(store, "c1").add([LivePiece("3.1", "text", "to nobody")])


async def test_store_refusing_pieces_costs_pieces_not_the_call(valkey_store: Store) -> None:
    await valkey_store.connection.call("SET", valkey_store.known_keys("c1").live, "not a stream")
    async with stream_reply(valkey_store, EventLog(valkey_store), REQUEST, attempt=1, is_watched=True) as request:
        assert request.on_delta is not None
        request.on_delta(Delta("text", "word"))


def test_a_run_shows_the_words_and_logs_them_once(
    tmp_path: Path, model_server: Callable[..., RunningModelServer]
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    path = script(tmp_path / "m.json", finish("All is done now.")).removeprefix("scripted/")
    turns = json.loads(Path(path).read_text())
    turns["turns"][0]["text"] = "I think that I can finish."
    Path(path).write_text(json.dumps(turns))
    server = model_server("--script", path)
    env = environment(tmp_path / "home", LLM_MODEL="openai/gpt-4o", LLM_BASE_URL=server.url + "/v1", LLM_API_KEY="k")
    command = [*COMMAND, "run", "-t", "Do it.", "-w", str(workspace), "--sandbox", "none", "--json"]
    loud = subprocess.run([*command, "--stream"], env=env, capture_output=True, text=True, timeout=60, check=True)
    done = Done(0, loud.stdout, loud.stderr)
    assert "[1.1 text] I think that I can finish." in done.err
    assert "[1.1 call] finish {" in done.err
    replies = [event for event in done.json if event.get("kind") == "model.reply"]
    assert [reply["content"] for reply in replies] == ["I think that I can finish."]
    assert [request["body"].get("stream") for request in server.requests()] == [True]


def test_on_a_terminal_a_streamed_reply_is_printed_once(
    tmp_path: Path, model_server: Callable[..., RunningModelServer]
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    acting = {**run_command("echo out of it"), "text": "First I look around."}
    path = script(tmp_path / "m.json", acting, finish("All is done now.")).removeprefix("scripted/")
    server = model_server("--script", path)
    env = environment(tmp_path / "home", LLM_MODEL="openai/gpt-4o", LLM_BASE_URL=server.url + "/v1", LLM_API_KEY="k")
    run = ("run", "-t", "Do it.", "-w", str(workspace), "--sandbox", "none", "--stream")
    screen = pyte.Screen(120, 100)  # permanent output: the current line is redrawn
    pyte.Stream(screen).feed(on_terminal(*run, env=env, columns=120).replace("\n", "\r\n"))
    shown = "\n".join(screen.display)
    assert shown.count("First I look around.") == 1, shown
    assert shown.count("All is done now.") == 1, shown
    assert shown.count("$ echo out of it") == 1, shown
    assert "  out of it" in shown


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True
