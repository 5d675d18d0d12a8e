"""The verbs on a cluster kept up by `deckhands up`, with real workers and a scripted model."""

from __future__ import annotations

import asyncio
import json
import signal

import psutil
import pytest

from broker.coordination.membership import list_members
from deckhands import Client
from deckhands.client.reading.output import UNCONFINED
from deckhands.client.reading.summary import summarize
from deckhands.client.runs.records import parse_exported_event
from tests.integration.command_line import cluster, deckhands, environment, finished, read_until, run_command, started
from tests.polling import until
from tests.turns import finish, script

SUMMARY_KEYS = (
    "conversation_id",
    "state",
    "iterations",
    "cost_usd",
    "prompt_tokens",
    "completion_tokens",
    "duration_seconds",
    "last_event_id",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("home")
    with cluster(path, "--sandbox", "none", "--workspace-root", str(tmp_path_factory.getbasetemp())):
        yield path


@pytest.fixture
def env(home):
    return environment(home)


@pytest.fixture
def on_cluster(home):
    """An environment where `run` uses the cluster too, instead of a private store."""
    url = (home / "cluster" / "url").read_text().strip()
    return environment(home, DECKHANDS_URL=url)


@pytest.fixture
def workspace(tmp_path):
    path = tmp_path / "workspace"
    path.mkdir()
    return path


def run(env, workspace, model, *arguments):
    return deckhands("run", "-t", "Do it.", "-w", workspace, "--model", model, "--sandbox", "none", *arguments, env=env)


def test_a_run_that_finishes(on_cluster, workspace, tmp_path):
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    model = script(tmp_path / "m.json", run_command("echo hello > a", usage=usage, cost_usd=0.25), finish("Done."))
    done = run(on_cluster, workspace, model, "--json")
    assert done.code == 0, done
    assert (workspace / "a").read_text() == "hello\n"
    *events, summary = done.json
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert {key: summary[key] for key in SUMMARY_KEYS} | {"duration_seconds": 0} == {
        "conversation_id": events[0]["conversation_id"],
        "state": "finished",
        "iterations": 2,
        "cost_usd": 0.25,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "duration_seconds": 0,
        "last_event_id": len(events),
    }
    assert (summary["summary"], summary["message"]) == (True, "Done.")


def test_a_run_in_a_readable_form(on_cluster, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("printf 'a\\033[31mb'; exit 3"), finish("Done."))
    done = run(on_cluster, workspace, model)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[:2] == ["You: Do it.", "$ printf 'a\\033[31mb'; exit 3"]
    assert "Done." in lines
    assert "State:        finished" in lines
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("turns", "arguments", "code", "state", "error"),
    [
        ([{"text": "Which one?"}], [], 5, "awaiting_user_input", ""),
        ([run_command("true")] * 3, ["-i", "1"], 6, "error", "RuntimeError: Agent reached maximum iteration."),
        (
            [run_command("true", cost_usd=2.0)] * 2,
            ["-b", "1"],
            6,
            "error",
            "RuntimeError: Agent reached maximum budget",
        ),
        ([run_command("true", latency_seconds=60)], ["--timeout", "0.5"], 4, "stopped", ""),
    ],
)
def test_how_runs_end(on_cluster, workspace, tmp_path, turns, arguments, code, state, error):
    done = run(on_cluster, workspace, script(tmp_path / "m.json", *turns), "--json", *arguments)
    summary = done.json[-1]
    assert (done.code, summary["state"]) == (code, state), done
    assert summary["last_error"].startswith(error) if error else summary["last_error"] == ""


def test_submit_logs_show_export_ls(env, workspace, tmp_path):
    model = script(tmp_path / "m.json", run_command("echo hello"), finish("Done."))
    arguments = ["submit", "-t", "Do it.", "-w", workspace, "--model", model, "--title", "A title"]
    cid = deckhands(*arguments, env=env).out.strip()
    followed = deckhands("logs", "-f", cid, env=env)
    assert (followed.code, followed.out.splitlines()[-1]) == (0, "Done.")
    assert deckhands("logs", cid, env=env).out == followed.out

    shown = deckhands("show", cid, "--json", env=env).json[0]
    assert (shown["conversation_id"], shown["state"], shown["title"]) == (cid, "finished", "A title")
    assert "State:        finished" in deckhands("show", cid, env=env).out

    exported = deckhands("export", cid, env=env).json
    assert summarize([parse_exported_event(event) for event in exported]).as_json() == shown
    assert list(exported[0])[:5] == ["id", "kind", "source", "cause_id", "timestamp"]
    deckhands("export", cid, "-o", tmp_path / "log.jsonl", env=env)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == exported

    # It requested the node's sandbox, which is none.
    assert exported[0]["workspace"]["sandbox"] == "auto"
    assert [event["kind"] for event in exported if event.get("unsandboxed")] == [
        "observation.survey",
        "observation.run",
    ]
    assert shown["sandbox"] == "none"
    assert f"Sandbox:      {UNCONFINED}" in deckhands("show", cid, env=env).out

    listed = {row["conversation_id"]: row for row in deckhands("ls", "--json", env=env).json}
    assert (listed[cid]["state"], listed[cid]["title"], listed[cid]["iterations"]) == ("finished", "A title", 2)
    assert listed[cid]["has_unknown_cost"]  # the script names no price
    (line,) = (line for line in deckhands("ls", env=env).out.splitlines() if cid in line)
    assert ("A title" in line, "unknown" in line, "$" in line) == (True, True, False)


