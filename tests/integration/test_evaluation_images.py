"""SWE-bench rows whose repositories are in images of a real docker engine: attempts and checks run in containers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.attempts.plan import EvaluationPlan
from deckhands.evaluation.attempts.results import Results
from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.evaluation.datasets.file_trees import read_tree
from deckhands.evaluation.evaluation import Evaluation
from tests.dataset_parts import swe_rows, write_rows
from tests.docker_image import image
from tests.faults.harness import FaultCluster
from tests.integration.command_line import finish, run_command, script

pytestmark = pytest.mark.docker
DOCKER = Path("docker")
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    ".git/HEAD": "the history that nobody may see\n",
}
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -3,3 +3,7 @@

 def test_zero():
     assert add(0, 0) == 0
+
+
+def test_add():
+    assert add(1, 2) == 3
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a small repository in /testbed."""
    folder = tmp_path_factory.mktemp("image")
    for name, text in FILES.items():
        (folder / "testbed" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "testbed" / name).write_text(text)
    (folder / "Dockerfile").write_text(f"FROM {image('pytest')}\nCOPY testbed /testbed\n")
    name = "deckhands-test:testbed"
    subprocess.run(["docker", "build", "-q", "-t", name, folder], check=True, capture_output=True)
    return name


async def test_attempts_and_checks_run_in_containers_of_the_image(tmp_path: Path, repository: str) -> None:
    rows = swe_rows("0123456789", image_name=repository, test_patch=TEST_PATCH)
    (instance,) = read_dataset(write_rows(tmp_path, rows), repositories=DOCKER)
    assert instance.image == repository
    look = run_command("ls -A | tr '\\n' ' '; pwd; ls /testbed")
    right = script(tmp_path / "right.json", look, run_command("echo 'add = int.__add__' > calc.py"), finish("done"))
    wrong = script(tmp_path / "wrong.json", look, finish("done"))
    plan = EvaluationPlan("images", [instance], [right, wrong], retries=0)
    cluster = FaultCluster(tmp_path)
    async with cluster.running():
        cluster.start_tool(
            "t1", DECKHANDS_DOCKER_IMAGES=f"{repository},deckhands-test:*", DECKHANDS_NODE_DIR=str(tmp_path / "n")
        )
        cluster.start_controller("c1")
        with Results(tmp_path / "results.jsonl") as results:
            await Evaluation(cluster.client, plan, results).run()
            found = {row.model: row for row in results.rows.values()}
        events = await cluster.client.events(found[wrong].conversation_id)
    assert {model: row.outcome for model, row in found.items()} == {right: "resolved", wrong: "unresolved"}, found
    assert "+add = int.__add__" in found[right].patch
    assert "nobody may see" not in json.dumps([event.model_dump(mode="json") for event in events])
    assert not found[wrong].patch


def test_files_are_copied_and_no_container_is_left(tmp_path: Path, repository: str) -> None:
    rows = swe_rows("0123456789", image_name=repository, test_patch=TEST_PATCH)
    (instance,) = read_dataset(write_rows(tmp_path, rows), repositories=DOCKER)
    assert sorted(read_tree(instance.workspace)) == ["calc.py", "tests/test_calc.py"]
    assert b"test_add" in read_tree(instance.hidden)["tests/test_calc.py"].content
    left = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={repository}"]
    assert not subprocess.run(left, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("", "no image swebench/sweb.eval.x86_64.acme_1776_calc-1:latest: docker pull"),
        ("nobody/nothing:1", "no image nobody/nothing:1"),
        ("--privileged", "is not the name of an image"),
        ("a b", "is not the name of an image"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path, name: str, error: str) -> None:
    rows = swe_rows("0123456789", image_name=name)
    with pytest.raises(UsageError, match=error):
        read_dataset(write_rows(tmp_path, rows), repositories=DOCKER)
