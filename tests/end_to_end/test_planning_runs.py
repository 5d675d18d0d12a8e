"""Planning first in runs from the command line, with real workers: at once, and after a person at a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.command_line import deckhands, environment
from tests.turns import bash, call, finish, script

PLAN = call("propose_plan", plan="1. Make `made`.")
TOUCH = bash("touch made", security_risk="LOW")
GREP = call("grep", pattern="made")


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events if event.get("kind", "").startswith(("action.", "observation.plan"))]


def planned(tmp_path: Path, mode: str, *turns: dict[str, Any]) -> list[str | Path]:
    (tmp_path / "work").mkdir()
    model = script(tmp_path / "m.json", *turns)
    return ["run", "-t", "Do it", "--plan", mode, "-w", tmp_path / "work", "--model", model, "--json"]


@pytest.mark.soak
def test_other_agent_carries_out_a_plan_at_once(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    done = deckhands(*planned(tmp_path, "auto", TOUCH, GREP, PLAN, TOUCH, finish("Done.")), env=env)
    assert done.code == 0, done
    assert kinds(done.json)[-6:] == [
        *("action.search_code", "action.plan", "observation.plan_accepted"),
        *("action.system", "action.run", "action.finish"),
    ]
    assert (tmp_path / "work" / "made").exists()
    refused = [event for event in done.json if event.get("kind") == "observation.error"]
    assert [event["content"].partition(".")[0] for event in refused] == ["Tool execute_bash is not registered"]
    checked = deckhands("replay", done.json[-1]["conversation_id"], "--json", env=env)
    assert checked.json[0]["is_same"], checked


def test_nothing_starts_without_a_person_and_planner_takes_more(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    done = deckhands(*planned(tmp_path, "ask", PLAN, PLAN, TOUCH), env=env)
    assert done.code == 5, done
    conversation_id = done.json[-1]["conversation_id"]
    again = deckhands("run", "--resume", conversation_id, "-t", "Smaller, please", "--json", env=env)
    assert again.code == 5, again
    assert kinds(again.json)[-1] == "action.plan"
    assert not (tmp_path / "work" / "made").exists()


def test_unusable_executor_is_named_before_planning(tmp_path: Path) -> None:
    done = deckhands(*planned(tmp_path, "auto", PLAN), "--agent", "Nobody", env=environment(tmp_path / "home"))
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith(
        "deckhands: There is no agent named 'Nobody'.\n  Known agents: BrowsingAgent, BrowsingAgentSDK, CheckAgent, CodeActAgent, "
    )
