"""`deckhands fork` and `show ID@EVENT` on a cluster: several other endings of one conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command_line import cluster, deckhands, environment, finish, run_command, script


@pytest.mark.soak
def test_forks_go_on_from_an_event_with_another_model(tmp_path: Path) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    project.mkdir()
    first = script(tmp_path / "first.json", run_command("echo once >> ran.txt"), finish("the first ending"))
    other = script(tmp_path / "other.json", run_command("unused"), finish("another ending"))
    env = environment(home, LLM_MODEL=first, DECKHANDS_SANDBOX="none")
    with cluster(home, "--workspace-root", str(project), LLM_MODEL=first, DECKHANDS_SANDBOX="none"):
        submitted = deckhands("submit", "-t", "Run it once", "-w", project, env=env)
        assert submitted.code == 0, submitted.err
        origin = submitted.out.strip()
        deckhands("logs", "-f", origin, env=env)
        events = deckhands("export", origin, env=env).json
        at = next(event["id"] for event in events if event["kind"] == "observation.run" and not event.get("hidden"))

        then = deckhands("show", f"{origin}@{at}", "--json", env=env).json[0]
        assert (then["state"], then["iterations"], then["last_event_id"]) == ("running", 1, at)

        forked = deckhands("fork", f"{origin}@{at}", "--model", other, "--copies", "2", env=env)
        assert forked.code == 0, forked.err
        forks = forked.out.split()
        assert len(set(forks)) == 2
        for fork in forks:
            deckhands("logs", "-f", fork, env=env)
            summary = deckhands("show", fork, "--json", env=env).json[0]
            assert (summary["state"], summary["message"]) == ("finished", "another ending")
            taken = deckhands("export", fork, env=env).json
            assert taken[0]["forked_from"] == f"{origin}@{at}"
            assert taken[1:at] == events[1:at]
            assert deckhands("replay", fork, env=env).code == 0
        assert (project / "ran.txt").read_text() == "once\n"
        assert deckhands("show", origin, "--json", env=env).json[0]["message"] == "the first ending"

        log = tmp_path / "log.jsonl"
        assert deckhands("export", origin, "-o", log, env=env).code == 0
        ended = [deckhands(*made, env=env).out.strip() for made in (("fork", origin), ("import", log))]
        listed = {line["conversation_id"]: line for line in deckhands("ls", "--json", env=env).json}
        shown = ("state", "iterations", "cost_usd", "has_unknown_cost")
        for taken_over in ended:  # nothing is left to do, so no worker lists them
            assert {name: listed[taken_over][name] for name in shown} == {name: listed[origin][name] for name in shown}

        assert deckhands("fork", f"{origin}@9999", env=env).code == 2
