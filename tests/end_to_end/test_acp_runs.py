"""`deckhands run --agent acp:COMMAND`: a scripted ACP agent in the sandbox of a workspace, from start to end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command_line import Done, deckhands, environment

AGENT = Path(__file__).resolve().parents[1] / "acp_agent.py"
NAME = "acp:python3 agent.py load"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(AGENT, folder / "agent.py")
    return folder


def run(work: Path, *steps: str, options: tuple[str, ...] = (), agent: str = NAME, **variables: str) -> Done:
    env = environment(work.parent / "home", **variables)
    return deckhands("run", "--agent", agent, "-t", "\n".join(steps), "-w", work, *options, env=env)


def kinds(done: Done) -> list[Any]:
    return [event.get("kind") for event in done.json]


def test_a_run_finishes_resumes_and_replays(work: Path) -> None:
    done = run(
        work,
        "!plan look|do",
        "!call List|ls",
        "!edit new.txt|line",
        "!ask Go|touch gone",
        "!say Done.",
        options=("--json",),
    )
    assert done.code == 0, done
    assert {"observation.task_tracking", "observation.acp", "action.acp_permission", "action.finish"} <= set(
        kinds(done)
    )
    assert ((work / "new.txt").read_text(), (work / "gone").exists()) == ("line", True)
    env, cid = environment(work.parent / "home"), done.json[-1]["conversation_id"]
    again = deckhands("run", "--resume", cid, "-t", "More", "--json", env=env)
    assert again.code == 0, again
    # The cluster of the first run has ended, and the agent with it: the session is loaded.
    assert again.json[-1]["message"].endswith("You said: More") or "You said: More" in again.out
    checked = deckhands("replay", cid, "--json", env=env)
    assert checked.json[0]["is_same"], checked


def test_what_a_reader_sees_has_diffs_and_no_escape_sequence(work: Path) -> None:
    done = run(
        work, "!say Be\x1b[2Jware", "!call \x1b]0;title\x07T|printf '\\033[31mred'", "!edit new.txt|one\x1b[1mline"
    )
    assert done.code == 0, done
    assert "\x1b" not in done.out
    assert "\x07" not in done.out
    assert "new.txt\n+ one" in done.out


def test_the_agent_is_in_the_sandbox(work: Path) -> None:
    secret = work.parent / "secret.txt"
    secret.write_text("canary-file")
    done = run(
        work,
        f"!call Look|cat {secret}; cat /proc/*/environ | tr '\\0' '\\n'; ls /proc",
        f"!read {secret}",
        LLM_API_KEY="canary-key",
    )
    assert done.code == 0, done
    assert "canary" not in done.out.replace(str(secret), "").replace("cat ", "")
    assert "No such file" in done.out


def test_named_secret_reaches_only_the_agent(work: Path) -> None:
    options = ("--secret", "AGENT_KEY", "--secret", "OTHER_KEY", "--json")
    agent = "acp:python3 agent.py $AGENT_KEY"
    check = '!call Check|test "$AGENT_KEY" = canary-one && test -z "$OTHER_KEY" && echo as it should be'
    keys = {"AGENT_KEY": "canary-one", "OTHER_KEY": "canary-two"}
    done = run(work, check, "!env AGENT_KEY", options=options, agent=agent, **keys)
    assert done.code == 0, done
    assert "as it should be" in done.out
    assert "canary" not in done.out.replace("= canary-one", "")


def test_run_without_people_ends_at_the_question(work: Path) -> None:
    done = run(work, "!ask Remove everything|touch gone", options=("--confirm", "always"))
    assert done.code == 5, done
    assert "Remove everything" in done.out
    assert not (work / "gone").exists()


@pytest.mark.parametrize("agent", ["acp:", "acp:  ", "acp:a\x01b"])
def test_an_agent_without_a_command_is_refused(work: Path, agent: str) -> None:
    done = run(work, "hello", agent=agent)
    assert done.code == 2, done
    assert "Traceback" not in done.err
