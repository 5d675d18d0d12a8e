"""Delegates and IPython from the command line: checked before anything starts, used, and shown."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.command_line import Done, deckhands, environment, finished, started
from tests.turns import call, finish, script


def run(tmp_path: Path, *options: str) -> tuple[Done, Done]:
    """Run a task by the command line and return that and what `show` says of it."""
    env = environment(tmp_path / "home", DECKHANDS_SANDBOX="none")
    (tmp_path / "work").mkdir(exist_ok=True)
    with started("run", "-t", "x", "-w", tmp_path / "work", *options, env=env) as running:
        done = finished(running)
    found = [line for line in done.err.splitlines() if line.startswith("Conversation ")]
    return done, deckhands("show", found[0].split()[1], env=env) if found else done


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