def test_pause_message_resume_cancel(env, tmp_path):
    model = script(tmp_path / "m.json", {"text": "Which one?"})
    other = script(tmp_path / "other.json", {}, run_command("sleep 301.7"), finish("Done."))
    arguments = ["submit", "-t", "Do it.", "--model", model, "--sandbox", "none"]
    cid = deckhands(*arguments, env=env).out.strip()
    with started("logs", "-f", "--json", cid, env=env) as following:
        read_until(following, "awaiting_user_input")
        assert deckhands("message", cid, "The first.", "--model", other, env=env).code == 0
        read_until(following, '"command": "sleep 301.7"')
        asyncio.run(until(lambda: is_running("sleep", "301.7"), what="start of the command"))
        assert deckhands("pause", cid, env=env).code == 0
        read_until(following, '"agent_state": "paused"')
        assert deckhands("resume", cid, "--model", model, env=env).code == 0
        read_until(following, '"kind": "model.switched"')
        read_until(following, '"agent_state": "running"')
        done = deckhands("cancel", cid, "--json", env=env)
        assert (done.code, done.json[0]["state"]) == (0, "stopped")
        assert finished(following).code == 130  # as `run` would end
    asyncio.run(until(lambda: not is_running("sleep", "301.7"), what="end of the command"))
    assert deckhands("cancel", cid, env=env).err == "The conversation is stopped.\n"
    refused = deckhands("pause", cid, env=env)
    assert (refused.code, "is stopped; it cannot be paused" in refused.err) == (2, True)


def test_one_worker_in_the_foreground(home, tmp_path):
    """`deckhands tools` becomes the worker: it serves its pool, and SIGTERM ends it in order."""
    url = (home / "cluster" / "url").read_text().strip()
    env = environment(tmp_path / "home", DECKHANDS_URL=url, DECKHANDS_NODE="other")
    with started("tools", "--pool", "gpu", "--concurrency", "3", "--sandbox", "none", env=env) as worker:
        asyncio.run(until(lambda: reported(url, "other"), what="worker"))
        worker.send_signal(signal.SIGTERM)
        assert finished(worker).code == 0


def is_running(*command: str) -> bool:
    """Return whether a process was started with exactly this command."""
    return any(process.info["cmdline"] == list(command) for process in psutil.process_iter(["cmdline"]))


async def reported(url: str, node: str) -> bool:
    """Return whether a worker of the node has reported to the store, with its pool."""
    async with await Client.connect(url) as client:
        found = [member.about for member in await list_members(client.store) if member.about.get("node") == node]
    return [about["pools"] for about in found] == ["gpu"]


async def test_question_without_an_answer_is_rejected_at_its_deadline(tmp_path, workspace, on_cluster):
    model = script(tmp_path / "m.json", run_command("touch made"), finish("Without it."))
    options = ("--confirm", "always", "--confirm-within", "1", "--confirm-reminder", "0.3", "--model", model)
    arguments = ("submit", "-t", "task", "-w", workspace, *options, "--json")
    (submitted,) = (await asyncio.to_thread(deckhands, *arguments, env=on_cluster)).json
    cid = submitted["conversation_id"]
    async with await Client.connect(on_cluster["DECKHANDS_URL"]) as client:

        async def is_finished():
            return (await client.summary(cid)).state == "finished"

        await until(is_finished, what="the end")
        kinds = [event.kind for event in await client.events(cid)]
        assert (await client.summary(cid)).message == "Without it."
    assert not (workspace / "made").exists()
    assert kinds.count("conversation.confirmation_reminder") == 1
    (replayed,) = (await asyncio.to_thread(deckhands, "replay", cid, "--json", env=on_cluster)).json
    assert replayed["is_same"], replayed
