"""Commands on a real terminal: the output of a run and its log, input in `chat`, and use of `top`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest

from broker.contract.policies import ConfirmationPolicy
from tests.faults.harness import FaultCluster, steps
from tests.integration.command_line import COMMAND, deckhands, environment, run_command
from tests.terminal_parts import Person, person
from tests.turns import bash, call, finish, script

STATUS = re.compile(r"^[-|/\\] step \d+ · \S+ tokens · .+ · \d+:\d\d · ")
OURS = re.compile(rb"\x1b\[(?:[012]m|3[126]m|J|\d*A)")
EVIL = r"printf '\033]0;evil\007\033[31mred\033[2J \302\23331m \342\200\256abc\n'"


def _bottom(seen: Person) -> str:
    return next(line for line in reversed(seen.lines) if line)


def test_a_person_reads_a_run_and_its_log(tmp_path: Path) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    edit = {"command": "str_replace", "path": f"{folder}/a.txt", "old_str": "two", "new_str": "zwei"}
    model = script(
        tmp_path / "model.json",
        run_command(
            "seq 1 60; until test -e go; do sleep 0.1; done", thinking="Let me look.", text="I list the files."
        ),
        call("str_replace_editor", **edit),
        bash(EVIL),
        finish("Done."),
    )
    env = environment(home)
    run = [*COMMAND, "run", "--sandbox", "none", "-t", "do it", "-w", folder, "--model", model]
    with person(run, env, rows=14) as seen:
        seen.waits_for("$ seq 1 60", "~ Let me look.", " · $ seq 1 60; until", limit=90)
        assert STATUS.match(_bottom(seen)), seen.text
        (folder / "go").touch()
        assert seen.leaves() == 0
        text = "\n".join(seen.scrolled)
        assert "  4\n  … 49 more lines …\n  54\n" in text, text
        assert "  -two\n  +zwei\n" in text, text
        assert "State:        finished" in text, text
        assert "I list the files." in text, text
        assert not [line for line in seen.scrolled if STATUS.match(line)], "the line has scrolled away"
        raw = bytes(seen.raw)
        assert b"\x1b[32m  +zwei\x1b[0m" in raw
        assert b"\x1b[31m  -two\x1b[0m" in raw
        left = OURS.sub(b"", raw)
        assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xa8-\xae]", left), (
            left
        )
    (run_folder,) = (home / "runs").iterdir()
    _see_the_log(run_folder.name, home)


def _see_the_log(name: str, home: Path) -> None:
    env = environment(home)
    piped = subprocess.run([*COMMAND, "logs", name], env=env, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    assert "\n\n" not in piped
    for arguments, more in ((["--plain"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})):
        with person([*COMMAND, "logs", name, *arguments], env | more, columns=200) as seen:
            assert seen.leaves() == 0
            assert bytes(seen.raw).decode().replace("\r\n", "\n") == piped, "scripts and their writers see the same"
    with person([*COMMAND, "logs", "--full", name], env, rows=100) as seen:
        assert seen.leaves() == 0
        assert "  30" in seen.lines, seen.text
        assert "more lines" not in seen.text
        assert b"\x1b[32m  +zwei\x1b[0m" in seen.raw


LEFT = re.compile(rb"\x1b\]0;|\xc2[\x80-\x9f]|\xe2\x80\xae")
PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")


def test_a_person_talks_with_an_agent_leaves_and_comes_back(tmp_path: Path) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    (tmp_path / "pixel.png").write_bytes(PIXEL)
    (folder / "a.txt").write_text("zero\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", "-C", folder, *command.split()], check=True)
    model = script(
        tmp_path / "model.json",
        bash(f"echo one > a.txt; {EVIL}"),
        bash("echo two > b.txt", security_risk="HIGH"),
        {"text": "I leave b.txt alone. What next?"},
        bash("touch begun; sleep 600"),
        {"text": "Interrupted, I see."},
        {"text": "Welcome back."},
    )
    env = environment(home)
    chat = [*COMMAND, "chat", "--sandbox", "none", "-w", folder, "--model", model]
    with person(chat, env, columns=160, rows=45) as seen:
        seen.waits_for("type a task · /help", limit=90)
        _use_commands(seen, tmp_path)
        seen.type("do it\r")
        seen.waits_for("The agent asks to run action", "$ echo two > b.txt", "Run it?", limit=90)
        assert seen.screen.title == ""
        seen.type("no: not that one\r")
        seen.waits_for("What next?", "awaiting user input")
        assert not (folder / "b.txt").exists()
        seen.type("/status\r")
        seen.waits_for("State:        awaiting_user_input", "Conversation:")
        seen.type("/diff\r")
        seen.waits_for("You $ git --no-pager diff HEAD --", "+one")
        seen.type("!cat a.txt\r")
        seen.waits_for("You $ cat a.txt", "  one")
        seen.type("sleep\r")
        seen.waits_for("$ touch begun; sleep 600", limit=90)
        while not (folder / "begun").exists():
            seen.look()
        seen.type("\x03")
        seen.waits_for("Interrupted. Say what to do instead", "· paused")
        seen.type("go\r")
        seen.waits_for("Interrupted, I see.")
        seen.type("\x04")
        assert seen.leaves() == 0
        text = "\n".join(seen.scrolled)
        assert not LEFT.search(bytes(seen.raw)), text
    (name,) = [path.name for path in (home / "runs").iterdir()]
    assert f"`deckhands chat {name}` continues it." in text
    events = [json.loads(line) for line in (home / "runs" / name / "events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["kind"] == "action.message")["image_urls"]
    assert "not that one" in [event.get("reason") for event in events]
    with person([*COMMAND, "chat", name], env) as seen:
        seen.waits_for("Interrupted, I see.", "awaiting user input", limit=90)
        seen.type("\x1b[A")
        seen.waits_for("> go")
        seen.type("\x15hello again\r")
        seen.waits_for("Welcome back.", limit=90)
        seen.type("/quit\r")
        assert seen.leaves() == 0


def _use_commands(seen: Person, root: Path) -> None:
    seen.type("/help\r")
    seen.waits_for("/model [NAME]", "Enter sends")
    seen.type("/nonsense\r")
    seen.waits_for("There is no command /nonsense.")
    seen.type("/why\r")
    seen.waits_for("There is no conversation yet.")
    seen.type(f"/image {root}/missing.png\r")
    seen.waits_for("missing.png cannot be read")
    seen.type(f"/image {root}/pixel.png\r")
    seen.waits_for("pixel.png goes with the next message.")
    seen.type("\x03")
    seen.waits_for("Press Ctrl-C again to leave")


ALWAYS = ConfirmationPolicy(mode="always")
HOSTILE = "evil \x1b]0;title\x07\x1b[2J\x9b31m\u202eabc [bold]x[/bold]"


async def test_a_person_watches_a_cluster_and_acts_on_it(cluster: FaultCluster) -> None:
    cluster.start()
    (done,) = await cluster.submit(steps(1))
    (asking,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    waiting = await cluster.client.submit(HOSTILE, title=HOSTILE, delay=3_600)
    await cluster.client.wait_until_settled(done, timeout_seconds=60)
    await cluster.client.wait_until_settled(asking, timeout_seconds=60)
    env = environment(cluster.root / "home", DECKHANDS_URL=cluster.store.url)

    def look() -> None:
        with person([*COMMAND, "top"], env, columns=170) as seen:
            _see_the_list(seen, done, asking, waiting)
            _refuse_an_action(seen, asking)
            seen.type("?")
            seen.waits_for("Interrupt", "Focus Next")
            seen.type("?")
            seen.waits_for("Interrupt", gone="Focus Next")
            seen.type("\x1b")
            seen.waits_for("CONVERSATION")
            _read_the_keys(seen)
            seen.type("c")
            seen.waits_for("Queues", "ready_interactive")
            seen.type("q")
            seen.waits_for("CONVERSATION")
            _cancel(seen, waiting)
            seen.type("q")
            assert seen.leaves() == 0
            assert not LEFT.search(bytes(seen.raw)), "something of a title has reached the terminal raw"
            assert b"\x1b[?1049l" in seen.raw, "the screen is not given back"

    await asyncio.to_thread(look)
    events = await cluster.client.events(asking)
    assert "not that way" in [getattr(event, "reason", None) for event in events]
    assert (await cluster.client.row(waiting)).state == "stopped"


def _see_the_list(seen: Person, done: str, asking: str, waiting: str) -> None:
    seen.waits_for("Conversations: 3", "1 finished", "Workers: controller 1", "tool 1", done, asking, waiting)
    row = next(line for line in seen.lines if waiting in line)
    assert row.startswith("loading (scheduled)"), row
    assert r"evil \x1b]0;title\x07\x1b[2J\x9b31m\u202eabc [bold]x" in row
    row = next(line for line in seen.lines if asking in line)
    assert row.startswith("awaiting user confirmation"), row
    seen.type("s")
    seen.waits_for("AGEv")
    seen.type("/")
    seen.waits_for("words that must all match")
    seen.type("awaiting")
    seen.waits_for("Filter: awaiting · 1 conversation", gone=waiting)
    seen.type("\r")
    seen.waits_for("Open", gone="words that must")


def _read_the_keys(seen: Person) -> None:
    seen.type("?")
    seen.waits_for("Page up", "First", "Open")
    seen.type("?")
    seen.waits_for("CONVERSATION", gone="Page up")


def _refuse_an_action(seen: Person, asking: str) -> None:
    seen.type("\r")
    seen.waits_for("waits for a user", "The agent asks to run action", "echo begin-0", "You: do it")
    assert asking in seen.text
    seen.type("n")
    seen.waits_for("Why not?")
    seen.type("not that way\r")
    seen.waits_for("The action was rejected.")
    seen.waits_for("Action has been rejected by the user", "The conversation is finished")


def _cancel(seen: Person, waiting: str) -> None:
    seen.type("\x1b")
    seen.waits_for("Conversations: 3", waiting)
    seen.type("/")
    seen.waits_for("words that must all match")
    seen.type("scheduled\r")
    seen.waits_for("Filter: scheduled · 1 conversation")
    seen.type("x")
    seen.waits_for(f"Stop {waiting}", "[y/N]")
    seen.type("y")
    seen.waits_for(f"{waiting} was asked to stop.")


@pytest.mark.parametrize(("verb", "remedy"), [("chat", ""), ("top", "  `deckhands ls` prints a list.\n")])
def test_without_a_terminal_it_says_what_to_use(tmp_path: Path, verb: str, remedy: str) -> None:
    done = deckhands(verb, env=environment(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert f"deckhands: `deckhands {verb}` needs a terminal.\n{remedy}" in done.err


@pytest.mark.parametrize(
    ("key", "option"), [("\x03", "--stream"), ("", ""), ("", "--plain"), ("", "--stream")], ids=str
)
def test_terminal_that_interrupts_or_closes_ends_a_run_in_order(tmp_path: Path, key: str, option: str) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    model = script(tmp_path / "model.json", bash("touch begun; sleep 600"), finish("Done."))
    run = [*COMMAND, "run", "--sandbox", "none", "-t", "do it", "-w", folder, "--model", model, *option.split()]
    with person(run, environment(home)) as seen:
        seen.waits_for("$ touch begun; sleep 600", limit=90)
        while not (folder / "begun").exists():
            seen.look()
        if key:
            seen.type(key)
            seen.leaves()
    assert seen.running.returncode == 130
    (run_folder,) = (home / "runs").iterdir()
    if key:
        assert "State:        stopped" in seen.text, seen.text
        assert f"Continue with `deckhands run --resume {run_folder.name}`." in " ".join(seen.text.split()), seen.text
    assert json.loads((run_folder / "summary.json").read_text())["state"] == "stopped"
    events = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["kind"], events[-1]["agent_state"]) == ("observation.agent_state_changed", "stopped")
    shown = deckhands("logs", run_folder.name, env=environment(home))
    assert shown.out.splitlines()[-1] == "(stopped)", shown
    assert not (home / "errors.log").exists()
