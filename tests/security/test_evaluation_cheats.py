"""Agents that cheat: files that they leave in a workspace do not make a check pass.

Each cheat is a set of files that an agent leaves, or code under test; it is scored like an attempt: the part that
counts, in a fresh directory, with the hidden files and the program of the check laid over last. `make test` runs a
cheat of each kind, and `make soak` all of them.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.evaluation.datasets.file_trees import COMMAND, TreeFile, build_test_check, read_tree, to_tree
from deckhands.evaluation.datasets.human_eval import human_eval_instance
from deckhands.evaluation.datasets.instances import Instance
from deckhands.evaluation.datasets.shipped import DIRECTORY, read_shipped_instance
from deckhands.evaluation.scoring import compute_work
from tests.dataset_parts import HUMAN_EVAL, checked, harbor_task, mirror_in, swe_rows, write_rows

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
UNITTEST = """import unittest

from calc import add


class Adding(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_more(self):
        self.assertEqual([add(2, 2), add(0, 0)], [4, 0])
"""
PYTEST = "from calc import add\n\n\nclass TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n"
PASSING = {
    f"hidden_tests/test_calc.py::{name}": "passed"
    for name in ("Adding::test_add", "Adding::test_more", "TestAdd::test_add")
}
PASSED = "print('1 passed')\n"
END = "import os\nos._exit(0)\n"

LEFT_BEHIND = {
    "pytest.py": END,
    "pytest/__init__.py": END,
    "pytest/__main__.py": END,
    "_pytest/__init__.py": END,
    "pluggy.py": END,
    "src/pytest.py": END,
    "lib/_pytest/__init__.py": END,
    "unittest.py": END,
    "unittest/__main__.py": END,
    "json.py": END,
    "conftest.py": "collect_ignore_glob = ['*']\n",
    "lib/conftest.py": "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_call(item): return True\n",
    "hidden_tests/conftest.py": "def pytest_collection_modifyitems(items): items.clear()\n",
    "hidden_tests/__init__.py": END,
    "hidden_tests/test_calc.py": "def test_add(): pass\n",
    "sitecustomize.py": END,
    "usercustomize.py": END,
    "evil.pth": "import os; os._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    ".pytest.ini": "[pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\naddopts = --collect-only\n",
    "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--collect-only"\n',
    "calc.cpython-311.pyc": "",
    "__pycache__/calc.cpython-311.pyc": "",
    "pyvenv.cfg": "home = /tmp\n",
    ".env": "PYTEST_ADDOPTS=--collect-only\n",
    ".bashrc": "python3() { true; }\nexport BASH_ENV=.bashrc\n",
    ".bash_aliases": "alias python3=true\n",
    ".profile": "exit 0\n",
    ".git/hooks/post-checkout": "exit 0\n",
    ".venv/bin/python3": "exit 0\n",
    "jest.config.ts": "export default {}\n",
    ".mocharc.cjs": "process.exit(0)\n",
    "node_modules/assert/index.js": "module.exports = () => {}\n",
    "main_test.go": "package main\nfunc TestMain(m *testing.M) { os.Exit(0) }\n",
    ".cargo/config.toml": "[target.x]\nrunner = 'true'\n",
    ".deckhands_check/run.py": "",
    ".deckhands_check/guarded.py": END,
    ".deckhands_check/pytest.py": END,
}
"""Files by which an agent could decide what runs."""

CODE = {
    "exit": END,
    "exit in a call": "import os\ndef add(a, b): os._exit(0)\n",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "exit in a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\n" + WRONG,
    "sys.exit": "import sys\nsys.exit(0)\n",
    "sys.exit in a call": "import sys\ndef add(a, b): sys.exit(0)\n",
    "exec": "import os\nos.execv('/bin/true', ['true'])\n",
    "prints": PASSED + "print('test_add (test_calc.Adding.test_add) ... ok')\nprint('OK')\n" + WRONG,
    "skips": "import unittest\nraise unittest.SkipTest('no')\n",
    "skips in a call": "import unittest\ndef add(a, b): raise unittest.SkipTest('no')\n",
    "pytest skips": "def add(a, b):\n    import pytest\n    pytest.skip('no')\n",
    "run": "import unittest\ndef run(self, result=None): result.startTest(self); result.addSuccess(self)\n"
    "unittest.TestCase.run = run\n" + WRONG,
    "code of run": "import unittest\ndef run(self, result=None): result.addSuccess(self)\n"
    "unittest.TestCase.run.__code__ = run.__code__\n" + WRONG,
    "assertEqual": "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\n" + WRONG,
    "addFailure": "import unittest\nR = unittest.TextTestResult\n"
    "R.addFailure = R.addError = lambda self, test, error: self.addSuccess(test)\n" + WRONG,
    "outcome": "import contextlib, unittest.case\n"
    "unittest.case._Outcome.testPartExecutor = lambda self, *a, **k: contextlib.suppress(BaseException)\n" + WRONG,
    "pytest's runner": "import _pytest.runner, _pytest.reports\n"
    "_pytest.runner.pytest_runtest_call = lambda item: None\n"
    "_pytest.reports.TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)\n" + WRONG,
    "module": "import sys, types\nsys.modules['unittest'] = types.ModuleType('unittest')\n" + WRONG,
    "checker": "import sys\nfor module in map(sys.modules.get, ('guarded', '__main__')):\n"
    "    for name in ('fingerprint', 'has_passed', 'run_pytest', 'run_unittest', 'unless_replaced', 'watch'):\n"
    f"        if hasattr(module, name): setattr(module, name, lambda *a, **k: {PASSING})\n" + WRONG,
    "json": f"import json\njson.dumps = json.JSONEncoder.encode = lambda *a, **k: {json.dumps(PASSING)!r}\n" + WRONG,
    "identities": "import builtins, unittest\nCase = unittest.TestCase\nkept, real = Case.run, id\n"
    "def run(self, result=None): result.startTest(self); result.addSuccess(self)\n"
    "def lie(one):\n    if one is run: return real(kept)\n    if one is run.__code__: return real(kept.__code__)\n"
    "    return real(real if one is lie else None if one is lie.__code__ else one)\n"
    "builtins.id, Case.run = lie, run\n" + WRONG,
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + WRONG,
    "reports by itself": "import json, os\nfor fd in range(3, 64):\n    try: os.write(fd, b'x' * 64 + b'\\n{\"hidden_tests/"
    'test_calc.py::Adding::test_add": "passed"}\')\n    except OSError: pass\nos._exit(0)\n',
    "reports later": "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\nfor fd in range(3, 64):\n"
    "    try: os.write(fd, b'{}')\n    except OSError: pass\nos._exit(0)\n",
    "overwrites the tests": "import glob\nfor name in glob.glob('hidden_tests/*') + glob.glob('.deckhands_check/*'):\n"
    "    open(name, 'w').close()\n" + WRONG,
    "links the tests away": "import os, shutil\nshutil.rmtree('hidden_tests', ignore_errors=True)\n"
    "os.symlink('.', 'hidden_tests')\n" + WRONG,
    "daemon": "import os, time\nif not os.fork():\n    os.setsid()\n    end = time.time() + 3\n    while time.time() < end:\n"
    "        for name in ('hidden_tests/test_calc.py', 'hidden_tests/test_calc.pyc'):\n"
    "            try: open(name, 'w').write('def test_add(): pass')\n            except OSError: pass\n    os._exit(0)\n"
    + WRONG,
    "hangs": "import time\ntime.sleep(1e6)\n",
    "writes a report": "open('report.xml', 'w').write('<testsuite tests=\"1\" failures=\"0\"/>')\n" + END,
}
"""Code under test that is not right and tries to pass."""
EQUAL = """class Equal(int):
    __eq__ = __ne__ = __le__ = __ge__ = lambda *_: True
    __hash__ = None
def add(a, b):
    return Equal()
"""
EQUAL_TO_ALL = "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b):\n    return Equal()\n"
SEARCHES = """import gc, os
for one in gc.get_objects():
    if type(one).__name__ == 'Report':
        one.send(**{f'hidden_tests/test_calc.py::Adding::test_{n}': 'passed' for n in ('add', 'more')})
        one.send(is_right='yes')
os._exit(0)
"""
BY_VALUE = {"equal": EQUAL, "equal to all": EQUAL_TO_ALL, "searches": SEARCHES}
"""What works in one process with the tests, and not where these have a process for themselves."""


def cases(names: Iterable[str], *shown: str) -> list[ParameterSet]:
    """Return parameters; those that are not named here run in `make soak` only."""
    return [pytest.param(name, marks=() if name in shown else pytest.mark.soak) for name in names]


def of_command(check: str) -> Instance:
    hidden = to_tree({"hidden_tests/test_calc.py": UNITTEST})
    return Instance("calc", "Repair it.", workspace=to_tree({"calc.py": WRONG}), hidden=hidden, check=check)


def of_tests(kind: str) -> Instance:
    hidden = to_tree({"hidden_tests/test_calc.py": PYTEST if kind == "pytest" else UNITTEST})
    asked = {"isolated": kind == "isolated", "limit_seconds": 20}
    whole = build_test_check(hidden, ("hidden_tests/test_calc.py",), **asked)
    return Instance("calc", "Repair it.", workspace=to_tree({"calc.py": WRONG}), hidden=whole, check=COMMAND)


def is_resolved(instance: Instance, folder: Path, changes: dict[str, str]) -> bool:
    return checked(instance, folder, changes).returncode == 0


@pytest.mark.parametrize("check", ["python3 -m pytest -q hidden_tests", "python3 -m unittest discover -s hidden_tests"])
def test_files_decide_nothing_in_a_command(tmp_path: Path, check: str) -> None:
    instance = of_command(check)
    assert is_resolved(instance, tmp_path / "right", LEFT_BEHIND | {"calc.py": RIGHT})
    assert not is_resolved(instance, tmp_path / "wrong", LEFT_BEHIND)


@pytest.mark.parametrize("kind", ["unittest", "pytest", "isolated"])
def test_files_decide_nothing_in_named_tests(tmp_path: Path, kind: str) -> None:
    instance = of_tests(kind)
    assert is_resolved(instance, tmp_path / "right", LEFT_BEHIND | {"calc.py": RIGHT})
    assert not is_resolved(instance, tmp_path / "wrong", LEFT_BEHIND)


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_a_file_that_decides_what_runs_is_left_out(name: str) -> None:
    instance = of_tests("unittest")
    begun_with, hidden = instance.files(), read_tree(instance.hidden)
    work = compute_work(begun_with, {**begun_with, name: TreeFile(b"x")}, hidden)
    assert work.tree == begun_with
    assert work.left_out == (() if name in hidden else (name,))


def test_module_run_by_the_check_is_excluded() -> None:
    found = {"runner.py": TreeFile(b"x"), "other.py": TreeFile(b"x")}
    assert compute_work({}, found, {}, "python3 -m runner --all").left_out == ("runner.py",)
    assert compute_work({"runner.py": TreeFile(b"")}, found, {}, "python3 -m runner --all").left_out == ()


def test_files_named_like_modules_count_in_other_languages() -> None:
    found = {"string.c": TreeFile(b"x"), "calendar/index.js": TreeFile(b"x"), "lib/json.py": TreeFile(b"x")}
    assert compute_work({}, found, {}).left_out == ()


@pytest.mark.parametrize(
    "name",
    cases(
        CODE,
        *("exit at the end", "pytest skips", "code of run", "checker", "identities", "reports by itself"),
        "overwrites the tests",
    ),
)
def test_code_that_cheats_is_not_resolved(tmp_path: Path, name: str) -> None:
    assert not is_resolved(of_tests("unittest"), tmp_path / "cheat", {"calc.py": CODE[name]})


@pytest.mark.parametrize("name", cases(CODE, "exit in a call", "kills its parent", "reports by itself"))
def test_code_that_cheats_isolated_tests_is_not_resolved(tmp_path: Path, name: str) -> None:
    assert not is_resolved(of_tests("isolated"), tmp_path / "cheat", {"calc.py": CODE[name]})


SOME = (
    *("exit", "exit at the end", "prints", "run", "pytest's runner", "pytest skips", "checker", "json"),
    *("kills its parent", "reports by itself"),
)


@pytest.mark.parametrize("name", cases(SOME, "pytest's runner", "json"))
def test_code_that_cheats_pytest_is_not_resolved(tmp_path: Path, name: str) -> None:
    assert not is_resolved(of_tests("pytest"), tmp_path / "cheat", {"calc.py": CODE[name]})


@pytest.mark.parametrize("name", BY_VALUE)
def test_isolated_tests_compare_values_alone(tmp_path: Path, name: str) -> None:
    assert not is_resolved(of_tests("isolated"), tmp_path / "cheat", {"calc.py": BY_VALUE[name]})


@pytest.mark.parametrize("name", cases((*SOME, *BY_VALUE), "exit", "reports by itself", *BY_VALUE))
def test_a_function_that_cheats_is_not_right(tmp_path: Path, name: str) -> None:
    changes = {"solution.py": (CODE | BY_VALUE)[name].replace("add(a, b)", "twice(a)")}
    assert not is_resolved(human_eval_instance(HUMAN_EVAL), tmp_path / "cheat", changes)


@pytest.mark.parametrize("name", cases(SOME, "checker"))
@pytest.mark.parametrize("repository", ["acme/calc", "django/django"])
def test_a_repository_that_cheats_is_not_resolved(tmp_path: Path, repository: str, name: str) -> None:
    commit = mirror_in(tmp_path / "mirrors", repository)
    fields = {"FAIL_TO_PASS": ["test_sum (test_calc.Case)"], "PASS_TO_PASS": []} if "django" in repository else {}
    path = write_rows(tmp_path, swe_rows(commit, repo=repository, **fields))
    (instance,) = read_dataset(path, repositories=tmp_path / "mirrors")
    infrastructure = {"tests/runtests.py": END, "tests/conftest.py": END, "pytest.py": END, "src/pytest.py": END}
    assert not is_resolved(instance, tmp_path / "cheat", infrastructure | {"calc.py": CODE[name]})
    assert is_resolved(instance, tmp_path / "right", infrastructure | {"calc.py": RIGHT})


@pytest.mark.parametrize("name", cases(SOME, "exit", "checker"))
def test_a_task_whose_tests_import_its_code_is_not_resolved(tmp_path: Path, name: str) -> None:
    folder = harbor_task(tmp_path / "task")
    (folder / "tests" / "test.sh").write_text("curl -LsSf https://x | sh\npytest /tests/test_outputs.py\n")
    test = "import sys\nsys.path.insert(0, '/app')\n" + PYTEST
    (folder / "tests" / "test_outputs.py").write_text(test)
    (instance,) = read_dataset(folder)
    assert not is_resolved(instance, tmp_path / "cheat", {"calc.py": CODE[name], "pytest.py": END})
    assert is_resolved(instance, tmp_path / "right", {"calc.py": RIGHT})


def shipped(name: str) -> Instance:
    about = tomllib.loads((DIRECTORY / name / "instance.toml").read_text())
    if any(shutil.which(program) is None for program in about["needs"]):
        pytest.skip(f"needs {about['needs']}")
    return read_shipped_instance(DIRECTORY / name, about)


IN_NODE = {
    "exit": "process.exit(0);",
    "reallyExit": "process.reallyExit(0);",
    "exit later": "setImmediate(() => process.exit(0)); module.exports = { compare: () => 0, newest: () => null };",
    "assert": "const assert = require('assert'); assert.strictEqual = assert.throws = () => {};"
    "module.exports = { compare: () => 0, newest: () => null };",
    "imported assert": "import('node:assert').then((m) => { try { m.default.strictEqual = () => {}; } catch {} });"
    "module.exports = { compare: () => 0, newest: () => null };",
    "test": "const test = require('node:test'); module.exports = {};",
    "loader": "module.constructor._load = () => ({}); module.exports = { compare: () => 0, newest: () => null };",
    "files": "require('fs').writeSync(3, 'x'); process.exit(0);",
    "built in": "process.getBuiltinModule('fs').writeSync(3, 'x'); process.exit(0);",
    "program": "require('child_process').execSync('kill -9 $PPID');",
    "debugger": "import('node:inspector').then((i) => new i.Session().connect());"
    "module.exports = { compare: () => 0, newest: () => null };",
    "prints": "console.log('# pass 3\\nok 1 - order'); module.exports = { compare: () => 0, newest: () => null };",
    "loops": "Array.prototype.forEach = () => {}; Array.prototype[Symbol.iterator] = function* () {};"
    "module.exports = { compare: () => 0, newest: () => null };",
    "once": "const kept = Array.prototype[Symbol.iterator]; Object.defineProperty(Array.prototype, Symbol.iterator,"
    "{ get: () => function* () {}, configurable: true }); module.exports = { compare: () => 0, newest: () => null };",
    "globals": "globalThis.Math = { sign: () => 0 }; globalThis.Object = { is: () => true };"
    "module.exports = { compare: () => 0, newest: () => null };",
    "promises": "Promise.prototype.then = function (done) { done(); return this; };"
    "Object.defineProperty(Promise.prototype, 'constructor', { value: Object });"
    "module.exports = { compare: () => 0, newest: () => null };",
    "setters": "for (let n = 0; n < 9; n++) Object.defineProperty(Array.prototype, n, { set(v) {"
    "Object.defineProperty(this, n, { value: { ...v, run() {} } }); } });"
    "module.exports = { compare: () => 0, newest: () => null };",
    "pool": "const found = Buffer.from(Buffer.allocUnsafe(8).buffer).toString('latin1').match(/[0-9a-f]{64}/);"
    "import('node:fs').then((fs) => { for (let fd = 3; fd < 40; fd++) try { fs.writeSync(fd, found[0] + '\\n' + JSON.stringify("
    "Object.fromEntries(['order', 'refused', 'ranges'].map((n) => ['hidden_tests/versions.test.js::' + n, 'passed']))));"
    "} catch {} process.exit(0); }); module.exports = { compare: () => 0, newest: () => null };",
    "equal": "const e = { valueOf: () => 0, [Symbol.toPrimitive]: () => 0 };"
    "module.exports = { compare: () => e, newest: () => e };",
}


@pytest.mark.parametrize("name", cases(IN_NODE, "assert", "loops", "setters", "pool"))
def test_code_that_cheats_node_is_not_resolved(tmp_path: Path, name: str) -> None:
    files = {"versions.js": IN_NODE[name], "package.json": '{"scripts": {"test": "true"}}'}
    files["hidden_tests/versions.test.js"] = ""
    assert not is_resolved(shipped("version-order"), tmp_path / "cheat", files)


DECODE = '#include "decode.h"\n#include <string.h>\n#include <stdlib.h>\n#include <unistd.h>\n'
STUB = "size_t url_decode(char *text) { return strlen(text); }\n"
IN_C = {
    "exit": "size_t url_decode(char *text) { exit(0); }\n",
    "_exit": "size_t url_decode(char *text) { _exit(0); }\n",
    "constructor": "__attribute__((constructor)) static void first(void) { }\n" + STUB,
    "destructor": "__attribute__((destructor)) static void last(void) { }\n" + STUB,
    "strcmp": "int strcmp(const char *a, const char *b) { return 0; }\n" + STUB,
    "strlen": "size_t strlen(const char *a) { return 0; }\nsize_t url_decode(char *text) { return 0; }\n",
    "main": "int main(void) { return 0; }\n" + STUB,
    "assembler": 'size_t url_decode(char *t) { __asm__("mov $60, %eax; xor %edi, %edi; syscall"); return 0; }\n',
    "fork": "size_t url_decode(char *text) { return fork(); }\n",
}
IN_HEADER = {
    "strcmp": "#include <string.h>\n#undef strcmp\n#define strcmp(a, b) ((void)(a), (void)(b), 0)\n",
    "free": "#include <stdlib.h>\n#define free(a) _Exit(0)\n",
    "line": '#line 1 "/usr/include/x.h"\n#include <stdlib.h>\n#define free(a) _Exit(0)\n',
    "if": "#define if(x) if (0)\n",
    "constructor": "__attribute__((constructor)) static void first(void) { __builtin_trap(); }\n",
    "function": "int other(void) { return 0; }\n",
}


@pytest.mark.parametrize("name", cases(IN_C, "constructor", "strcmp", "assembler"))
def test_code_that_cheats_in_c_is_not_resolved(tmp_path: Path, name: str) -> None:
    changes = {"decode.c": DECODE + IN_C[name], "Makefile": "all check:\n\ttrue\n", "GNUmakefile": "%:\n\ttrue\n"}
    assert not is_resolved(shipped("url-decode-in-place"), tmp_path / "cheat", changes)


@pytest.mark.parametrize("name", cases(IN_HEADER, "strcmp", "line", "function"))
def test_headers_that_cheat_are_not_resolved(tmp_path: Path, name: str) -> None:
    instance = shipped("url-decode-in-place")
    header = instance.files()["decode.h"].content.decode() + IN_HEADER[name]
    solution = (DIRECTORY / "url-decode-in-place" / "solution" / "decode.c").read_text()
    done = checked(instance, tmp_path / "cheat", {"decode.c": solution, "decode.h": header})
    assert (done.returncode, "The code under test" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("name", "file", "code"),
    [
        ("backup-rotation", "rotate.sh", "kill -9 $PPID\nexit 0\n"),
        pytest.param(
            "backup-rotation",
            "rotate.sh",
            "echo OK; rm -rf hidden_tests .deckhands_check; exit 0\n",
            marks=pytest.mark.soak,
        ),
        ("access-log-top", "top.awk", 'BEGIN { print "1 passed"; exit 0 }\n'),
        ("working-days", "due.pl", "exit 0;\n"),
        ("clean-that-does-nothing", "Makefile", "%:\n\ttrue\nall test clean greet:\n\ttrue\n"),
        pytest.param("stock-first-in-first-out", "stock.sql", "SELECT 1, 0, 0, 0", marks=pytest.mark.soak),
    ],
)
def test_programs_that_cheat_are_not_resolved(tmp_path: Path, name: str, file: str, code: str) -> None:
    assert not is_resolved(shipped(name), tmp_path / "cheat", {file: code})
