"""What is in the archive is listed: with the filters of `ls`, without a store, and past files that are damaged."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deckhands.client.client import Client
from tests.archive_parts import begin_ended, retired
from tests.integration.command_line import Done, deckhands
from tests.stores import RealServer, emptied
from tests.unit.deckhands.sample_log import state

NAMES = ("first", "second", "third")
LABELS = {"first": {"team": "ci"}, "second": {"team": "docs", "run": "7"}, "third": {"team": "docs"}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def client(valkey_server: RealServer, place: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a store that three conversations have left, one after the other; the last one was stopped."""
    async with await Client.connect(await emptied(valkey_server.url)) as connected:
        found = Client(connected.store, str(place))
        for number, name in enumerate(NAMES):
            await begin_ended(found, name, labels=LABELS[name])
            if name == "third":
                await found.log.append(name, [state("stopped")])
            await retired(found.store, place, tmp_path)
            os.utime(file_of(place, name), (number, number))
        yield found


def file_of(place: Path, name: str) -> Path:
    (found,) = place.rglob(f"{name}.zip")
    return found


async def listed(place: Path, *options: str) -> Done:
    """List what is archived, where no store can be reached."""
    env = {"DECKHANDS_URL": "redis://127.0.0.1:1", "DECKHANDS_HOME": str(place.parent), "DECKHANDS_ARCHIVE": str(place)}
    return await asyncio.to_thread(deckhands, "ls", "--archived", *options, env=env)


def ids(done: Done) -> list[str]:
    assert done.code == 0, done.err
    return [json.loads(line)["conversation_id"] for line in done.out.splitlines()]


@pytest.mark.usefixtures("client")
async def test_archived_conversations_are_listed_with_the_filters_of_all(place: Path) -> None:
    assert ids(await listed(place, "--json")) == ["third", "second", "first"]
    assert ids(await listed(place, "--json", "--all", "--label", "team=docs")) == ["third", "second"]
    assert ids(await listed(place, "--json", "--label", "team=docs", "--label", "run=7")) == ["second"]
    assert ids(await listed(place, "--json", "--state", "stopped")) == ["third"]
    assert ids(await listed(place, "--json", "-n", "1", "--state", "finished")) == ["second"]
    fields = json.loads((await listed(place, "--json", "--state", "stopped")).out)
    assert (fields["is_archived"], fields["is_run"], fields["labels"]) == (True, False, {"team": "docs"})
    assert (fields["title"], fields["iterations"]) == ("Title of third", 1)
    table = await listed(place)
    assert "archive" in table.out
    assert "3 conversations: 2 finished, 1 stopped; 3 steps" in table.out
    assert (
        "None of 3 archived conversations has the label team=ops." in (await listed(place, "--label", "team=ops")).err
    )


@pytest.mark.usefixtures("client")
async def test_a_damaged_file_is_named_and_hides_no_other(place: Path) -> None:
    file_of(place, "second").write_bytes(b"no archive")
    for name in ("x.zip", "notes.txt", ".third.zip.part"):
        (place / name).write_text("somebody else's")
    done = await listed(place, "--json")
    assert ids(done) == ["third", "first"]
    assert "second" in done.err


async def test_the_client_lists_it_too(client: Client, place: Path) -> None:
    found = [one async for one in client.list_archived(labels={"team": "docs"})]
    assert [one.conversation_id for one in found] == ["third", "second"]
    assert (found[0].state, found[0].title, found[0].labels) == ("stopped", "Title of third", {"team": "docs"})
    assert [one.conversation_id async for one in client.list_archived(states=["finished"])] == ["second", "first"]
    assert [one async for one in Client(client.store).list_archived()] == []
    file_of(place, "first").write_bytes(b"no archive")
    assert [one.conversation_id async for one in client.list_archived()] == ["third", "second"]


async def test_without_an_archive_the_setting_is_named(tmp_path: Path) -> None:
    env = {"DECKHANDS_HOME": str(tmp_path), "DECKHANDS_ARCHIVE": ""}
    done = await asyncio.to_thread(deckhands, "ls", "--archived", env=env)
    assert (done.code, "DECKHANDS_ARCHIVE" in done.err) == (2, True)
    env["DECKHANDS_ARCHIVE"] = str(tmp_path / "not-yet")
    done = await asyncio.to_thread(deckhands, "ls", "--archived", env=env)
    assert (done.code, "The archive is empty." in done.err) == (0, True)
