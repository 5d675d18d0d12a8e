"""`deckhands run` with SDK agents: the Claude Agent SDK, a model that speaks Anthropic's protocol, real tool workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_cli_run import running_below
from tests.integration.command_line import Done, deckhands, environment, run_command
from tests.model_server.running_server import RunningModelServer
from tests.turns import call, finish

pytest_plugins = ("tests.model_server.fixtures",)

pytestmark = [pytest.mark.claude, pytest.mark.timeout(600)]

MODEL = "claude-sonnet-4-5"


class Runs:
    """Runs in a workspace, with a model server for each."""

    def __init__(self, folder: Path, start: Callable[..., RunningModelServer]) -> None:
        self.home = folder / "home"
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        self._script = folder / "turns.json"
        self._start = start

    def run(self, agent: str, *turns: dict[str, Any]) -> tuple[Done, RunningModelServer]:
        self._script.write_text(json.dumps({"turns": turns}))
        server = self._start("--script", str(self._script), "--key", "sk-test")
        env = environment(self.home, LLM_BASE_URL=server.url, LLM_API_KEY="sk-test", DECKHANDS_SANDBOX="none")
        done = deckhands("run", "Do it.", "--agent", agent, "-w", self.workspace, "--model", MODEL, "--json", env=env)
        assert done.code == 0, done
        assert "conversation.changed" not in [event.get("kind") for event in done.json]  # no legacy agent has helped
        return done, server


@pytest.fixture
def runs(tmp_path: Path, model_server: Callable[..., RunningModelServer]) -> Runs:
    return Runs(tmp_path, model_server)


def test_a_command_in_brief(runs: Runs) -> None:
    done, server = runs.run("CodeActAgentSDK", run_command("echo hello > a; cat a"), finish("Done."))
    assert (runs.workspace / "a").read_text() == "hello\n"
    *events, summary = done.json
    (output,) = [event["content"] for event in events if event["kind"] == "observation.run"]
    assert "hello" in output
    assert (summary["state"], summary["iterations"]) == ("finished", 2)
    asked = server.requests()
    assert [request["path"] for request in asked] == ["/v1/messages"] * 2  # the core has asked, not the SDK
    assert "hello" in json.dumps(asked[1]["body"]["messages"])
    assert running_below(runs.home) == []


def test_a_page_in_a_browser(runs: Runs) -> None:
    (runs.workspace / "hours.html").write_text("<h1>Open at 9</h1><button>Ask</button>")
    page = f"goto('file://{runs.workspace}/hours.html')"
    look = call("browser", code=page)
    done, server = runs.run("BrowsingAgentSDK", look, finish("At 9."))
    (shown,) = [event for event in done.json if event.get("kind") == "observation.browse"]
    assert "heading 'Open at 9'" in shown["content"]
    assert "button 'Ask'" in shown["content"]
    assert "Open at 9" in json.dumps(server.requests()[1]["body"]["messages"])
