"""`deckhands run` with a private store and workers: its files and output, interruption and continuation."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from broker.contract.actions import SystemMessageAction
from broker.runtime.ids import format_count
from tests.integration.command_line import (
    COMMAND,
    cluster,
    deckhands,
    environment,
    finished,
    read_until,
    run_command,
    started,
)
from tests.polling import until
from tests.turns import finish, script


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def env(home):
    return environment(home)


@pytest.fixture
def workspace(tmp_path):
    path = tmp_path / "workspace"
    path.mkdir()
    return path


def running_below(path) -> list[str]:
    """Return the command lines of processes that belong to a directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        try:
            has_it = str(path) in " ".join(process.info["cmdline"] or ()) or any(
                str(path) in value for value in process.environ().values()
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if has_it and process.pid != psutil.Process().pid:
            found.append(" ".join(process.info["cmdline"]))
    return found


def test_files_that_a_run_leaves(env, home, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("echo hello > a"), finish("Done."))
    (tmp_path / "task").write_text("Do it.")
    done = deckhands("run", "-f", tmp_path / "task", "-w", workspace, "--model", model, "--json", env=env)
    assert done.code == 0, done
    assert (workspace / "a").read_text() == "hello\n"
    *events, summary = done.json
    cid = summary["conversation_id"]
    assert done.err == f"Conversation {cid}\n"
    assert events[1]["content"] == "Do it."

    folder = home / "runs" / cid
    assert [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()] == events
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert deckhands("export", cid, env=env).json == events
    assert deckhands("show", cid, "--json", env=env).json == [summary]
    assert deckhands("logs", "-f", cid, env=env).out.splitlines()[-1] == "Done."
    (listed,) = deckhands("ls", "--json", env=env).json
    assert (listed["conversation_id"], listed["state"], listed["title"]) == (cid, "finished", "Do it.")
    assert running_below(home) == []

    told_again = deckhands("run", "--resume", cid, "--json", env=env)
    assert (told_again.code, told_again.json) == (0, [summary])
    assert "This run has settled (finished); give it a new task with -t." in told_again.err
    other = script(tmp_path / "other.json", {}, {}, finish("Done by another."))
    again = deckhands("run", "--resume", cid, "-t", "Once more.", "--model", other, env=env)
    assert (again.code, again.out.splitlines()[:2]) == (0, [f"The model is now {other}", "You: Once more."])
    shown = deckhands("show", cid, "--json", env=env).json[0]
    assert (shown["model"], shown["message"]) == (other, "Done by another.")
    assert shown["iterations"] > summary["iterations"]


def test_interrupted_run_stops_in_order_and_can_continue(env, home, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("sleep 302.9"), run_command("echo x > b"), finish("Done."))
    arguments = ["run", "-t", "Do it.", "-w", workspace, "--model", model, "--sandbox", "none", "--json"]
    with started(*arguments, env=env) as running:
        read_until(running, '"kind": "action.run"')
        running.send_signal(signal.SIGINT)
        done = finished(running)
    assert done.code == 130, done
    assert "interrupted; stopping" in done.err
    summary = done.json[-1]
    assert f"Continue with `deckhands run --resume {summary['conversation_id']}`." in done.err
    assert (summary["summary"], summary["state"]) == (True, "stopped")
    assert running_below(home) == []
    cid = summary["conversation_id"]
    assert json.loads((home / "runs" / cid / "summary.json").read_text()) == summary

    resumed = deckhands("run", "--resume", cid, env=env)
    assert (resumed.code, resumed.out.splitlines()[0]) == (0, "Asked to be running")
    assert "Done." in resumed.out.splitlines()
    assert (workspace / "b").read_text() == "x\n"  # in a new session, since the first one ended with the run


@pytest.mark.soak
def test_a_run_whose_reader_has_gone_stops_in_order(env, home, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("sleep 302.7"), finish("Done."))
    arguments = ["run", "-t", "Do it.", "-w", workspace, "--model", model, "--sandbox", "none"]
    with started(*arguments, env=env) as running:
        read_until(running, "Do it.")
        running.stdout.close()
        assert running.wait(timeout=60) == 130
        said = r"Conversation (\w+)\ninterrupted; stopping\nContinue with `deckhands run --resume \w+`\.\n\Z"
        cid = re.match(said, running.stderr.read())[1]
    assert json.loads((home / "runs" / cid / "summary.json").read_text())["state"] == "stopped"
    assert running_below(home) == []


def test_a_run_that_was_killed_can_be_gone_on_with(env, home, workspace, tmp_path):
    go = tmp_path / "go"
    waiting = f"while [ ! -e {go} ]; do sleep 0.05; done; echo x >> count"
    model = script(tmp_path / "m.json", run_command("pwd"), run_command(waiting), finish("Done."))
    arguments = ["run", "-t", "Do it.", "-w", workspace, "--model", model, "--sandbox", "none", "--json"]
    with started(*arguments, env=env) as running:
        first = json.loads(read_until(running, '"kind": "conversation.created"')[-1])
        read_until(running, '"kind": "action.run"')
        read_until(running, '"kind": "action.run"')
        running.kill()
    cid = first["conversation_id"]
    asyncio.run(until(lambda: not running_below(home / "runs" / cid / "valkey"), what="end of the store"))
    assert not (home / "runs" / cid / "summary.json").exists()
    (listed,) = deckhands("ls", "--json", env=env).json
    assert (listed["state"], listed["wait_reason"]) == ("running", "in progress, or killed")
    seen = deckhands("export", cid, env=env).json

    go.write_text("")
    resumed = deckhands("run", "--resume", cid, "--json", env=env)
    assert (resumed.code, resumed.json[-1]["state"]) == (0, "finished"), resumed
    events = deckhands("export", cid, env=env).json
    assert events[: len(seen)] == seen
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert (workspace / "count").read_text() == "x\n"


def test_a_second_interruption_ends_it_at_once(env, home, workspace, tmp_path):
    model = script(tmp_path / "m.json", finish("Done."), latency_seconds=300)
    with started("run", "-t", "Do it.", "-w", workspace, "--model", model, env=env) as running:
        read_until(running, "Do it.")
        running.send_signal(signal.SIGSTOP)  # both signals wait, and are seen one right after the other
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGTERM)
        running.send_signal(signal.SIGCONT)
        assert finished(running).code == 130
    asyncio.run(until(lambda: running_below(home) == [], what="end of everything"))


