"""`deckhands eval` in the background, on a terminal, steered by other commands, and from the middle of a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from deckhands.evaluation.attempts.results import read_results
from tests.integration.command_line import (
    cluster,
    deckhands,
    environment,
    finish,
    on_terminal,
    run_command,
    script,
    started,
)
from tests.polling import until

LIMIT_SECONDS = 90.0


def dataset(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"q{n}", "task": "2*3?", "answer": "6"}) + "\n" for n in range(count)))
    return path


def standing_in(out: Path) -> dict[str, Any]:
    """Return how an evaluation stood last, as its record says."""
    path = out / "progress.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((line for line in reversed(lines) if line["kind"] == "standing"), {})


def _steer_it(asked: tuple[str | Path, ...], out: Path, gate: Path, env: dict[str, str]) -> None:
    asyncio.run(until(lambda: standing_in(out).get("under_way") == 1, limit=LIMIT_SECONDS, what="attempt"))
    assert "runs the evaluation" in deckhands(*asked, env=env).err  # one command at a time
    assert deckhands("eval", "pause", out, env=env).code == 0
    asyncio.run(until(lambda: standing_in(out).get("state") == "paused", limit=LIMIT_SECONDS, what="pause"))
    shown = deckhands("eval", "status", out, "--json", env=env).json[0]
    (in_flight,) = shown["standing"]["attempts"]
    assert in_flight["conversation_id"] in deckhands("eval", "status", out, env=env).out
    assert deckhands("eval", "logs", out, in_flight["instance"], "--json", env=env).json[0]["kind"]
    assert (shown["is_driven"], shown["wishes"]["state"]) == (True, "paused")
    gate.touch()
    assert deckhands("eval", "retune", out, "-n", "auto", env=env).code == 0
    assert deckhands("eval", "resume", out, env=env).code == 0
    shown = on_terminal("eval", "attach", str(out), env=env, columns=120)
    assert "4 resolved; pass@1 100.0%" in shown
    assert {row.outcome for row in read_results(out / "results.jsonl")} == {"resolved"}
    record = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "ended" for line in record) == 4
    assert {line["state"] for line in record if line["kind"] == "standing"} >= {"running", "paused", "over"}

    for pattern in ("--id nosuch", "--state limit --id q2", "--state running"):
        refused = deckhands("eval", "requeue", out, *pattern.split(), env=env)
        assert (refused.code, f"No attempt matches {pattern}" in refused.err) == (2, True), refused
    never = deckhands("eval", "retune", out, "--until", "ci=1%", env=env)
    assert (never.code, "--until ci=1% can never stop this evaluation early" in never.err) == (0, True), never
    alone = deckhands("eval", "retune", out, "--until", "decided", env=env)
    assert (alone.code, "there is one" in alone.err) == (2, True), alone
    assert deckhands("eval", "retune", out, "--until", "", "--token-budget", "1e6", env=env).code == 0
    again = deckhands("eval", "requeue", out, "--id", "q2", env=env)
    assert "No command drives it now" in again.err
    table = on_terminal("eval", "attach", str(out), env={**env, "DECKHANDS_SANDBOX": "none"}, columns=120)
    assert "INSTANCE" in table
    assert [row.round for row in read_results(out / "results.jsonl")].count(1) == 1


def test_background_evaluation_is_steered_and_resumed(tmp_path: Path) -> None:
    env, out, gate = environment(tmp_path / "home"), tmp_path / "out", tmp_path / "gate"
    waits = run_command("while [ ! -e " + str(gate) + " ]; do echo .; sleep 0.2; done")
    model = script(tmp_path / "m.json", waits, finish("6"))
    asked = ("eval", "run", dataset(tmp_path / "d.jsonl", 4), "--model", model, "--out", out, "-n", "1")
    begun = deckhands(*asked, "--detach", env={**env, "DECKHANDS_SANDBOX": "none"})
    assert (begun.code, "in the background" in begun.err) == (0, True), begun
    driver = int(begun.err.partition("(pid ")[2].partition(")")[0])
    try:
        _steer_it(asked, out, gate, env)
    finally:
        with suppress(ProcessLookupError):
            os.kill(driver, signal.SIGTERM)


def test_an_evaluation_whose_command_died_is_cancelled_and_ends(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home", DECKHANDS_SANDBOX="none"), tmp_path / "out"
    model = script(tmp_path / "m.json", run_command("while true; do echo .; sleep 0.2; done"), finish("6"))
    asked = ("eval", "run", dataset(tmp_path / "d.jsonl", 3), "--model", model, "--out", out)
    with started(*asked, env=env) as running:
        progress = out / "progress.jsonl"
        asyncio.run(until(lambda: progress.exists() and progress.read_text(), limit=LIMIT_SECONDS, what="standing"))
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    refused = deckhands("eval", "cancel", out, env=env)
    assert (refused.code, "there is no terminal to confirm it" in refused.err) == (2, True)
    assert deckhands("eval", "cancel", out, "--yes", env=env).code == 0
    done = deckhands("eval", "attach", out, env=env)
    assert "3 not-run" in done.out, done
    nowhere = deckhands("eval", "pause", tmp_path / "nowhere", env=env)
    assert (nowhere.code, "is not an evaluation" in nowhere.err) == (2, True)
    nothing = deckhands("eval", "retune", out, env=env)
    assert (nothing.code, "No change is given" in nothing.err) == (2, True)


def test_other_endings_are_tried_from_the_middle_of_a_run(tmp_path: Path) -> None:
    home, project, out = tmp_path / "home", tmp_path / "project", tmp_path / "out"
    project.mkdir()
    origin = script(tmp_path / "o.json", run_command("echo one >> notes.txt"), finish("no"))
    other = script(tmp_path / "a.json", run_command("true"), run_command("echo six > six.txt"), finish("yes"))
    env = environment(home, DECKHANDS_SANDBOX="none")
    with cluster(home, "--workspace-root", str(project), DECKHANDS_SANDBOX="none"):
        run = deckhands("submit", "-t", "Count.", "--model", origin, "-w", project, env=env).out.strip()
        deckhands("logs", "-f", run, env=env)
        events = deckhands("export", run, env=env).json
        at = next(event["id"] for event in events if event["kind"] == "observation.run" and not event.get("hidden"))
        forked = ("eval", "fork", f"{run}@{at}", "--model", other, "-n", "2", "--out", out)
        unclear = deckhands(*forked, env=env)
        assert (unclear.code, "how siblings are scored" in unclear.err) == (2, True)
        done = deckhands(*forked, "--check", "test -e six.txt", "--json", env=env)
        assert done.code == 0, done
        assert done.json[0]["models"] == {other: {"resolved": 2, "siblings": 2}}
        assert done.json[0]["best"]["model"] == other
        output = {"score": 7, "accepted": True, "reason": "It is there."}
        says = {"tool_calls": [{"name": "finish", "arguments": {"message": "Judged.", "output": output}}]}
        judge = script(tmp_path / "judge.json", {**says, "cost_usd": 0.25})
        bound = deckhands(*forked, "--critic", judge, "--tenant", "acme", env=env)
        assert (bound.code, "those of acme may not" in bound.err) == (2, True), bound
        free = deckhands("submit", "-t", "Count.", "--model", origin, env=env).out.strip()
        deckhands("logs", "-f", free, env=env)
        forked = ("eval", "fork", f"{free}@{at}", "--model", other, "-n", "2", "--out", tmp_path / "judged")
        judging = (*forked, "--critic", judge, "--tenant", "acme")
        judged = deckhands(*judging, env=env)
        assert judged.code == 0, judged
        assert "The critic cost $0.5000." in judged.out
        assert "The critic gave it 7 of 10: It is there." in judged.out
        assert deckhands(*judging, env=env).out == judged.out  # it is complete
        (row, _) = map(json.loads, (tmp_path / "judged" / "results.jsonl").read_text().splitlines())
        for name in (row["conversation_id"], row["critic_id"]):
            assert deckhands("export", name, env=env).json[0]["tenancy"]["tenant"] == "acme"
        gone = deckhands("eval", "fork", f"{run}@999", "--out", out, "--check", "true", env=env)
        assert (gone.code, "there is no event 999" in gone.err) == (2, True)
