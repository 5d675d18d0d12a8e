"""`deckhands webhook`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.runtime.settings import BrokerSettings
from broker.store.store import open_store
from deckhands.client.client import Client
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import deliver, notify, open_repository
from tests.integration.command_line import Done, deckhands, environment
from tests.stores import RealServer, emptied
from tests.webhook_parts import begin_worked, receiving

ADDRESS = "https://1.1.1.1/hook"


class Face:
    """The command line on a store without workers."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self._env = environment(home, DECKHANDS_URL=url, DECKHANDS_WEBHOOK_PRIVATE="127.0.0.1")

    def __call__(self, *arguments: str) -> Done:
        return deckhands("webhook", *arguments, env=self._env)


@pytest.fixture
def face(valkey_server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Face:
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))  # jobs in this process have the key of the command line
    return Face(asyncio.run(emptied(valkey_server.url)), tmp_path)


def test_webhook_is_added_listed_removed_and_its_secret_shown_once(face: Face) -> None:
    empty = face("ls")
    assert (empty.code, empty.out, "There are no webhooks." in empty.err) == (0, "", True)
    events = ("--event", "conversation.waiting", "--event", "action.run")
    (made,) = face("add", ADDRESS, "--tenant", "acme", *events, "--json").json
    plain = face("add", ADDRESS)
    assert plain.out.startswith("whsec_")
    first, second = face("ls", "--json").json
    assert (first["id"], first["tenant"], first["url"]) == (made["id"], "acme", ADDRESS)
    assert first["events"] == ["conversation.waiting", "action.run"]
    assert (second["tenant"], second["events"]) == ("*", ["conversation.settled"])
    shown = face("ls")
    assert made["id"] in shown.out
    assert made["secret"].removeprefix("whsec_") not in shown.out + str(first)
    assert face("rm", made["id"]).code == 0
    assert [found["id"] for found in face("ls", "--json").json] == [second["id"]]
    gone = face("rm", made["id"])
    assert (gone.code != 0, "There is no such webhook." in gone.err) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "https://10.0.0.1/"), "not public"),
        (("add", "no address"), "cannot be used"),
        (("add", ADDRESS, "--event", "settled"), "--event or --tenant"),
        (("add", ADDRESS, "--tenant", "a b"), "--event or --tenant"),
        (("add", ADDRESS, "--conversation", "../x"), "conversation id"),
        (("add", ADDRESS, "--conversation", "unknown-one"), "No conversation"),
        (("deliveries", "wh_unknown"), "There is no such webhook."),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(face: Face, arguments: tuple[str, ...], said: str) -> None:
    refused = face(*arguments)
    assert (refused.code != 0, refused.out) == (True, "")
    assert said in refused.err
    assert face("ls", "--json").json == []


def test_deliveries_are_listed_with_how_they_have_ended(face: Face) -> None:
    async def work(url: str) -> None:
        sent: list[tuple[str, ...]] = []
        settings = BrokerSettings(webhook_private="127.0.0.1")
        bench = JobServices(await open_store(face.url), settings, lambda _, arguments: sent.append(arguments))
        client = Client(bench.store)
        await open_repository(bench).add("*", url, ("conversation.settled",))
        await begin_worked(client, "told-one")
        await notify(bench)
        for arguments in sent:
            await deliver(bench, *arguments)
        await client.aclose()

    async def receive() -> None:
        async with receiving() as receiver:
            receiver.answer = lambda _: 500
            await work(receiver.url)

    asyncio.run(receive())
    ((webhook_id,),) = ([found["id"]] for found in face("ls", "--json").json)
    (shown,) = face("deliveries", webhook_id, "--json").json
    assert (shown["conversation_id"], shown["state"], shown["attempts"]) == ("told-one", "waiting", 1)
    assert (shown["status"], shown["error"], "body" in shown) == (500, "It has answered 500.", False)
    assert "told-one" in face("deliveries", webhook_id).out
