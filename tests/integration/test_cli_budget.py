"""`deckhands budget`, and `submit` for a tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.contract.fencing import Ownership
from broker.contract.specs import Tenancy
from broker.limits.ledger import Ledger, list_accounts
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.archive_parts import begin_ended
from tests.integration.command_line import Done, deckhands, environment
from tests.stores import RealServer, emptied


class Face:
    """The command line on a store without workers."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self._env = environment(home, DECKHANDS_URL=url)

    def __call__(self, *arguments: str) -> Done:
        return deckhands(*arguments, env=self._env)


@pytest.fixture
def face(valkey_server: RealServer, tmp_path: Path) -> Face:
    return Face(asyncio.run(emptied(valkey_server.url)), tmp_path)


def spend(url: str, cid: str, usd: float) -> None:
    async def settle() -> None:
        store = await open_store(url)
        accounts = list_accounts(cid, tenant="acme", experiment="swe")
        await Ledger(store).settle(Ownership(cid, "w1", "1"), accounts, total_usd=usd)
        await store.aclose()

    asyncio.run(settle())


def test_a_limit_is_set_raised_shown_and_taken_away(face: Face) -> None:
    assert face("budget", "set", "tenant:acme", "10", "--json").json[0]["limit_usd"] == 10.0
    assert face("budget", "add", "tenant:acme", "2.5", "--json").json[0]["limit_usd"] == 12.5
    spend(face.url, "conversation-1", 3.25)
    (shown,) = face("budget", "show", "tenant:acme", "--json").json
    assert (shown["spent_usd"], shown["left_usd"], shown["calls"]) == (3.25, 9.25, 1)
    assert face("budget", "set", "tenant:acme").code == 0
    assert face("budget", "show", "tenant:acme").out.splitlines() == [
        "ACCOUNT      LIMIT  SPENT    RESERVED  LOST     LEFT  CALLS  WAITING",
        "tenant:acme  -      $3.2500  $0.0000   $0.0000  -     1      0",
    ]


def test_accounts_are_listed(face: Face) -> None:
    empty = face("budget", "ls")
    assert (empty.code, empty.out) == (0, "")
    assert "There are no budgets yet." in empty.err
    spend(face.url, "conversation-1", 1.0)
    assert [line["name"] for line in face("budget", "ls", "--json").json] == ["experiment:acme/swe", "tenant:acme"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("set", "acme", "10"), "'acme' is not an account."),
        (("set", "tenant:acme", "1e10"), "1e+10 USD cannot be a budget."),
        (("add", "tenant:acme", "nan"), "nan USD cannot be a budget."),
        (("report", "nobody"), "'nobody' is not an account."),
    ],
)
def test_what_cannot_be_used_is_refused(face: Face, arguments: tuple[str, ...], complaint: str) -> None:
    done = face("budget", *arguments)
    assert done.code == 2
    assert complaint in done.err


def test_a_report_reads_the_logs_below(face: Face) -> None:
    done = face("submit", "-t", "task", "--tenant", "acme", "--experiment", "swe", "--json", "--model", "m")
    (cid,) = [line["conversation_id"] for line in done.json]
    spend(face.url, cid, 0.0)
    (report,) = face("budget", "report", "experiment:acme/swe", "--json").json
    assert report == {
        "account": "experiment:acme/swe",
        "lost_usd": 0.0,
        "lost_calls": 0,
        "work_usd": 0.0,
        "retries_usd": 0.0,
        "loops_usd": 0.0,
        "condensation_usd": 0.0,
        "calls": 0,
        "failed_calls": 0,
        "unpriced_calls": 0,
    }
    lines = face("budget", "report", "tenant:acme").out.splitlines()
    assert lines[0].split() == ["WENT", "TO", "USD"]
    assert [line.rsplit(maxsplit=1)[0] for line in lines[1:]] == [
        *("work", "retries", "loops", "condensation", "lost calls, at worst"),
    ]


def test_a_report_does_without_what_was_deleted(face: Face) -> None:
    async def begin() -> None:
        async with await Client.connect(face.url) as client:
            await begin_ended(client, "gone", tenancy=Tenancy(tenant="acme", experiment="swe"))

    asyncio.run(begin())
    spend(face.url, "gone", 0.5)
    assert face("rm", "gone", "--yes").code == 0
    done = face("budget", "report", "tenant:acme", "--json")
    assert (done.code, [line["calls"] for line in done.json]) == (0, [0]), done
    assert face("budget", "show", "tenant:acme", "--json").json[0]["spent_usd"] == 0.5


def test_a_task_is_submitted_for_a_tenant(face: Face) -> None:
    arguments = ("--tenant", "acme", "--experiment", "swe", "--priority", "interactive")
    done = face("submit", "-t", "task", "--json", "--model", "m", *arguments)
    assert done.code == 0, done
    (submitted,) = done.json

    async def first_event() -> object:
        async with await Client.connect(face.url) as client:
            return (await client.events(submitted["conversation_id"]))[0].wire()["tenancy"]

    assert asyncio.run(first_event()) == {"tenant": "acme", "experiment": "swe", "priority": "interactive"}


def test_a_tenant_has_a_plain_name(face: Face) -> None:
    done = face("submit", "-t", "task", "--tenant", "a b")
    assert (done.code, done.err.splitlines()[0]) == (2, "deckhands: --tenant is 'a b'.")
