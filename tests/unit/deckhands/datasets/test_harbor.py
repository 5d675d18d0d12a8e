"""Directories of tasks as Harbor and Terminal-Bench have them: what a workspace can have of a container, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.datasets.dataset import read_dataset
from deckhands.datasets.file_trees import File, tree_of
from deckhands.datasets.instances import Instance
from tests.dataset_parts import checked, harbor_task


def only(folder: Path) -> Instance:
    (found,) = read_dataset(folder)
    return found


def test_a_task_becomes_a_workspace_and_a_check_by_its_reward(tmp_path: Path) -> None:
    found = only(harbor_task(tmp_path / "hello"))
    assert found.id == "hello"
    assert "Your working directory stands for /app" in found.task
    assert found.tags == ("easy", "files", "greeting")
    assert tree_of(found.workspace) == {"names/a.txt": File(b"Ann\n")}
    assert found.setup is not None
    assert found.setup.startswith("export LANGUAGE='en us' && test -e .deckhands_check || ")
    assert '( echo made > "$PWD"/made.txt )' in found.setup
    assert "apt-get" not in found.setup
    assert checked(found, tmp_path / "wrong").returncode == 1
    assert checked(found, tmp_path / "right", {"hello.txt": "Hello, Ann\n"}).returncode == 0
    assert found.turns


def test_the_first_terminal_bench_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "old"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: Write /app/a.txt.\ndifficulty: easy\ntags: [files]\n")
    (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    (folder / "docker-compose.yaml").write_text("services:\n  client: {}\n")
    (folder / "run-tests.sh").write_text("apt-get install -y curl\nuv run pytest $TEST_DIR/test_outputs.py\n")
    test = "from pathlib import Path\ndef test_it():\n    assert Path('/app/a.txt').exists()\n"
    (folder / "tests" / "test_outputs.py").write_text(test)
    found = only(tmp_path / "tasks")
    assert (found.id, found.tags) == ("old", ("easy", "files"))
    assert checked(found, tmp_path / "right", {"a.txt": ""}).returncode == 0


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("environment/Dockerfile", "FROM a AS b\nFROM c\n", "Dockerfile, line 2: a workspace is built in one stage"),
        (
            "environment/Dockerfile",
            "FROM a\nWORKDIR /app\nCOPY x /etc/\n",
            "line 3: it copies to /etc; a workspace has",
        ),
        ("environment/Dockerfile", "FROM a\nCOPY ../x /app/\nWORKDIR /app\n", "it copies ../x; only files beside it"),
        ("environment/Dockerfile", "FROM a\nWORKDIR /app\nCOPY none /app/\n", "there is no none to copy"),
        ("environment/Dockerfile", "FROM a\nFETCH x\n", "line 2: FETCH is not known"),
        ("environment/docker-compose.yaml", "services: {a: {}, b: {}}\n", "it has 2 services"),
        ("tests/test.sh", "curl -LsSf https://x | sh\n", "installs programs, and a check has no network"),
        ("instruction.md", "\n", "it has no instruction"),
        ("task.toml", "[[", "its description cannot be read"),
    ],
)
def test_what_a_workspace_cannot_give_is_named_by_task(tmp_path: Path, name: str, text: str, why: str) -> None:
    harbor_task(tmp_path / "good")
    (harbor_task(tmp_path / "hello") / name).write_text(text)
    with pytest.raises(UsageError, match="task hello: ") as raised:
        read_dataset(tmp_path)
    assert why in str(raised.value)
    assert "task good" not in str(raised.value)


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no tasks"):
        read_dataset(tmp_path)
