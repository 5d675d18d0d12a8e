"""Delegates and IPython from the command line: checked before anything starts, used, and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.command_line import Done, deckhands, environment, finish, finished, script, started


def run(tmp_path: Path, *options: str) -> tuple[Done, Done]:
    """Run a task by the command line and return that and what `show` says of it."""
    env = environment(tmp_path / "home", DECKHANDS_SANDBOX="none")
    (tmp_path / "work").mkdir(exist_ok=True)
    with started("run", "-t", "x", "-w", tmp_path / "work", *options, env=env) as running:
        done = finished(running)
    found = [line for line in done.err.splitlines() if line.startswith("Conversation ")]
    return done, deckhands("show", found[0].split()[1], env=env) if found else done


def call(name: str, **arguments: str) -> dict[str, object]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


def test_a_task_is_handed_to_a_delegate_of_a_file(tmp_path: Path) -> None:
    small = script(tmp_path / "small.json", finish("Three."))
    (tmp_path / "scout.json").write_text(json.dumps({"name": "ReadOnlyAgent", "llm": {"model": small}}))
    large = script(tmp_path / "large.json", call("delegate", agent="scout", task="Count."), finish("Done."))
    done, shown = run(
        tmp_path, "--model", large, "--delegate", f"scout={tmp_path}/scout.json", "--delegate", "LocAgent"
    )
    assert done.code == 0, done
    assert "Three." in done.out
    assert f"Hands to:     scout (ReadOnlyAgent, {small}), LocAgent (LocAgent, {large})" in shown.out


def test_cells_are_run(tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", call("execute_ipython_cell", code="print(6 * 7)"), finish("Done."))
    done, shown = run(tmp_path, "--model", model, "--ipython")
    assert done.code == 0, done
    assert ">>> print(6 * 7)" in done.out
    assert "42" in done.out
    assert "IPython:      the agent can run cells" in shown.out
    assert "action.run_ipython" not in done.out


def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", finish("Done."))
    (tmp_path / "scout.json").write_text(json.dumps({"name": "NoSuchAgent"}))
    for options, said in (
        (
            ("--delegate", "Nobody"),
            "There is no agent named 'Nobody'.\n  Known agents: BrowsingAgent, BrowsingAgentSDK, CheckAgent, CodeActAgent",
        ),
        (("--delegate", f"scout={tmp_path}/scout.json"), "There is no agent named 'NoSuchAgent'."),
        (("--delegate", "scout=missing.json"), "The file missing.json of --delegate scout cannot be read"),
        (("--ipython", "--agent", "LocAgent"), "--ipython has no effect on LocAgent, whose tools are fixed."),
    ):
        done, _ = run(tmp_path, "--model", model, *options)
        assert (done.code, said in done.err) == (2, True), done
    assert not list((tmp_path / "home").glob("runs/*"))


@pytest.mark.parametrize("name", ["PlanningAgent", "BrowsingAgent"])
@pytest.mark.parametrize(
    ("turns", "result"),
    [
        ([], "The script has ended."),
        ([call("no_such_tool")] * 20, "AgentStuckInLoopError"),
        ([call("finish")] * 20, "AgentStuckInLoopError"),
    ],
)
def test_a_delegate_without_the_tool_finish_ends_all_the_same(
    tmp_path: Path, name: str, turns: list[dict[str, object]], result: str
) -> None:
    small = script(tmp_path / "small.json", *turns)
    (tmp_path / "helper.json").write_text(json.dumps({"name": name, "llm": {"model": small}}))
    large = script(tmp_path / "large.json", call("delegate", agent="helper", task="Look."), finish("Done."))
    done, shown = run(tmp_path, "--model", large, "--delegate", f"helper={tmp_path}/helper.json", "-i", "50")
    assert (done.code, "State:        finished" in shown.out) == (0, True), done
    assert result in done.out, done
