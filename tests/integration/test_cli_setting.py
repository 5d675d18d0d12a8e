"""`deckhands set`, `interrupt` and `exec`: what they write into the log, and what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.contract.actions import ChangeAgentStateAction
from broker.contract.events import Event, Limits, ModelSwitched
from broker.contract.interventions import ConversationChanged
from deckhands.client.client import Client
from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer, emptied


async def log_of(url: str, conversation_id: str) -> list[Event]:
    async with await Client.connect(url) as client:
        return await client.events(conversation_id)


def test_what_is_changed_is_in_the_log(tmp_path: Path, valkey_server: RealServer) -> None:
    url = asyncio.run(emptied(valkey_server.url))
    env = environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none")
    cid = deckhands("submit", "-t", "x", "--label", "team=a", "--confirm", "risky", env=env).out.strip()
    who = ("--by", "ann", "--reason", "night")
    assert deckhands("set", cid, "-i", "7", "--max-budget", "2", "--label", "team=b", *who, env=env).code == 0
    assert deckhands("set", cid, "--max-tokens", "9", "--confirm", "always", "--model", "acme/x", env=env).code == 0
    events = asyncio.run(log_of(url, cid))
    first, second = [event for event in events if isinstance(event, ConversationChanged)]
    assert (first.limits, first.labels, first.by) == (Limits(max_iterations=7, max_budget_usd=2), {"team": "b"}, "ann")
    assert second.limits == Limits(max_iterations=7, max_budget_usd=2, max_tokens=9)
    assert second.confirmation is not None
    assert second.confirmation.mode == "always"
    assert [event.model for event in events if isinstance(event, ModelSwitched)] == ["acme/x"]
    assert cid in deckhands("ls", "--label", "team=b", "--json", env=env).out
    assert deckhands("interrupt", cid, env=env).code == 0
    request = asyncio.run(log_of(url, cid))[-1]
    assert isinstance(request, ChangeAgentStateAction)
    assert request.is_interrupt


def test_what_cannot_be_changed(tmp_path: Path, valkey_server: RealServer) -> None:
    url = asyncio.run(emptied(valkey_server.url))
    env = environment(tmp_path / "home", DECKHANDS_URL=url, LLM_MODEL="scripted/none")
    cid = deckhands("submit", "-t", "x", env=env).out.strip()
    before = asyncio.run(log_of(url, cid))
    for arguments, text in (
        (("set", cid), "Nothing is to be changed."),
        (("set", cid, "-i", "0"), "-i"),
        (("set", cid, "--confirm", "a b"), "The confirmation policy 'a b' cannot be used."),
        (("set", cid, "--analyzer", "a b"), "There is no risk analyzer named 'a b'."),
        (("set", cid, "--label", "team"), "is not KEY=VALUE"),
        (("set", cid, "-i", "3", "--reason", "x" * 2_001), "The reason has 2,001 characters"),
        (("set", "no-such-one", "-i", "3"), "No conversation"),
        (("exec", cid, "ls"), "has no workspace yet"),
        (("exec", cid, ""), "The command is empty"),
        (("exec", cid, "ls", "--timeout", "9999"), "The timeout is 9999 seconds."),
    ):
        done = deckhands(*arguments, env=env)
        assert done.code == 2, done
        assert text in done.err, done
    assert asyncio.run(log_of(url, cid)) == before
