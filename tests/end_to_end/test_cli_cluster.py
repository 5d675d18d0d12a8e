"""The verbs on a cluster kept up by `deckhands up`, with real workers and a scripted model."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest

from deckhands import Client
from deckhands.client.reading.output import UNCONFINED
from deckhands.client.reading.summary import summarize
from deckhands.client.runs.records import parse_exported_event
from tests.integration.command_line import cluster, deckhands, environment, finished, read_until, run_command, started
from tests.polling import until
from tests.turns import finish, script


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


def is_running(*command: str) -> bool:
    """Return whether a process was started with exactly this command."""
    return any(process.info["cmdline"] == list(command) for process in psutil.process_iter(["cmdline"]))


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
