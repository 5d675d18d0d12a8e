"""The bridge's report about a process, with small programs in place of a run; and launches that it refuses."""

from __future__ import annotations

import sys

import pytest

from deckhands.interop.headless.bridge import Bridge, RunSummary
from tests.trees import write_files

FINAL = "experiments/one/results/final.json"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def run(root, program: str, **options) -> RunSummary:
    """Run a program of Python in place of a run; its arguments are those of a run."""
    bridge = Bridge(root, environment={}, command=(sys.executable, "-I", "-c", program), grace_seconds=0.0)
    return bridge.run("Do it.", name="one", **{"timeout_seconds": 60.0, **options})


def test_a_failure_is_reported_with_the_end_of_the_output(root):
    done = run(root, "import sys; print('x' * 9000); print('why', file=sys.stderr); sys.exit(6)")
    assert (done.success, done.exit_code, done.reason, done.artifacts) == (False, 6, "limit_reached", ())
    assert "why" in done.stdout_tail
    assert len(done.stdout_tail) == 4_000


def test_a_command_that_cannot_be_started_is_a_failure(root):
    done = Bridge(root, environment={}, command=(str(root / "none"),)).run("Do it.")
    assert (done.success, done.exit_code, done.reason) == (False, 1, "error")
    assert "No such file" in done.stdout_tail


def test_a_run_that_dies_was_killed(root):
    done = run(root, "import os; os.kill(os.getpid(), 9)")
    assert (done.success, done.exit_code, done.reason) == (False, -9, "killed")


def test_a_run_that_does_not_end_is_stopped(root):
    done = run(root, "import signal; print('waits', flush=True); signal.pause()", timeout_seconds=0.2)
    assert (done.success, done.exit_code, done.reason) == (False, -15, "out_of_time")


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "is missing"), ("", "is not JSON"), ("[" * 99_999, "is not JSON"), ("[]", "is not a JSON object")],
)
def test_a_success_without_a_result_is_none(root, content, fault):
    if content is not None:
        (root / FINAL).parent.mkdir(parents=True)
        (root / FINAL).write_text(content)
    done = run(root, "")
    assert (done.success, done.exit_code, done.reason) == (False, 8, "missing_artifact")
    assert done.stdout_tail == f"{FINAL} {fault}.\n"


def test_the_artifacts_are_the_files_of_results_and_logs(root, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for name in (
        FINAL,
        "experiments/one/results/plots/a.csv",
        "logs/one/run.log",
        "experiments/two/results/final.json",
    ):
        write_files(root, {name: "{}"})
    (root / "logs/one/link").symlink_to(tmp_path / "secret")
    done = run(root, "import sys; print(sys.argv[1:], open(sys.argv[sys.argv.index('-f') + 1]).read())")
    assert done.success, done
    names = [str(path.relative_to(root)) for path in done.artifacts]
    assert names == [FINAL, "experiments/one/results/plots/a.csv", "logs/one/run.log"]
    assert "'-n', 'one'" in done.stdout_tail
    assert "'-i', '80'" in done.stdout_tail
    assert done.stdout_tail.endswith("Do it.\n")


@pytest.mark.parametrize("workspace", ["..", "../other", "/etc", "link", "inner/../../other"])
def test_a_workspace_outside_of_the_root_is_denied(root, tmp_path, workspace):
    (root / "link").symlink_to(tmp_path)
    done = run(root, "print('launched')", workspace=workspace)
    assert (done.success, done.exit_code, done.reason, done.duration_seconds) == (False, 9, "path_denied", 0.0)
    assert "is not inside" in done.stdout_tail
    assert "launched" not in done.stdout_tail


@pytest.mark.parametrize("folder", ["/tmp", "../other", "out/..", ""])
def test_a_permitted_folder_elsewhere_is_denied(root, folder):
    done = run(root, "print('launched')", permit=["out", folder])
    assert (done.success, done.exit_code, done.reason, done.duration_seconds) == (False, 9, "path_denied", 0.0)
    assert "launched" not in done.stdout_tail


def test_permitted_folders_reach_the_run(root):
    done = run(root, "import sys; print(sys.argv[1:])", permit=["out", "-d"])
    assert "'--permit=out', '--permit=-d'" in done.stdout_tail


@pytest.mark.parametrize("summary", ["", "[]", '{"denied_paths": 1}', "[" * 99_999])
def test_denied_paths_that_cannot_be_read_are_none(root, summary):
    (root / "logs/one").mkdir(parents=True)
    (root / "logs/one/summary.json").write_text(summary)
    done = run(root, "import sys; sys.exit(9)")
    assert (done.success, done.reason, done.denied_paths) == (False, "path_denied", ())


@pytest.mark.parametrize("name", ["..", "a/b", "", ".", "a b", "x" * 65, "a\n", "-t"])
def test_a_name_that_could_lead_elsewhere_is_refused(root, name):
    done = Bridge(root, environment={}).run("Do it.", name=name)
    assert (done.success, done.exit_code, done.reason) == (False, 2, "usage")
    assert "cannot be called" in done.stdout_tail


@pytest.mark.parametrize("place", ["experiments", "experiments/one/results", FINAL])
def test_link_replacing_a_contract_part_is_denied(root, tmp_path, place):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(outside)
    done = run(root, "")
    assert (done.success, done.reason) == (False, "path_denied")
