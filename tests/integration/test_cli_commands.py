"""Commands on a store: budgets, dead letters, forks, later starts, schedules, loops, changes and webhooks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import ChangeAgentStateAction, LoopRecoveryAction
from broker.contract.events import Limits, ModelSwitched, OperatorActed
from broker.contract.fencing import Ownership
from broker.contract.interventions import ConversationChanged
from broker.contract.observations import AgentStateChangedObservation
from broker.contract.policies import STUCK_CODE
from broker.contract.specs import Tenancy
from broker.coordination.membership import Membership
from broker.coordination.quarantine import Quarantine
from broker.limits.ledger import Ledger, list_accounts
from broker.log.conversations import Conversations
from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from deckhands import AgentSpec, Client, LLMSpec
from deckhands.cli.timing_options import parse_duration, parse_time
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.jobs.webhook_jobs import deliver, notify, open_repository
from deckhands.server.auth.operations import Operations
from tests.archive_parts import begin_ended
from tests.integration.command_line import (
    CommandLine,
    Done,
)
from tests.unit.deckhands.sample_log import state
from tests.webhook_parts import begin_worked, receiving


def spend(command: CommandLine, cid: str, usd: float) -> None:
    accounts = list_accounts(cid, tenant="acme", experiment="swe")
    command.ask(lambda client: Ledger(client.store).settle(Ownership(cid, "w1", "1"), accounts, total_usd=usd))


def test_a_limit_is_set_raised_shown_and_taken_away(command: CommandLine) -> None:
    assert command("budget", "set", "tenant:acme", "10", "--json").json[0]["limit_usd"] == 10.0
    assert command("budget", "add", "tenant:acme", "2.5", "--json").json[0]["limit_usd"] == 12.5
    spend(command, "conversation-1", 3.25)
    (shown,) = command("budget", "show", "tenant:acme", "--json").json
    assert (shown["spent_usd"], shown["left_usd"], shown["calls"]) == (3.25, 9.25, 1)
    assert command("budget", "set", "tenant:acme").code == 0
    assert command("budget", "show", "tenant:acme").out.splitlines() == [
        "ACCOUNT      LIMIT  SPENT    RESERVED  LOST     LEFT  CALLS  WAITING",
        "tenant:acme  -      $3.2500  $0.0000   $0.0000  -     1      0",
    ]


def test_accounts_are_listed(command: CommandLine) -> None:
    empty = command("budget", "ls")
    assert (empty.code, empty.out) == (0, "")
    assert "There are no budgets yet." in empty.err
    spend(command, "conversation-1", 1.0)
    assert [line["name"] for line in command("budget", "ls", "--json").json] == ["experiment:acme/swe", "tenant:acme"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("budget", "set", "acme", "10"), "'acme' is not an account."),
        (("budget", "set", "tenant:acme", "1e10"), "1e+10 USD is not a valid budget."),
        (("budget", "add", "tenant:acme", "nan"), "nan USD is not a valid budget."),
        (("budget", "report", "nobody"), "'nobody' is not an account."),
        (("submit", "-t", "task", "--tenant", "a b"), "--tenant is 'a b'."),
    ],
)
def test_accounts_that_cannot_be_used_are_refused(
    command: CommandLine, arguments: tuple[str, ...], complaint: str
) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert complaint in done.err


def test_a_report_reads_the_logs_below(command: CommandLine) -> None:
    done = command("submit", "-t", "task", "--tenant", "acme", "--experiment", "swe", "--json", "--model", "m")
    (cid,) = [line["conversation_id"] for line in done.json]
    spend(command, cid, 0.0)
    (report,) = command("budget", "report", "experiment:acme/swe", "--json").json
    sums = ("lost_usd", "work_usd", "retries_usd", "loops_usd", "condensation_usd")
    counts = ("lost_calls", "calls", "failed_calls", "unpriced_calls")
    assert report == {"account": "experiment:acme/swe", **dict.fromkeys(sums, 0.0), **dict.fromkeys(counts, 0)}
    lines = command("budget", "report", "tenant:acme").out.splitlines()
    assert lines[0].split() == ["WENT", "TO", "USD"]
    assert [line.rsplit(maxsplit=1)[0] for line in lines[1:]] == [
        *("work", "retries", "loops", "condensation", "lost calls, at worst"),
    ]


def test_a_report_does_without_what_was_deleted(command: CommandLine) -> None:
    tenancy = Tenancy(tenant="acme", experiment="swe")
    command.ask(lambda client: begin_ended(client, "gone", tenancy=tenancy))
    spend(command, "gone", 0.5)
    assert command("rm", "gone", "--yes").code == 0
    done = command("budget", "report", "tenant:acme", "--json")
    assert (done.code, [line["calls"] for line in done.json]) == (0, [0]), done
    assert command("budget", "show", "tenant:acme", "--json").json[0]["spent_usd"] == 0.5


def test_a_task_is_submitted_for_a_tenant(command: CommandLine) -> None:
    arguments = ("--tenant", "acme", "--experiment", "swe", "--priority", "interactive")
    done = command("submit", "-t", "task", "--json", "--model", "m", *arguments)
    assert done.code == 0, done
    (created, _) = command.ask(lambda client: client.events(done.json[0]["conversation_id"]))
    assert created.wire()["tenancy"] == {"tenant": "acme", "experiment": "swe", "priority": "interactive"}


@pytest.fixture
def dead(command: CommandLine) -> CommandLine:
    """The command on a store with two dead conversations, a live one, and an unreadable entry."""
    command.ask(_fill)
    return command


async def _fill(client: Client) -> None:
    shard = client.store.all_shards[0]
    for name in ("poison-1", "poison-2", "alive"):
        agent = AgentSpec(llm=LLMSpec(model="m"))
        await client.submit("x", agent=agent, title=name, conversation_id=name, labels={"nr": name[-1]})
    for number, name in enumerate(("poison-1", "poison-2")):
        await client.log.append(
            name,
            [state("running"), state("error")],
            fields={"state": "error", "last_error": "It crashed its worker."},
        )
        await client.store.connection.call("HSET", client.store.known_keys(name).grants, "crashes", 3)
        await client.store.connection.call("ZADD", shard.dead, number, name)
    for worker in ("w1", "w2", "w3", "w4"):
        fields = ("c", "poison-1", "from", worker, "to", "w9", "at", "1760000000000")
        await client.store.connection.call("XADD", shard.takeovers, "*", *fields)
    error = KeyError("c")
    await Quarantine(client.store).quarantine(shard, "deck:{0}:act:pool:bash", "1-1", [b"foo", b"\x1b[31mbar"], error)


def test_dead_conversations_are_listed_with_causes(dead: CommandLine) -> None:
    done = dead("dead", "ls")
    lines = done.out.splitlines()
    assert (done.code, len(lines)) == (0, 4)
    assert "poison-1" in lines[1]
    assert "w2, w3, w4" in lines[1]
    assert "three workers died while it acted" in lines[2]
    assert "deck:{0}:act:pool:bash 1-1" in lines[3]
    assert "\x1b" not in done.out
    found = dead("dead", "ls", "--json").json
    assert [each["kind"] for each in found] == ["conversation", "conversation", "entry"]
    assert found[0]["workers"] == ["w2", "w3", "w4"]


def test_the_dead_can_continue(dead: CommandLine) -> None:
    done = dead("dead", "requeue", "poison-1")
    assert (done.code, "1 conversation can continue" in done.err) == (0, True)
    assert [each["conversation_id"] for each in dead("dead", "ls", "--json").json[:-1]] == ["poison-2"]
    assert dead("dead", "requeue", "--all").code == 0
    assert dead.ask(_dead) == []


def test_one_is_shown_with_its_causes(dead: CommandLine) -> None:
    shown = dead("dead", "show", "poison-1")
    assert shown.code == 0
    assert "Error:        It crashed its worker." in shown.out
    assert "Labels:       nr=1" in shown.out
    assert "Died with it: w4 at 2025-10-09T08:53:20+00:00" in shown.out
    assert "w1" not in shown.out
    assert shown.out.index("You: x") > shown.out.index("The end of its log:")
    found = dead("dead", "show", "poison-1", "--json").json[0]
    assert (found["workers"], found["labels"]) == (["w2", "w3", "w4"], {"nr": "1"})
    assert [event["id"] for event in found["last_events"]] == [1, 2, 3, 4]
    name = entry_name(dead)
    entry = dead("dead", "show", name)
    assert "Content:      foo \\x1b[31mbar" in entry.out
    assert "Why:          it has no field 'c'" in entry.out
    assert dead("dead", "show", name, "--json").json[0]["name"] == name


def entry_name(dead: CommandLine) -> str:
    [entry] = dead("dead", "ls", "--kind", "entry", "--json").json
    return str(entry["name"])


@pytest.mark.parametrize("name", ["alive", "0:1-1", "9:1-1", "a:b"])
def test_live_conversation_is_not_shown_as_dead(dead: CommandLine, name: str) -> None:
    assert dead("dead", "show", name).code == 2
    assert dead("dead", "discard", name).code == 2
    assert len(dead("dead", "ls", "--json").json) == 3


def test_they_are_chosen_by_label_and_kind(dead: CommandLine) -> None:
    found = dead("dead", "ls", "--label", "nr=2", "--json").json
    assert [each["conversation_id"] for each in found] == ["poison-2"]
    assert dead("dead", "requeue", "--label", "nr=2").err == "1 conversation can continue.\n"
    assert [each["kind"] for each in dead("dead", "ls", "--json").json] == ["conversation", "entry"]


def test_dead_entries_are_discarded(dead: CommandLine) -> None:
    refused = dead("dead", "requeue", entry_name(dead))
    assert (refused.code, "cannot be requeued" in refused.err) == (2, True)
    asked = dead("dead", "discard", "--all")
    assert (asked.code, "3 dead letters would be discarded, and there is no" in asked.err) == (2, True)
    assert dead("dead", "discard", "poison-1", entry_name(dead)).err == ("1 conversation closed, 1 entry forgotten.\n")
    assert [each["conversation_id"] for each in dead("dead", "ls", "--json").json] == ["poison-2"]
    assert dead("logs", "poison-1", "--json").code == 0
    assert dead("message", "poison-1", "Again").code == 2
    assert dead("dead", "discard", "--all", "--yes").err == "1 conversation closed.\n"
    assert "no dead letters" in dead("dead", "ls").err
    assert dead("rm", "poison-1", "poison-2").code == 0


async def _dead(client: Client) -> list[str]:
    return await Conversations(client.store).list_dead_letters()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "which conversations"), (["--all", "poison-1"], "which conversations"), (["alive"], "No dead letter: alive")],
)
def test_live_conversation_is_not_requeued(dead: CommandLine, arguments: list[str], told: str) -> None:
    done = dead("dead", "requeue", *arguments)
    assert (done.code, told in done.err) == (2, True)
    assert len(dead.ask(_dead)) == 2


SUBMIT = ("submit", "-t", "x")
SCHEDULE = ("schedule", "add", "s", "-t", "x")
LATER = "2150-03-01T06:00:00+01:00"


def created(command: CommandLine, conversation_id: str) -> dict[str, Any]:
    return dict(command("export", conversation_id).json[0])


def test_a_scheduled_conversation_is_listed_with_its_time(command: CommandLine) -> None:
    done = command("submit", "-t", "x", "--not-before", LATER, "--expires", "2151-01-01T00:00Z")
    conversation_id = done.out.strip()
    (listed,) = command("ls", "--json", "--state", "scheduled").json
    assert (listed["conversation_id"], listed["wait_reason"]) == (conversation_id, "scheduled")
    assert listed["not_before"].startswith("2150-03-01T0")
    assert "scheduled (2150-03-01 0" in command("ls").out
    command("submit", "-t", "x")
    assert len(command("ls", "--json").json) == 2
    assert len(command("ls", "--json", "--state", "scheduled").json) == 1
    shown = command("show", conversation_id).out
    assert "Begins:       not before 2150-03-01 05:00:00 UTC" in shown
    assert "Expires:      unless it has started by 2151-01-01 00:00:00 UTC" in shown
    (summary,) = command("show", conversation_id, "--json").json
    assert datetime.fromisoformat(summary["not_before"]) == datetime.fromisoformat(LATER)


def test_a_file_says_it_line_by_line(command: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"id,task,delay,not_before,expires,double_texting\na,x,60,,,\nb,x,,{LATER},,reject\nc,x,,,60,\n")
    done = command("submit", "--from", path, "--expires", "3000-01-01T00:00Z", "--json")
    assert (done.code, done.out) == (2, "")  # a time that is too far away
    done = command("submit", "--from", path, "--expires", "2160-01-01T00:00Z", "--json")
    assert done.code == 0, done
    ids = {line["id"]: line["conversation_id"] for line in done.json}
    events = {name: created(command, conversation_id) for name, conversation_id in ids.items()}
    assert datetime.fromisoformat(events["b"]["not_before"]) == datetime.fromisoformat(LATER)
    assert (events["b"]["double_texting"], "double_texting" in events["a"]) == ("reject", False)
    assert "not_before" not in events["c"]
    assert events["a"]["expires"].startswith("2160")
    left = datetime.fromisoformat(events["c"]["expires"]) - datetime.fromisoformat(events["c"]["timestamp"])
    assert left <= timedelta(seconds=60)


@pytest.mark.parametrize(
    ("verb", "options", "said"),
    [
        (SUBMIT, ("--delay", "soon"), "--delay 'soon' is not a duration"),
        (SUBMIT, ("--delay", "100000w"), "is not a duration of up to ten years"),
        (SUBMIT, ("--not-before", "tomorrow"), "--not-before 'tomorrow' is not a time"),
        (SUBMIT, ("--expires", "never"), "is neither a time nor a duration"),
        (SUBMIT, ("--delay", "2h", "--expires", "1h"), "it would expire before it may start"),
        (SUBMIT, ("--not-before", LATER, "--expires", "2150-02-01T00:00Z"), "it would expire before it may start"),
        (SUBMIT, ("--double-texting", "panic"), "panic"),
        (SCHEDULE, ("--cron", "61 * * * *"), "The cron of the schedule cannot be used"),
        (SCHEDULE, ("--cron", "0 0 * * *", "--zone", "Mars/Olympus"), "there is no time zone"),
        (SCHEDULE, ("--cron", "0 0 * * *", "--expires", LATER), "cannot be a time of day"),
        (SCHEDULE, ("--cron", "0 0 * * *", "--label", "schedule=other"), "is the name of the schedule"),
    ],
    ids=str,
)
def test_times_that_cannot_be_meant_are_refused(command: CommandLine, verb, options, said) -> None:
    done = command(*verb, *options)
    assert (done.code, said in done.err) == (2, True), done
    assert command("ls", "--json").json == []


@pytest.mark.parametrize("verb", [SUBMIT, (*SCHEDULE, "--cron", "0 0 * * *")], ids=lambda verb: verb[0])
def test_unknown_policy_is_refused_before_anything_starts(command: CommandLine, verb: tuple[str, ...]) -> None:
    async def register(client: Client) -> None:
        about = {"agents": "CodeActAgent", "plugins": ""}
        await Membership(client.store, "c1", "controller", about=about, ttl_seconds=3600.0).register()

    assert command("setup").code == 0
    command.ask(register)
    done = command(*verb, "--confirm", "riskey")
    assert (done.code, "There is no confirmation policy named 'riskey'." in done.err) == (2, True), done
    assert "Known: never, always, risky" in done.err
    assert command("ls", "--json").json == command("schedule", "ls", "--json").json == []


def test_a_message_is_refused_while_the_agent_works(command: CommandLine) -> None:
    conversation_id = command("submit", "-t", "x", "--double-texting", "reject").out.strip()
    done = command("message", conversation_id, "and this")
    assert (done.code, "is working and accepts no message now" in done.err) == (1, True)
    assert command("message", conversation_id, "and this", "--double-texting", "enqueue").code == 0
    assert len(command("export", conversation_id).json) == 3


def test_a_schedule_from_its_beginning_to_its_end(command: CommandLine) -> None:
    add = ("schedule", "add", "nightly", "--cron", "30 6 * * *", "--zone", "Europe/Berlin", "-t", "look")
    done = command(*add, "--overlap", "enqueue", "--label", "team=docs", "-i", "7", "--delay", "1m")
    assert done.code == 0, done
    assert len(done.out.splitlines()) == 5
    assert command(*add).code == 2  # another one of this name
    (listed,) = command("schedule", "ls", "--json").json
    assert (listed["name"], listed["cron"], listed["zone"]) == ("nightly", "30 6 * * *", "Europe/Berlin")
    assert (listed["overlap"], listed["is_paused"], listed["begun"]) == ("enqueue", False, 0)
    assert datetime.fromisoformat(listed["next"]) > datetime.now(UTC) - timedelta(minutes=1)
    assert command("schedule", "pause", "nightly").code == 0
    assert "paused" in command("schedule", "ls").out
    assert "continues at" in command("schedule", "resume", "nightly").err
    assert command("schedule", "rm", "nightly").code == 0
    assert command("schedule", "ls", "--json").json == []
    gone = command("schedule", "pause", "nightly")
    assert (gone.code, "There is no schedule nightly" in gone.err) == (2, True)


def test_durations_and_times_are_read() -> None:
    assert [parse_duration(text, "-") for text in ("90", "1.5h", "2D", " 30m ")] == [90.0, 5400.0, 172800.0, 1800.0]
    assert parse_time("2026-03-01T06:00+01:00", "-") == datetime(2026, 3, 1, 5, tzinfo=UTC)
    with pytest.raises(UsageError):
        parse_duration("inf", "-")


@pytest.mark.parametrize(("way", "option"), [("wait", 1), ("go-on", 2), ("stop", 3)])
def test_loop_recovery_is_in_the_log(command: CommandLine, way: str, option: int) -> None:
    async def fall_into_a_loop(client: Client) -> str:
        """Start a conversation and end it as a controller does when its agent repeats itself."""
        conversation_id = await client.submit("Fix it")
        for name, code in (("running", ""), ("error", STUCK_CODE)):
            await client.log.append(conversation_id, [AgentStateChangedObservation(agent_state=name, code=code)])
        return conversation_id

    conversation_id = command.ask(fall_into_a_loop)
    assert command("recover", conversation_id, way).code == 0
    events = command.ask(lambda client: client.events(conversation_id))
    assert [event.option for event in events if isinstance(event, LoopRecoveryAction)] == [option]


def test_change_is_in_the_log(command: CommandLine) -> None:
    cid = command("submit", "-t", "x", "--label", "team=a", "--confirm", "risky").out.strip()
    who = ("--by", "ann", "--reason", "night")
    assert command("set", cid, "-i", "7", "--max-budget", "2", "--label", "team=b", *who).code == 0
    assert command("set", cid, "--max-tokens", "9", "--confirm", "always", "--model", "acme/x").code == 0
    events = command.ask(lambda client: client.events(cid))
    first, second = [event for event in events if isinstance(event, ConversationChanged)]
    assert (first.limits, first.labels, first.by) == (Limits(max_iterations=7, max_budget_usd=2), {"team": "b"}, "ann")
    assert second.limits == Limits(max_iterations=7, max_budget_usd=2, max_tokens=9)
    assert second.confirmation is not None
    assert second.confirmation.mode == "always"
    assert [event.model for event in events if isinstance(event, ModelSwitched)] == ["acme/x"]
    assert cid in command("ls", "--label", "team=b", "--json").out
    assert command("interrupt", cid).code == 0
    request = command.ask(lambda client: client.events(cid))[-1]
    assert isinstance(request, ChangeAgentStateAction)
    assert request.is_interrupt


def test_invalid_changes_are_refused(command: CommandLine) -> None:
    cid = command("submit", "-t", "x").out.strip()
    before = command.ask(lambda client: client.events(cid))
    for arguments, text in (
        (("recover", cid, "go-on"), "is not in a loop"),
        (("recover", cid, "away"), "'away' is not one of"),
        (("run", "-t", "x", "--recover", "wait"), "--recover needs a run to resume."),
        (("run", "--resume", cid, "-t", "x", "--recover", "wait"), "cannot be combined"),
        (("set", cid), "The request names no setting to change."),
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
        done = command(*arguments)
        assert done.code == 2, done
        assert text in done.err, done
    assert command.ask(lambda client: client.events(cid)) == before


ADDRESS = "https://1.1.1.1/hook"


@pytest.fixture
def webhook(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command `webhook`; jobs in this process have its key."""
    monkeypatch.setenv("DECKHANDS_HOME", command.env["DECKHANDS_HOME"])
    command.env["DECKHANDS_WEBHOOK_PRIVATE"] = "127.0.0.1"
    return partial(command, "webhook")


