"""Evaluations from the command line and from a program: killed, completed, steered, compared and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import deckhands as public
from broker.runtime.errors import UsageError
from deckhands.evaluation.attempts.results import read_results
from deckhands.evaluation.directory import EvaluationRequest, record_request
from tests.dataset_parts import HUMAN_EVAL, harbor_task, write_rows
from tests.integration.command_line import cluster, deckhands, environment, on_terminal, run_command, started
from tests.polling import until
from tests.turns import finish, script


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = environment(tmp_path / "home")
    for name in set(os.environ) - set(found):
        monkeypatch.delenv(name)
    monkeypatch.setenv("DECKHANDS_HOME", found["DECKHANDS_HOME"])
    return found


def test_rows_are_evaluated_completed_and_begun_again(tmp_path: Path, env: dict[str, str]) -> None:
    rows = [{"id": "six", "task": "2 * 3?", "answer": "6"}, {"id": "eight", "task": "2 * 4?", "answer": "8"}]
    model, out = script(tmp_path / "script.json", finish("FINAL ANSWER: 6")), tmp_path / "out"
    seen: list[dict[str, Any]] = []
    options: dict[str, Any] = {"out": out, "concurrency": 2, "on_row": seen.append}
    summary = public.evaluate(rows, model, **options)
    assert summary["models"][model]["outcomes"]["resolved"] == 1
    assert summary["models"][model]["pass@1"] == 0.5
    assert {row["instance"]: row["outcome"] for row in seen} == {"six": "resolved", "eight": "unresolved"}
    assert public.evaluate(rows, model, **options) == summary  # nothing is left to do
    assert len(seen) == 2
    script(tmp_path / "script.json", finish("FINAL ANSWER: 8"))
    again = public.evaluate(rows, model, **options, redo=["unresolved"])
    assert again["models"][model]["pass@1"] == 1.0
    assert [row["instance"] for row in seen[2:]] == ["eight"]
    assert json.loads((out / "summary.json").read_text()) == again
    command = ("eval", "attach", out, "--redo", "six", "--json")
    done = deckhands(*command, env=env)
    assert done.json[0]["models"][model]["pass@1"] == 0.5
    # Every figure follows from results.jsonl alone.
    bare = tmp_path / "bare" / "out"
    bare.mkdir(parents=True)
    (bare / "results.jsonl").write_bytes((out / "results.jsonl").read_bytes())
    assert deckhands("eval", "report", bare, env=env).code == 0
    assert (bare / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    assert "<h4>Task</h4>" not in (bare / "report.html").read_text()
    # The page also has the configuration and the transcripts beside it.
    shutil.copy(out / "evaluation.json", bare)
    shutil.copytree(out / "transcripts", bare / "transcripts")
    assert deckhands("eval", "report", bare, env=env).code == 0
    assert (bare / "report.html").read_bytes() == (out / "report.html").read_bytes()
    assert "<h4>Task</h4>" in (bare / "report.html").read_text()


def test_arguments_that_cannot_be_used_begin_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    row = {"id": "six", "task": "2 * 3?", "answer": "6"}
    model, out = script(tmp_path / "script.json", finish("6")), tmp_path / "out"
    for arguments, options, why in (
        (([row], []), {}, "models is empty"),
        (([row, row], model), {}, "line 2: another line has the id"),
        (([{"id": object()}], model), {}, "a row that is not JSON"),
        (([row], model), {"redo": ["seven"]}, "neither an outcome nor an instance"),
        (("nowhere.jsonl", model), {}, "cannot be read"),
        (([row], model), {"concurrency": -1}, "concurrency -1 is not from 1 to 10,000"),
        (([row], model), {"attempts": 0}, "attempts 0 is not from 1 to 1,000"),
        (([row], model), {"retries": -1}, "retries -1 is not from 0 to 100"),
        (([row], model), {"budget_usd": float("nan")}, "budget_usd nan is not at least 0"),
    ):
        with pytest.raises(UsageError, match=why):
            public.evaluate(*arguments, out=out / why[:5], **options)
        assert not (out / why[:5] / "evaluation.json").exists()


@pytest.mark.parametrize("role", ["model", "critic"])
def test_unusable_model_is_told_before_an_evaluation_starts(tmp_path: Path, env: dict[str, str], role: str) -> None:
    rows = write_rows(tmp_path, [{"id": "six", "task": "2 * 3?", "answer": "6"}])
    models = {"model": script(tmp_path / "script.json", finish("6")), role: "nosuch/model"}
    options = [word for name, model in models.items() for word in (f"--{name}", model)]
    done = deckhands("eval", "run", rows, *options, "--out", tmp_path / "out", env=env)
    assert (done.code, done.out) == (2, ""), done
    assert done.err.count("No provider is known for the model 'nosuch/model'.") == 1, done
    (folder,) = (tmp_path / "home" / "evaluations").iterdir()
    assert not (folder / "valkey").exists(), "the store was started"


def test_published_tasks_are_solved_by_their_own_solutions(tmp_path: Path, env: dict[str, str]) -> None:
    harbor_task(tmp_path / "tasks" / "hello")
    for number, dataset in enumerate((tmp_path / "tasks", write_rows(tmp_path, [HUMAN_EVAL]))):
        done = deckhands(
            "eval", "run", dataset, "--model", "scripted", "--out", tmp_path / f"out-{number}", "--json", env=env
        )
        assert done.code == 0, done
        assert done.json[0]["models"]["scripted"]["outcomes"]["resolved"] == 1, done


def test_pictures_reach_the_model_and_tags_the_report(tmp_path: Path, env: dict[str, str]) -> None:
    from tests.dataset_parts import PNG

    (tmp_path / "a.png").write_bytes(PNG)
    row = {"id": "a", "task": "What is it?", "answer": "ok", "images": ["a.png"], "tags": ["pictures"]}
    model, out = script(tmp_path / "script.json", run_command("true"), finish("ok")), tmp_path / "out"
    run = ("eval", "run", write_rows(tmp_path, [row]), "--model", model, "--filter", "pictures", "--out", out, "--json")
    done = deckhands(*run, env=env)
    assert done.json[0]["models"][model]["tags"] == {"pictures": {"attempts": 1, "resolved": 1}}
    assert deckhands("eval", "export", out, "--format", "sft", env=env).code == 0
    (line,) = map(json.loads, (out / "exports" / "sft" / "sft.jsonl").read_text().splitlines())
    (asked,) = (message for message in line["messages"] if message["role"] == "user")
    assert asked["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


SHIPPED = ("eval", "run", "shipped", "--model", "scripted", "-n", "4", "--filter", "easy")


def test_shipped_benchmark_is_solved_despite_a_killed_command(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    results = out / "results.jsonl"
    with started(*SHIPPED, "--out", out, env=env) as running:
        asyncio.run(until(lambda: results.exists() and results.stat().st_size > 0, limit=60.0, what="result"))
        running.kill()
    seen = read_results(results)
    done = deckhands("eval", "attach", out, "-n", "8", "--json", env=env)
    assert done.code == 0, done
    (summary,) = done.json
    figures = summary["models"]["scripted"]
    assert figures["outcomes"]["resolved"] == figures["attempts"] == figures["instances"] > 10
    rows = read_results(results)
    assert rows[: len(seen)] == seen
    assert len({row.key for row in rows}) == len(rows) == figures["attempts"]
    assert json.loads((out / "summary.json").read_text()) == summary
    before = results.read_bytes()
    assert deckhands(*SHIPPED, "--out", out, env=env).code == 0  # nothing is left to do
    assert results.read_bytes() == before
    (out / "summary.json").unlink()
    report = deckhands("eval", "report", out, env=env)
    assert "pass@1 100.0%" in report.out
    assert json.loads((out / "summary.json").read_text()) == summary
    assert "<table>" in (out / "report.html").read_text()
    compared = deckhands("eval", "compare", out, out, env=env)
    assert "p = 1" in compared.out


def test_budget_without_a_known_price_is_refused_first(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home", LLM_MODEL="acme/first", OPENAI_API_KEY="any"), tmp_path / "out"
    models = "gpt-4o,openai/unknown"
    refused = deckhands(
        *("eval", "run", "shipped", "--model", models, "--slice", ":1", "--budget", "1", "--out", out), env=env
    )
    assert refused.code == 2, refused
    assert "The price of openai/unknown is unknown, so --budget cannot bind." in refused.err
    assert "input_cost_per_token" in refused.err
    assert "--token-budget" in refused.err
    assert not (out / "results.jsonl").read_text()


def test_another_evaluation_is_not_overwritten(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    one = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out)
    assert deckhands(*one, env=env).code == 0
    done = deckhands(*one, "-k", "2", env=env)
    assert done.code == 2
    assert "has another evaluation" in done.err
    nowhere = deckhands("eval", "attach", tmp_path / "nowhere", env=env)
    assert (nowhere.code, "has no evaluation" in nowhere.err) == (2, True)


def test_run_killed_before_its_first_file_says_what_to_do(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    out.mkdir()
    (out / ".evaluation.json.k1").write_text("{")  # the line that a command was writing when it was killed
    for command in (("attach", out), ("attach", tmp_path / "nowhere"), ("report", out), ("status", out)):
        done = deckhands("eval", *command, env=env)
        assert (done.code, "Traceback" in done.err) == (2, False), done
        assert "deckhands eval run" in done.err
    (out / "evaluation.json").write_text("{")
    damaged = deckhands("eval", "attach", out, env=env)
    assert (damaged.code, "evaluation.json cannot be read" in damaged.err, "remove it" in damaged.err) == (
        2,
        True,
        True,
    )


def test_a_run_killed_before_its_first_attempt_is_continued(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    asked = record_request(out, EvaluationRequest(name="", dataset="shipped", models=("scripted",), part=":1"))
    for command in ("status", "pause", "report"):
        done = deckhands("eval", command, out, env=env)
        assert (done.code, "Traceback" in done.err) == (2, False), done
        assert ("has not started" in done.err) is (command != "report")
        assert "eval attach" in done.err
    attached = deckhands("eval", "attach", out, env=env)
    assert attached.code == 0, attached
    (row,) = read_results(out / "results.jsonl")
    assert row.outcome == "resolved"
    again = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out)
    assert deckhands(*again, env=env).code == 0
    assert read_results(out / "results.jsonl") == [row]  # the same evaluation, so nothing is left to do
    assert json.loads((out / "evaluation.json").read_text())["name"] == asked.name


def test_other_endings_of_an_attempt_are_scored_like_it(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    one = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out, "--until", "")
    assert deckhands(*one, env=env).code == 0
    (row,) = read_results(out / "results.jsonl")
    status = deckhands("eval", "status", out, env=env)
    assert ("1 resolved" in status.out, status.err) == (True, "")  # it is over, so nothing is to be attached
    for name, said in ((row.instance, "Repaired."), (row.conversation_id, "Repaired."), (row.checked_id, "OK")):
        shown = deckhands("eval", "logs", out, name, env=env)
        assert (shown.code, said in shown.out) == (0, True), shown
    unknown = deckhands("eval", "logs", out, "no such", env=env)
    assert (unknown.code, "No attempt at 'no such'" in unknown.err) == (2, True)
    forked = tmp_path / "forked"
    done = deckhands(
        "eval", "fork", f"{row.conversation_id}@3", "--of", out, "-n", "2", "--out", forked, "--json", env=env
    )
    assert done.code == 0, done
    (found,) = done.json
    assert [one["resolved"] for one in found["models"].values()] == [2]
    assert {one.instance for one in read_results(forked / "results.jsonl")} == {row.instance}
    several = deckhands("eval", "logs", forked, row.instance, env=env)
    assert (several.code, "There are 2 attempts" in several.err) == (2, True)
    again = ("eval", "fork", "--of", out, "--out", tmp_path / "no")
    for point, error in (
        (f"{row.conversation_id}@1", "has no task up to the event 1"),
        (f"{row.conversation_id}@999", "there is no event 999"),
        (f"{row.checked_id}@3", "is no attempt of the evaluation"),
        ("nobody@3", "No conversation with the id"),
    ):
        refused = deckhands(*again, point, env=env)
        assert (refused.code, error in refused.err) == (2, True), refused
    assert not (tmp_path / "no").exists()


LIMIT_SECONDS = 90.0


def dataset(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": f"q{n}", "task": "2*3?", "answer": "6"}) + "\n" for n in range(count)))
    return path


def status_in(out: Path) -> dict[str, Any]:
    """Return how an evaluation stood last, as its record says."""
    path = out / "progress.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((line for line in reversed(lines) if line["kind"] == "status"), {})


def _steer_it(asked: tuple[str | Path, ...], out: Path, gate: Path, env: dict[str, str]) -> None:
    asyncio.run(until(lambda: status_in(out).get("in_flight") == 1, limit=LIMIT_SECONDS, what="attempt"))
    assert "runs the evaluation" in deckhands(*asked, env=env).err  # one command at a time
    assert deckhands("eval", "pause", out, env=env).code == 0
    asyncio.run(until(lambda: status_in(out).get("state") == "paused", limit=LIMIT_SECONDS, what="pause"))
    shown = deckhands("eval", "status", out, "--json", env=env).json[0]
    (in_flight,) = shown["status"]["attempts"]
    assert in_flight["conversation_id"] in deckhands("eval", "status", out, env=env).out
    assert deckhands("eval", "logs", out, in_flight["instance"], "--json", env=env).json[0]["kind"]
    assert (shown["is_driven"], shown["desired"]["state"]) == (True, "paused")
    gate.touch()
    assert deckhands("eval", "retune", out, "-n", "auto", env=env).code == 0
    assert deckhands("eval", "resume", out, env=env).code == 0
    shown = on_terminal("eval", "attach", str(out), env=env, columns=120)
    assert "4 resolved; pass@1 100.0%" in shown
    assert {row.outcome for row in read_results(out / "results.jsonl")} == {"resolved"}
    record = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "ended" for line in record) == 4
    assert {line["state"] for line in record if line["kind"] == "status"} >= {"running", "paused", "over"}

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
        asyncio.run(until(lambda: progress.exists() and progress.read_text(), limit=LIMIT_SECONDS, what="status"))
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
        says = finish("Judged.", output=output)
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
