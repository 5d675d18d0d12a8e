"""`deckhands chat` on a real terminal: messages, questions, slash commands, and coming back."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.integration.command_line import COMMAND, environment, script
from tests.terminal_parts import Person, person

LEFT = re.compile(rb"\x1b\]0;|\xc2[\x80-\x9f]|\xe2\x80\xae")
EVIL = r"printf '\033]0;evil\007\033[2J \302\23331m \342\200\256abc\n'"
PIXEL = bytes.fromhex("89504e470d0a1a0a0000000d49484452")


def _bash(command: str, risk: str = "LOW") -> dict[str, object]:
    return {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command, "security_risk": risk}}]}


def _say(text: str) -> dict[str, object]:
    return {"text": text}


def test_a_person_talks_with_an_agent_leaves_and_comes_back(tmp_path: Path) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    (tmp_path / "pixel.png").write_bytes(PIXEL)
    (folder / "a.txt").write_text("zero\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"):
        subprocess.run(["git", "-C", folder, *command.split()], check=True)
    model = script(
        tmp_path / "model.json",
        _bash(f"echo one > a.txt; {EVIL}"),
        _bash("echo two > b.txt", "HIGH"),
        _say("I leave b.txt alone. What next?"),
        _bash("touch begun; sleep 600"),
        _say("Interrupted, I see."),
        _say("Welcome back."),
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


def test_without_a_terminal_it_says_what_to_use(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "chat"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "`deckhands chat` needs a terminal." in done.stderr