def test_webhook_is_added_listed_removed_and_its_secret_shown_once(webhook: Callable[..., Done]) -> None:
    empty = webhook("ls")
    assert (empty.code, empty.out, "There are no webhooks." in empty.err) == (0, "", True)
    events = ("--event", "conversation.waiting", "--event", "action.run")
    (made,) = webhook("add", ADDRESS, "--tenant", "acme", *events, "--json").json
    plain = webhook("add", ADDRESS)
    assert plain.out.startswith("whsec_")
    first, second = webhook("ls", "--json").json
    assert (first["id"], first["tenant"], first["url"]) == (made["id"], "acme", ADDRESS)
    assert first["events"] == ["conversation.waiting", "action.run"]
    assert (second["tenant"], second["events"]) == ("*", ["conversation.settled"])
    shown = webhook("ls")
    assert made["id"] in shown.out
    assert made["secret"].removeprefix("whsec_") not in shown.out + str(first)
    assert webhook("rm", made["id"]).code == 0
    assert [found["id"] for found in webhook("ls", "--json").json] == [second["id"]]
    gone = webhook("rm", made["id"])
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
def test_webhook_that_cannot_be_used_is_refused_by_name(
    webhook: Callable[..., Done], arguments: tuple[str, ...], said: str
) -> None:
    refused = webhook(*arguments)
    assert (refused.code != 0, refused.out) == (True, "")
    assert said in refused.err
    assert webhook("ls", "--json").json == []


