"""`submit` with a time to begin, files of such tasks, messages with a policy, and `schedule`, on the command line."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from deckhands.cli.timing_options import parse_duration, parse_time
from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer, emptied

LATER = "2150-03-01T06:00:00+01:00"


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    """A cluster without workers."""
    asyncio.run(emptied(valkey_server.url))
    return environment(tmp_path / "home", DECKHANDS_URL=valkey_server.url)


def created(env: dict[str, str], conversation_id: str) -> dict[str, Any]:
    first: dict[str, Any] = deckhands("export", conversation_id, env=env).json[0]
    return first


def test_a_scheduled_conversation_is_listed_with_its_time(env: dict[str, str]) -> None:
    done = deckhands("submit", "-t", "x", "--not-before", LATER, "--expires", "2151-01-01T00:00Z", env=env)
    conversation_id = done.out.strip()
    (listed,) = deckhands("ls", "--json", "--state", "scheduled", env=env).json
    assert (listed["conversation_id"], listed["wait_reason"]) == (conversation_id, "scheduled")
    assert listed["not_before"].startswith("2150-03-01T0")
    assert "scheduled (2150-03-01 0" in deckhands("ls", env=env).out
    deckhands("submit", "-t", "x", env=env)
    assert len(deckhands("ls", "--json", env=env).json) == 2
    assert len(deckhands("ls", "--json", "--state", "scheduled", env=env).json) == 1
    shown = deckhands("show", conversation_id, env=env).out
    assert "Begins:       not before 2150-03-01 05:00:00 UTC" in shown
    assert "Expires:      unless it has started by 2151-01-01 00:00:00 UTC" in shown
    (summary,) = deckhands("show", conversation_id, "--json", env=env).json
    assert datetime.fromisoformat(summary["not_before"]) == datetime.fromisoformat(LATER)


def test_a_file_says_it_line_by_line(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"id,task,delay,not_before,expires,double_texting\na,x,60,,,\nb,x,,{LATER},,reject\nc,x,,,60,\n")
    done = deckhands("submit", "--from", path, "--expires", "3000-01-01T00:00Z", "--json", env=env)
    assert (done.code, done.out) == (2, "")  # a time that is too far away
    done = deckhands("submit", "--from", path, "--expires", "2160-01-01T00:00Z", "--json", env=env)
    assert done.code == 0, done
    ids = {line["id"]: line["conversation_id"] for line in done.json}
    events = {name: created(env, conversation_id) for name, conversation_id in ids.items()}
    assert datetime.fromisoformat(events["b"]["not_before"]) == datetime.fromisoformat(LATER)
    assert (events["b"]["double_texting"], "double_texting" in events["a"]) == ("reject", False)
    assert "not_before" not in events["c"]
    assert events["a"]["expires"].startswith("2160")
    left = datetime.fromisoformat(events["c"]["expires"]) - datetime.fromisoformat(events["c"]["timestamp"])
    assert left <= timedelta(seconds=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--delay", "soon"), "--delay 'soon' is not a duration"),
        (("--delay", "100000w"), "is not a duration of up to ten years"),
        (("--not-before", "tomorrow"), "--not-before 'tomorrow' is not a time"),
        (("--expires", "never"), "is neither a time nor a duration"),
        (("--delay", "2h", "--expires", "1h"), "it would expire before it may start"),
        (("--not-before", LATER, "--expires", "2150-02-01T00:00Z"), "it would expire before it may start"),
        (("--double-texting", "panic"), "panic"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(env: dict[str, str], options: tuple[str, ...], said: str) -> None:
    done = deckhands("submit", "-t", "x", *options, env=env)
    assert done.code == 2
    assert said in done.err
    assert deckhands("ls", "--json", env=env).json == []


def test_a_message_is_refused_while_the_agent_works(env: dict[str, str]) -> None:
    conversation_id = deckhands("submit", "-t", "x", "--double-texting", "reject", env=env).out.strip()
    done = deckhands("message", conversation_id, "and this", env=env)
    assert (done.code, "is working and accepts no message now" in done.err) == (1, True)
    assert deckhands("message", conversation_id, "and this", "--double-texting", "enqueue", env=env).code == 0
    assert len(deckhands("export", conversation_id, env=env).json) == 3


def test_a_schedule_from_its_beginning_to_its_end(env: dict[str, str]) -> None:
    add = ("schedule", "add", "nightly", "--cron", "30 6 * * *", "--zone", "Europe/Berlin", "-t", "look")
    done = deckhands(*add, "--overlap", "enqueue", "--label", "team=docs", "-i", "7", "--delay", "1m", env=env)
    assert done.code == 0, done
    assert len(done.out.splitlines()) == 5
    assert deckhands(*add, env=env).code == 2  # another one of this name
    (listed,) = deckhands("schedule", "ls", "--json", env=env).json
    assert (listed["name"], listed["cron"], listed["zone"]) == ("nightly", "30 6 * * *", "Europe/Berlin")
    assert (listed["overlap"], listed["is_paused"], listed["begun"]) == ("enqueue", False, 0)
    assert datetime.fromisoformat(listed["next"]) > datetime.now(UTC) - timedelta(minutes=1)
    assert deckhands("schedule", "pause", "nightly", env=env).code == 0
    assert "paused" in deckhands("schedule", "ls", env=env).out
    assert "continues at" in deckhands("schedule", "resume", "nightly", env=env).err
    assert deckhands("schedule", "rm", "nightly", env=env).code == 0
    assert deckhands("schedule", "ls", "--json", env=env).json == []
    gone = deckhands("schedule", "pause", "nightly", env=env)
    assert (gone.code, "There is no schedule nightly" in gone.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cron", "61 * * * *"), "The cron of the schedule cannot be used"),
        (("--cron", "0 0 * * *", "--zone", "Mars/Olympus"), "there is no time zone"),
        (("--cron", "0 0 * * *", "--expires", LATER), "cannot be a time of day"),
        (("--cron", "0 0 * * *", "--label", "schedule=other"), "is the name of the schedule"),
    ],
    ids=str,
)
def test_a_schedule_that_cannot_be_is_refused(env: dict[str, str], options: tuple[str, ...], said: str) -> None:
    done = deckhands("schedule", "add", "s", "-t", "x", *options, env=env)
    assert done.code == 2
    assert said in done.err


def test_durations_and_times_are_read() -> None:
    assert [parse_duration(text, "-") for text in ("90", "1.5h", "2D", " 30m ")] == [90.0, 5400.0, 172800.0, 1800.0]
    assert parse_time("2026-03-01T06:00+01:00", "-") == datetime(2026, 3, 1, 5, tzinfo=UTC)
    with pytest.raises(UsageError):
        parse_duration("inf", "-")