def test_active_run_is_seen_and_stopped_from_another_terminal(env, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("sleep 303.3"), finish("Done."))
    arguments = ["run", "-t", "Do it.", "-w", workspace, "--model", model, "--sandbox", "none", "--json"]
    with started(*arguments, env=env) as running:
        cid = json.loads(read_until(running, '"kind": "conversation.created"')[-1])["conversation_id"]
        read_until(running, '"kind": "action.run"')
        assert "$ sleep 303.3" in deckhands("logs", cid, env=env).out.splitlines()
        assert deckhands("show", cid, "--json", env=env).json[0]["state"] == "running"
        taken = deckhands("run", "--resume", cid, env=env)
        assert (taken.code, f"(pid {running.pid})" in taken.err) == (2, True)
        assert deckhands("cancel", cid, env=env).code == 0
        done = finished(running)
    assert (done.code, done.json[-1]["state"]) == (130, "stopped")


@pytest.mark.parametrize(
    "size_bytes", [60_000, *(pytest.param(size, marks=pytest.mark.soak) for size in (20_000, 90_000))]
)
def test_a_disk_that_is_full_is_named(env, home, workspace, tmp_path, size_bytes):
    home.mkdir()
    model = script(tmp_path / "m.json", finish("Done."))
    mount = ["bwrap", "--dev-bind", "/", "/", "--size", str(size_bytes), "--tmpfs", str(home)]
    command = [*mount, *COMMAND, "run", "-t", "x", "-w", str(workspace), "--model", model, "--sandbox", "none"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done
    assert "The disk is full: " in done.stderr
    assert re.search(r"Free some space .*DECKHANDS_HOME", done.stderr)


@pytest.mark.parametrize("verb", ["run", pytest.param("up", marks=pytest.mark.soak)])
def test_a_disk_without_a_single_byte_is_named(env, home, workspace, verb):
    home.mkdir()
    full = f'cat /dev/zero > {home}/full 2>/dev/null; exec "$@"'
    task = ["-t", "x", "-w", workspace, "--model", "scripted//dev/null"] if verb == "run" else []
    mount = ["bwrap", "--dev-bind", "/", "/", "--size", "60000", "--tmpfs", str(home)]
    command = [*mount, "sh", "-c", full, "sh", *COMMAND, verb, *task]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()[0].partition(str(home))[0]) == (
        1,
        "deckhands: The disk is full: nothing can be written in ",
    )


NOTICE = "The environment variable LLM_TEMPRATURE is not known; did you mean LLM_TEMPERATURE?"


def test_a_run_names_a_misspelt_setting_of_models(tmp_path: Path) -> None:
    env = environment(tmp_path / "home", LLM_TEMPRATURE="1", LLM_OF_SOMEBODY_ELSE="1", DECKHANDS_SANDBOX="none")
    model = script(tmp_path / "m.json", finish("Done."), latency_seconds=0.5)
    (tmp_path / "work").mkdir()
    with started("run", "-t", "x", "-w", tmp_path / "work", "--model", model, env=env) as running:
        done = finished(running)
    assert done.code == 0, done
    assert done.err.splitlines().count(NOTICE) == 1
    assert "LLM_OF_SOMEBODY_ELSE" not in done.err


def test_cluster_and_submitter_name_misspelt_worker_settings(tmp_path: Path) -> None:
    with cluster(tmp_path, "--sandbox", "none", LLM_TEMPRATURE="1") as running:
        assert running.stderr is not None
        assert next(line for line in running.stderr if "LLM_" in line) == NOTICE + "\n"
        model = script(tmp_path / "m.json", finish("Done."))
        submitted = deckhands("submit", "-t", "x", "--model", model, env=environment(tmp_path))
    assert (submitted.code, submitted.err) == (0, NOTICE + "\n")