def test_deliveries_are_listed_with_how_they_have_ended(command: CommandLine, webhook: Callable[..., Done]) -> None:
    async def work(client: Client) -> None:
        sent: list[tuple[str, ...]] = []
        settings = BrokerSettings(webhook_private="127.0.0.1")
        bench = JobServices(client.store, settings, lambda _, arguments: sent.append(arguments))
        async with receiving() as receiver:
            receiver.answer = lambda body: 500 if body["data"]["conversation_id"] == "told-one" else 204
            await open_repository(bench).add("*", receiver.url, ("conversation.settled",))
            for name in ("told-one", "told-two"):
                await begin_worked(client, name)
            await notify(bench)
            assert [await deliver(bench, *arguments) for arguments in sent] == [1, 1]

    command.ask(work)
    (webhook_id,) = [found["id"] for found in webhook("ls", "--json").json]
    found = {shown["conversation_id"]: shown for shown in webhook("deliveries", webhook_id, "--json").json}
    assert (found["told-two"]["state"], found["told-two"]["next_attempt"]) == ("delivered", None)
    shown = found["told-one"]
    assert datetime.fromisoformat(shown["next_attempt"]) > datetime.fromisoformat(shown["planned"])
    assert (shown["conversation_id"], shown["state"], shown["attempts"]) == ("told-one", "waiting", 1)
    assert (shown["status"], shown["error"], "body" in shown) == (500, "The receiver answered with status 500.", False)
    assert "told-one" in webhook("deliveries", webhook_id).out


