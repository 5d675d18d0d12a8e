"""DummyAgent: the same log every time, without a model; each step in a real workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.command_line import deckhands, environment

STEPS = [
    ("action.message", "I begin."),
    ("action.run", "echo foo"),
    ("observation.run", "foo"),
    ("action.write", 'echo "Hello, World!"'),
    ("observation.write", ""),
    ("action.read", ""),
    ("observation.read", 'echo "Hello, World!"\n'),
    ("action.run", "bash hello.sh"),
    ("observation.run", "Hello, World!"),
    ("action.reject", ""),
]


def steps(events: list[Any]) -> list[tuple[str, str]]:
    kinds = {kind for kind, _ in STEPS} | {"action.finish"}
    return [
        (event["kind"], event.get("command") if event["kind"] == "action.run" else event.get("content", ""))
        for event in events
        if event.get("kind") in kinds and event["source"] != "user"
    ]


def test_dummy_agent_follows_its_list_and_finishes_on_resume(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    (tmp_path / "work").mkdir()
    done = deckhands("run", "--agent", "DummyAgent", "-t", "Anything", "-w", tmp_path / "work", "--json", env=env)
    assert done.code == 3, done
    assert steps(done.json) == STEPS
    summary = done.json[-1]
    assert (summary["state"], summary["iterations"], summary["cost_usd"]) == ("rejected", 6, 0)
    again = deckhands("run", "--resume", summary["conversation_id"], "-t", "Continue", "--json", env=env)
    assert again.code == 0, again
    assert steps(again.json) == [("action.finish", "")]
    checked = deckhands("replay", summary["conversation_id"], "--json", env=env)
    assert checked.json[0]["is_same"], checked