def test_numbers_have_their_nouns() -> None:
    assert [format_count(number, "file") for number in (0, 1, 2, 1_000)] == [
        "0 files",
        "1 file",
        "2 files",
        "1,000 files",
    ]
    one = SystemMessageAction(content="x", agent_class="A", tools=("t",))
    assert one.sentence == "System prompt of A (1 character, 1 tool)"


KEY_REMEDY = "Set LLM_API_KEY, or the provider's own variable if LLM_MODEL is another model."
UNUSABLE = {
    "no key": (
        {},
        "anthropic/claude-sonnet-4-5",
        "There is no key for 'anthropic/claude-sonnet-4-5'. Set LLM_API_KEY.",
    ),
    "no key of OpenAI": ({}, "openai/gpt-5", f"There is no key for 'openai/gpt-5'. {KEY_REMEDY}"),
    "no key of Gemini": ({}, "gemini/gemini-2.5-pro", f"There is no key for 'gemini/gemini-2.5-pro'. {KEY_REMEDY}"),
    "unknown model": ({}, "nosuch-model", "No provider is known for the model 'nosuch-model'. Write PROVIDER/NAME"),
    "unknown provider": ({}, "nosuch/model", "No provider is known for the model 'nosuch/model'. Write PROVIDER/NAME"),
    "no address": ({}, "ollama/llama3", "The provider ollama of 'ollama/llama3' has no public address."),
    "script": ({}, "scripted/BROKEN", "The model script 'BROKEN' is not JSON"),
    "recording": ({}, "replay/BROKEN", "The recording 'BROKEN' was not written by `deckhands export`"),
    "number": ({"LLM_TIMEOUT": "soon"}, "openai/gpt-5", "LLM_TIMEOUT"),
    "quotas": ({"DECKHANDS_QUOTAS": "BROKEN"}, "openai/gpt-5", "The quota table is not TOML"),
    "profiles": ({"LLM_CONFIG": "BROKEN"}, "openai/gpt-5", "BROKEN"),
}
"""Settings with which no model can be called: further variables, the model, and what is said."""
NO_KEYS = re.compile(r"\w*(API_KEY|AUTH_TOKEN)\Z|ANTHROPIC_\w+\Z|OPENAI_\w+\Z|GEMINI_\w+\Z|GOOGLE_\w+\Z")


@pytest.fixture
def make_unusable(env: dict[str, str], tmp_path: Path) -> Callable[[str], tuple[dict[str, str], str, str]]:
    """Return the environment, the model and the message of one of the unusable settings."""

    def make(name: str) -> tuple[dict[str, str], str, str]:
        variables, model, message = UNUSABLE[name]
        broken = tmp_path / "broken"
        broken.write_text('{"turns": [')
        kept = {each: value for each, value in env.items() if not NO_KEYS.match(each)}
        named = {each: value.replace("BROKEN", str(broken)) for each, value in variables.items()}
        return kept | named, model.replace("BROKEN", str(broken)), message.replace("BROKEN", str(broken))

    return make


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_settings_are_told_before_a_run_starts(
    make_unusable: Callable[[str], tuple[dict[str, str], str, str]], home: Path, workspace: Path, name: str
) -> None:
    env, model, message = make_unusable(name)
    done = deckhands("run", "-t", "hi", "-w", workspace, "--model", model, env=env)
    assert (done.code, done.out) == (2, ""), done
    assert " ".join(done.err.split()).count(message) == 1, done
    assert "Conversation" not in done.err, done
    assert {path.name for path in (home / "runs").glob("*/*")} == {"supervisor.lock"}, "something was started"
    assert deckhands("ls", "--json", env=env).json == []


@pytest.mark.parametrize("name", UNUSABLE)
def test_cluster_does_not_start_with_unusable_settings(
    make_unusable: Callable[[str], tuple[dict[str, str], str, str]], home: Path, name: str
) -> None:
    env, model, message = make_unusable(name)
    with started("up", "--tools", "0", "--ingresses", "0", "--jobs", "0", env={**env, "LLM_MODEL": model}) as running:
        done = finished(running)
    assert (done.code, done.out) == (2, ""), done
    assert " ".join(done.err.split()).count(message) == 1, done
    assert not (home / "cluster" / "valkey").exists(), "the store was started"
    assert not (home / "cluster" / "logs").exists(), "a worker was started"


def test_taken_port_is_named_before_anything_starts(env: dict[str, str], home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--web-port", "--port"):
            done = deckhands("up", "--web", option, port, env=env)
            assert (done.code, done.out) == (2, ""), done
            assert f"Port {port} of 127.0.0.1 cannot be used" in done.err
            assert f"Choose another by {option}." in done.err
    assert not (home / "cluster" / "logs").exists()
