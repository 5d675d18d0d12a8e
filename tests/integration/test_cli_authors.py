"""`--by` and `--reason` of verbs whose effect is in no log: the server's record of operations has them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deckhands import Client
from deckhands.server import Operations
from tests.integration.command_line import CommandLine

WHO = ("--by", "Ada", "--reason", "Night shift.")
VERBS: Sequence[tuple[Sequence[Sequence[str]], str, str]] = [
    ((("budget", "set", "tenant:acme", "5"),), "budget.set", "tenant:acme"),
    ((("budget", "set", "tenant:acme", "5"), ("budget", "add", "tenant:acme", "2")), "budget.add", "tenant:acme"),
    ((("inbox", "add", "crm", "--tenant", "acme"),), "inbox.add", "crm"),
    ((("inbox", "add", "crm", "--tenant", "acme"), ("inbox", "rm", "crm")), "inbox.remove", "crm"),
    ((("key", "add", "page", "--tenant", "acme", "--scope", "read"),), "key.add", "page for acme"),
    ((("notes", "shop", "--write", "Use tabs."),), "notes", "//shop"),
    ((("schedule", "add", "daily", "--cron", "0 6 * * *", "-t", "x", "--model", "m"),), "schedule.add", "daily"),
    (
        (
            ("schedule", "add", "daily", "--cron", "0 6 * * *", "-t", "x", "--model", "m"),
            ("schedule", "pause", "daily"),
            ("schedule", "resume", "daily"),
            ("schedule", "rm", "daily"),
        ),
        "schedule.remove",
        "daily",
    ),
    ((("store", "shards", "1"),), "store.shards", "1"),
    ((("webhook", "add", "https://1.1.1.1/hook"),), "webhook.add", "https://1.1.1.1/hook"),
]


@pytest.mark.parametrize(("verbs", "action", "target"), VERBS, ids=[action for _, action, _ in VERBS])
def test_author_and_reason_are_recorded(
    command: CommandLine, verbs: Sequence[Sequence[str]], action: str, target: str
) -> None:
    *before, verb = verbs
    for earlier in before:
        assert command(*earlier).code == 0  # without an author, nothing is recorded
    done = command(*verb, *WHO)
    assert done.code == 0, done
    (entry,) = command.ask(lambda client: Operations(client.store).latest())
    assert (entry.author, entry.action, entry.target, entry.reason) == ("Ada", action, target, "Night shift.")


def test_verbs_of_what_the_cluster_gave_a_name_are_recorded(command: CommandLine) -> None:
    (key,) = command("key", "add", "page", "--tenant", "acme", "--scope", "read", "--json").json
    (hook,) = command("webhook", "add", "https://1.1.1.1/hook", "--json").json
    (submitted,) = command("submit", "-t", "task", "--json", "--model", "m").json
    cid = submitted["conversation_id"]
    for verb in (
        ("key", "revoke", key["id"]),
        ("key", "rm", key["id"]),
        ("webhook", "rm", hook["id"]),
        ("secret", cid, "TOKEN", "--source", "vault:a"),
        ("secret", cid, "TOKEN", "--remove"),
        ("fork", f"{cid}@2"),
    ):
        done = command(*verb, *WHO)
        assert done.code == 0, done
    found = command.ask(lambda client: Operations(client.store).latest())
    assert {(entry.author, entry.reason) for entry in found} == {("Ada", "Night shift.")}
    fork, *others = [(entry.action, entry.target) for entry in found]
    assert fork[0] == "fork"
    assert fork[1].startswith(f"{cid} as ")
    assert others == [
        ("secret.remove", f"{cid}/TOKEN"),
        ("secret.set", f"{cid}/TOKEN"),
        ("webhook.remove", hook["id"]),
        ("key.remove", key["id"]),
        ("key.revoke", key["id"]),
    ]


def test_failed_verb_is_not_recorded(command: CommandLine) -> None:
    assert command("key", "revoke", "none", *WHO).code != 0
    assert command.ask(lambda client: Operations(client.store).latest()) == []


@pytest.mark.parametrize(
    "verb",
    [
        ("notes", "shop"),
        ("notes", "shop", "--write", "x", "--local"),
        ("checkpoint", "c1", "--list"),
        ("secret", "c1"),
        ("store", "shards"),
    ],
)
def test_author_without_effect_is_refused(command: CommandLine, verb: Sequence[str]) -> None:
    done = command(*verb, *WHO)
    assert done.code == 2
    assert "--by and --reason have no effect here" in done.err


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    "verb", [("key", "add", "page", "--tenant", "acme"), ("webhook", "add", "https://1.1.1.1/hook")]
)
def test_secret_is_shown_though_the_author_cannot_be_recorded(
    command: CommandLine, verb: Sequence[str], is_json: bool
) -> None:
    """It cannot be shown again."""

    async def break_record(client: Client) -> None:
        await client.store.call("SET", client.store.all_shards[0].operations, "no list")

    command.ask(break_record)
    done = command(*verb, *WHO, *["--json"] * is_json)
    assert done.code != 0
    assert "WRONGTYPE" in done.err
    assert len(done.out.strip()) > 20