@pytest.mark.parametrize(
    ("verb", "options", "action"),
    [
        ("message", ("Faster.",), "message"),
        ("pause", (), "pause"),
        ("resume", (), "resume"),
        ("interrupt", (), "interrupt"),
        ("cancel", ("--no-wait",), "cancel"),
    ],
)
def test_author_and_reason_of_a_verb_are_in_the_log(
    command: CommandLine, verb: str, options: tuple[str, ...], action: str
) -> None:
    (submitted,) = command("submit", "-t", "task", "--json", "--model", "m").json
    cid = submitted["conversation_id"]
    done = command(verb, cid, *options, "--by", "Ada", "--reason", "Too slow.")
    assert done.code == 0, done
    *_, acted, effect = command.ask(lambda client: client.events(cid))
    assert isinstance(acted, OperatorActed)
    assert (acted.author, acted.action, acted.reason) == ("Ada", action, "Too slow.")
    assert not isinstance(effect, OperatorActed)


def test_reason_alone_has_the_login_as_author(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    line = CommandLine(command.env | {"LOGNAME": "ada"})
    (submitted,) = command("submit", "-t", "task", "--json", "--model", "m").json
    cid = submitted["conversation_id"]
    assert line("pause", cid, "--reason", "Lunch.").code == 0
    assert command("resume", cid).code == 0
    acted = [event for event in command.ask(lambda client: client.events(cid)) if isinstance(event, OperatorActed)]
    assert [(event.author, event.reason) for event in acted] == [("ada", "Lunch.")]


def test_deletions_are_in_the_record_of_operations(command: CommandLine) -> None:
    command.ask(lambda client: begin_ended(client, "gone"))
    assert command("rm", "gone", "--yes", "--by", "Ada", "--reason", "Spam.").code == 0
    (entry,) = command.ask(lambda client: Operations(client.store).latest())
    assert (entry.author, entry.action, entry.target, entry.reason) == ("Ada", "delete", "gone", "Spam.")


def test_an_author_that_is_too_long_is_refused(command: CommandLine) -> None:
    done = command("pause", "any", "--by", "x" * 100_001)
    assert done.code == 2
    assert "The by has" in done.err
