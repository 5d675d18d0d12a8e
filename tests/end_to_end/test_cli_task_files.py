"""`submit --from`, `wait` and `results`: a file of tasks from its lines to its results, whatever is killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from deckhands import Client
from tests.integration.command_line import Done, cluster, deckhands, environment, finished, run_command, started
from tests.polling import until
from tests.stores import RealServer, emptied
from tests.turns import finish, script
from tests.unit.deckhands.sample_log import state


@pytest.fixture
def env(tmp_path: Path, valkey_server: RealServer) -> dict[str, str]:
    asyncio.run(emptied(valkey_server.url))
    return environment(tmp_path / "home", DECKHANDS_URL=valkey_server.url)


def tasks_file(path: Path, *lines: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def submitted(done: Done) -> dict[str, str]:
    assert done.code == 0, done
    return {line["id"]: line["conversation_id"] for line in done.json}


def created(env: dict[str, str], conversation_id: str) -> dict[str, Any]:
    first: dict[str, Any] = deckhands("export", conversation_id, env=env).json[0]
    return first


def listed(env: dict[str, str]) -> int:
    return len(deckhands("ls", "--all", "--json", env=env).json)


async def settle(url: str, states: Mapping[str, str]) -> None:
    async with await Client.connect(url) as client:
        for conversation_id, its_state in states.items():
            fields = {"state": its_state}
            await client.log.append(conversation_id, [state("running"), state(its_state)], fields=fields)


def test_a_second_call_submits_what_is_missing(env: dict[str, str], tmp_path: Path) -> None:
    path = tasks_file(tmp_path / "t.jsonl", *({"id": f"t{n}", "task": f"Task {n}"} for n in range(200)))
    first = deckhands("submit", "--from", path, "--json", env=env)
    ids = submitted(first)
    assert (len(set(ids.values())), listed(env)) == (200, 200)
    assert first.err.endswith("200 tasks submitted, 0 had been submitted before.\n")
    asyncio.run(delete(env["DECKHANDS_URL"], ids["t7"]))
    tasks_file(path, *({"id": f"t{n}", "task": f"Task {n}"} for n in range(202)))
    again = deckhands("submit", "--from", path, "--json", env=env)
    assert submitted(again) | ids == submitted(again)
    assert {line["id"] for line in again.json if line["is_new"]} == {"t7", "t200", "t201"}
    assert listed(env) == 202
    other = deckhands("submit", "--from", path, "--batch", "another", env=env)
    assert "202 tasks submitted" in other.err


async def delete(url: str, conversation_id: str) -> None:
    await settle(url, {conversation_id: "finished"})
    async with await Client.connect(url) as client:
        await client.delete(conversation_id)


def test_bad_lines_are_listed_and_nothing_is_submitted(env: dict[str, str], tmp_path: Path) -> None:
    path = tasks_file(
        tmp_path / "t.jsonl",
        {"id": "a", "task": "x"},
        "{",
        {"id": "a", "task": "y"},
        {"id": "b", "task": "x", "tsk": 1},
    )
    done = deckhands("submit", "--from", path, env=env)
    assert (done.code, done.out, listed(env)) == (2, "", 0)
    lines = done.err.splitlines()
    assert lines[0] == "deckhands: 3 lines cannot be used, so nothing was submitted:"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["line 2", "line 3", "line 4"]
    assert "the id 'a' is that of line 1" in lines[2]
    assert "tsk: there is no such field; did you mean task?" in lines[3]


def test_options_are_defaults_for_all_lines(env: dict[str, str], tmp_path: Path) -> None:
    path = tasks_file(
        tmp_path / "t.jsonl",
        {"id": "plain", "task": "x"},
        {
            "id": "own",
            "task": "x",
            "agent": "RepoAgent",
            "model": "own",
            "limits": {"max_iterations": 3},
            "labels": {"run": "2", "own": "1"},
            "tenant": "globex",
            "workspace": {"path": "/srv/x"},
        },
    )
    options = ["--model", "m", "-i", "9", "-b", "2", "--label", "run=1", "--label", "team=a", "--tenant", "acme"]
    ids = submitted(deckhands("submit", "--from", path, *options, "--network", "--check", "true", "--json", env=env))
    plain, own = created(env, ids["plain"]), created(env, ids["own"])
    assert (plain["agent"]["llm"]["model"], own["agent"]["llm"]["model"]) == ("m", "own")
    assert (plain["agent"]["name"], own["agent"]["name"]) == ("CodeActAgent", "RepoAgent")
    assert plain["agent"]["goal"]["check"] == own["agent"]["goal"]["check"] == "true"
    assert (plain["limits"]["max_iterations"], own["limits"]["max_iterations"]) == (9, 3)
    assert plain["limits"]["max_budget_usd"] == own["limits"]["max_budget_usd"] == 2
    assert plain["labels"] == {"run": "1", "team": "a"}
    assert own["labels"] == {"run": "2", "team": "a", "own": "1"}
    assert (plain["tenancy"]["tenant"], own["tenancy"]["tenant"]) == ("acme", "globex")
    assert (plain["workspace"]["network"], own["workspace"]["network"]) == (True, False)
    assert own["workspace"]["path"] == "/srv/x"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--from", "F", "-t", "x"], "--task cannot be combined with --from"),
        (["--from", "F", "x"], "A task cannot be combined with --from"),
        (["--from", "F", "--idempotency-key", "k"], "--idempotency-key cannot be combined with --from"),
        (["-t", "x", "--wait"], "--wait needs --from"),
        (["-t", "x", "--results", "r"], "--results needs --from"),
        (["--from", "nowhere"], "The file nowhere cannot be read"),
        (["-t", "x", "--label", "a b=c"], "The labels cannot be used"),
    ],
)
def test_conflicting_options_are_refused(env: dict[str, str], tmp_path: Path, arguments: list[str], told: str) -> None:
    path = tasks_file(tmp_path / "t.jsonl", {"id": "a", "task": "x"})
    done = deckhands("submit", *(str(path) if part == "F" else part for part in arguments), env=env)
    assert (done.code, told in done.err, listed(env)) == (2, True, 0), done.err


def lines_in(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["finished", "finished"], 0),
        (["finished", "rejected"], 3),
        (["awaiting_user_input", "awaiting_user_input"], 5),
        (["error", "rejected"], 1),
    ],
)
def test_wait_and_results(env: dict[str, str], tmp_path: Path, states: list[str], code: int) -> None:
    path = tasks_file(tmp_path / "t.jsonl", *({"id": name, "task": "x"} for name in ("one", "other")))
    ids = list(submitted(deckhands("submit", "--from", path, "--label", "run=1", "--json", env=env)).values())
    waiting = deckhands("wait", "--label", "run=1", "--timeout", "0.3", env=env)
    assert (waiting.code, "2 conversations not settled within 0.3 s." in waiting.err) == (4, True)
    assert "2 conversations without a result" in deckhands("results", env=env).err
    with started("wait", *ids, "--json", env=env) as running:
        asyncio.run(settle(env["DECKHANDS_URL"], dict(zip(ids, states, strict=True))))
        done = finished(running)
    assert done.code == code
    assert {line["conversation_id"]: line["summary"]["state"] for line in done.json} == dict(
        zip(ids, states, strict=True)
    )
    printed = deckhands("results", "--label", "run=1", "--json", env=env)
    assert sorted(printed.json, key=str) == sorted(done.json, key=str)
    out = tmp_path / "results.jsonl"
    assert "2 results written to" in deckhands("results", *ids, "-o", out, env=env).err
    assert sorted(map(json.loads, out.read_text().splitlines()), key=str) == sorted(done.json, key=str)
    assert deckhands("results", env=env).out.splitlines()[0].split() == ["CONVERSATION", "STATE", "COST", "RESULT"]
    assert deckhands("submit", "--from", path, "--wait", env=env).code == code


def test_unknown_conversation_is_not_awaited(env: dict[str, str], tmp_path: Path) -> None:
    assert deckhands("wait", "nobody-0123456789", env=env).code == 2
    assert deckhands("wait", "--label", "no=one", env=env).code == 2
    assert deckhands("wait", env=env).code == 2
    kept = tmp_path / "out"
    kept.write_text("before")
    assert deckhands("results", "nobody-0123456789", "-o", kept, env=env).code == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out"]
    assert kept.read_text() == "before"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("home")
    with cluster(path, "--sandbox", "none"):
        yield path


def test_a_file_from_its_tasks_to_its_results(home: Path, tmp_path: Path) -> None:
    env = environment(home)
    model = script(tmp_path / "m.json", finish("Done."))
    path = tasks_file(tmp_path / "t.jsonl", *({"id": f"t{n}", "task": f"Say {n}."} for n in range(20)))
    out = tmp_path / "out.jsonl"
    options = ["--model", model, "--label", "run=1", "--results", out]
    with started("submit", "--from", path, *options, env=env) as running:
        asyncio.run(until(lambda: lines_in(out) > 2, what="a result"))
        running.send_signal(signal.SIGKILL)
    done = deckhands("submit", "--from", path, *options, env=env)
    assert done.code == 0, done
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["id"] for line in found) == sorted(f"t{n}" for n in range(20))
    assert {line["summary"]["message"] for line in found} == {"Done."}
    assert deckhands("wait", "--label", "run=1", env=env).code == 0
    assert deckhands("rm", "--label", "run=1", "--yes", env=env).code == 0
    assert deckhands("ls", "--label", "run=1", "--json", env=env).out == ""


def test_running_conversation_is_cancelled_and_deleted_with_its_processes(home: Path, tmp_path: Path) -> None:
    env = environment(home)
    model = script(tmp_path / "m.json", run_command("echo here > there; sleep 1000"), finish("Done."))
    arguments = ("submit", "-t", "x", "--model", model, "--label", "run=2", "--json")
    [found] = deckhands(*arguments, env=env).json
    cid = found["conversation_id"]
    asyncio.run(until(lambda: list(home.rglob(f"{cid}/workspace/there")), what="the file"))
    refused = deckhands("rm", cid, env=env)
    assert (refused.code, "only a settled one can be deleted" in refused.err) == (1, True)
    folder = next(path for path in home.rglob(cid) if path.is_dir())
    done = deckhands("rm", "--label", "run=2", "--cancel", "--yes", env=env)
    assert done.code == 0, done
    assert deckhands("show", cid, env=env).code == 2
    asyncio.run(until((folder / "host" / "deleted").exists, what="the note of its deletion"))
    assert not alive_in(folder)


def alive_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process.pid] if process.cwd().startswith(str(folder)) else []
    return found
