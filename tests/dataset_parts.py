"""Datasets for tests: rows in published formats, and the files that they refer to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deckhands.evaluation.datasets.file_trees import TreeFile, read_tree
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.scoring import build_check_files, compute_work
from tests.trees import write_files

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
HUMAN_EVAL: dict[str, Any] = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(a):\n    """Return a, doubled."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * a\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
QUESTION: dict[str, Any] = {
    "task_id": "q-1",
    "Question": "Which word is meant?",
    "Level": 1,
    "Final answer": "egalitarian",
    "file_name": "",
}
_TEST = """from unittest import TestCase

from calc import add


def test_zero():
    assert add(0, 0) == 0


class Case(TestCase):
    def test_unit(self):
        self.assertEqual(add(0, 0), 0)
"""
_TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -6,7 +6,14 @@
 def test_zero():
     assert add(0, 0) == 0


+def test_add():
+    assert add(1, 2) == 3
+
+
 class Case(TestCase):
     def test_unit(self):
         self.assertEqual(add(0, 0), 0)
+
+    def test_sum(self):
+        self.assertEqual(add(1, 2), 3)
diff --git a/tests/test_old.py b/tests/test_old.py
deleted file mode 100644
--- a/tests/test_old.py
+++ /dev/null
@@ -1 +0,0 @@
-old = True
"""
_GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


RUNTESTS = """import sys, unittest
suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[sys.argv.index("1") + 1:])
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""
"""A runner as Django has it."""


def mirror_in(directory: Path, repository: str = "acme/calc") -> str:
    """Make a bare mirror of a small repository, and return its commit, which is not its last one."""
    source = directory / "source" / repository
    files = {
        "calc.py": "def add(a, b):\n    return a - b\n",
        "tests/test_calc.py": _TEST,
        "tests/test_old.py": "old = True\n",
        "run.sh": "true\n",
    }
    if repository == "django/django":
        files["tests/runtests.py"] = RUNTESTS
    write_files(source, files)
    (source / "run.sh").chmod(0o755)

    def git(*arguments: str) -> str:
        names = {f"GIT_{who}_{what}": "a@b.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = {**os.environ, **names}
        done = subprocess.run(
            ("git", *arguments), cwd=source, check=True, capture_output=True, text=True, env=environment
        )
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "begin")
    commit = git("rev-parse", "HEAD")
    (source / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    git("commit", "-q", "-a", "-m", "repair")
    git("clone", "-q", "--mirror", ".", str(directory / f"{repository.replace('/', '__')}.git"))
    return commit


def swe_rows(commit: str, **changes: Any) -> list[dict[str, Any]]:
    """Return one row in the published format of SWE-bench."""
    row = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": commit,
        "problem_statement": "add subtracts.",
        "patch": _GOLD,
        "test_patch": _TEST_PATCH,
        "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_zero"]',
        "version": "1.0",
        "hints_text": "",
    }
    return [row | changes]


def write_rows(directory: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checked(
    instance: Instance, folder: Path, changes: Mapping[str, str] | None = None, *, limit: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run the check of an instance with some of an agent's changes: with those that count, as in scoring."""
    begun_with = instance.files()
    found = {
        **begun_with,
        **{name: TreeFile(text.encode(), name.endswith(".sh")) for name, text in (changes or {}).items()},
    }
    hidden = read_tree(instance.hidden)
    assert instance.check is not None
    tree = build_check_files(compute_work(begun_with, found, hidden, instance.check), hidden)
    for name, file in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.content)
        (folder / name).chmod(0o755 if file.is_executable else 0o644)
    folder.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = ("bash", "-c", instance.whole_check)
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False, timeout=limit
    )


def harbor_task(folder: Path) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\ncategory = "files"\ntags = ["greeting"]\n',
        "instruction.md": "Greet the person in /app/names/a.txt: write the greeting into /app/hello.txt.\n",
        "environment/Dockerfile": "# syntax\nFROM debian:13\nRUN apt-get update && \\\n    apt-get install -y tmux\n"
        'ENV LANGUAGE="en us"\nWORKDIR /app\nCOPY names/ /app/names/\nRUN echo made > "/app"/made.txt\nCMD ["bash"]\n',
        "environment/names/a.txt": "Ann\n",
        "tests/test.sh": 'expected="Hello, $(cat /tests/name)"\n'
        '[ "$(cat /app/hello.txt)" = "$expected" ] && echo 1 > /logs/verifier/reward.txt\nexit 0\n',
        "tests/name": "Ann\n",
        "solution/solve.sh": 'echo "Hello, $(cat /app/names/a.txt)" > /app/hello.txt\n',
    }
    return write_files(folder, files)
