"""What the command line says beside its results: settings that do nothing, numbers with their nouns, streamed text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from broker.contract.actions import SystemMessageAction
from broker.runtime.counting import format_count
from tests.integration.command_line import COMMAND, cluster, deckhands, environment, finished, run_command, started
from tests.turns import finish, script

NOTICE = "The environment variable LLM_TEMPRATURE is not known; did you mean LLM_TEMPERATURE?"


def test_a_run_names_a_misspelt_setting_of_models(tmp_path: Path) -> None:
    env = environment(tmp_path / "home", LLM_TEMPRATURE="1", LLM_OF_SOMEBODY_ELSE="1", DECKHANDS_SANDBOX="none")
    model = script(tmp_path / "m.json", finish("Done."), latency_seconds=0.5)
    (tmp_path / "work").mkdir()
    with started("run", "-t", "x", "-w", tmp_path / "work", "--model", model, env=env) as running:
        done = finished(running)
    assert done.code == 0, done
    assert done.err.splitlines().count(NOTICE) == 1
    assert "LLM_OF_SOMEBODY_ELSE" not in done.err


def test_cluster_and_submitter_name_misspelt_worker_settings(tmp_path: Path) -> None:
    with cluster(tmp_path, "--sandbox", "none", LLM_TEMPRATURE="1") as running:
        assert running.stderr is not None
        assert next(line for line in running.stderr if "LLM_" in line) == NOTICE + "\n"
        model = script(tmp_path / "m.json", finish("Done."))
        submitted = deckhands("submit", "-t", "x", "--model", model, env=environment(tmp_path))
    assert (submitted.code, submitted.err) == (0, NOTICE + "\n")


@pytest.mark.parametrize(("is_one_file", "count"), [(True, 1), (False, 2)])
def test_a_streamed_reply_is_printed_once_for_each_reader(tmp_path: Path, is_one_file: bool, count: int) -> None:
    env = environment(tmp_path / "home", DECKHANDS_SANDBOX="none")
    said = "I look around first."
    model = script(tmp_path / "m.json", run_command("true", text=said), finish("Done."), latency_seconds=0.5)
    (tmp_path / "work").mkdir()
    command = [*COMMAND, "run", "-t", "x", "-w", str(tmp_path / "work"), "--model", model, "--stream"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        subprocess.run(command, env=env, stdout=out, stderr=out if is_one_file else err, check=True)
    printed = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    assert printed.count(said) == count, printed


def test_numbers_have_their_nouns() -> None:
    assert [format_count(number, "file") for number in (0, 1, 2, 1_000)] == [
        "0 files",
        "1 file",
        "2 files",
        "1,000 files",
    ]
    one = SystemMessageAction(content="x", agent_class="A", tools=("t",))
    assert one.sentence == "System prompt of A (1 character, 1 tool)"


def test_a_cluster_counts_its_workers(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with started("up", "--tools", "0", "--sandbox", "none", env=env) as running:
        assert running.stdout is not None
        assert (
            running.stdout.readline()
            == "The cluster is up: 1 controller worker, 0 tool workers, 1 ingress worker, 1 jobs worker and 1 beat.\n"
        )
