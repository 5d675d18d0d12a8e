"""Runs in the workspace of a check, by itself: runs the tests of some files, and demands that each of them passes.

    run.py                 the checker: knows which tests there are from the text of the files
    run.py --isolated      the tests, with the code under test in another process; see `separate`
    run.py --in-process    the tests and the code under test

Holds: a test counts only if a process that the checker has started reports it as passed. The text of the tests is read
before any code under test runs, and is not in the workspace while tests are isolated.
Does not: resist, in one process with the tests, code that searches for the token of the report.
"""

from __future__ import annotations

import ast
import ctypes
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from guarded import (  # noqa: E402
    Report,
    cases_in,
    confine,
    has_passed,
    paths_of_workspace,
    protect,
    report_of,
    run_pytest,
    run_unittest,
    tests_in,
)
from separate import Subject  # noqa: E402

sys.path.pop(0)
LIMIT_SECONDS = 280.0
SHOWN = 50
HARMLESS = frozenset(
    "malloc calloc realloc free reallocarray memcpy memmove memset memcmp memchr memrchr memmem mempcpy strlen strnlen"
    " strcpy strncpy stpcpy strcmp strncmp strcasecmp strncasecmp strchr strrchr strchrnul strstr strcat strncat strdup"
    " strndup strspn strcspn strpbrk strtok strtok_r strtol strtoul strtoll strtoull strtod atoi atol abs labs qsort"
    " bsearch isdigit isxdigit isalpha isalnum isspace isupper islower ispunct isprint tolower toupper __ctype_b_loc"
    " __ctype_tolower_loc __ctype_toupper_loc snprintf vsnprintf sprintf vsprintf __errno_location __stack_chk_fail"
    " _GLOBAL_OFFSET_TABLE_ __assert_fail abort __isoc99_sscanf __isoc23_strtol __isoc23_strtoul __memcpy_chk"
    " __memmove_chk __memset_chk __strcpy_chk __strcat_chk __snprintf_chk __vsnprintf_chk __sprintf_chk".split()
)
"""What code under test in C may use of the library."""


def main() -> int:
    """Run the tests; return 0 if each of them passes."""
    protect()
    asked: dict[str, Any] = json.loads((HERE / "asked.json").read_text(encoding="utf-8"))
    texts = {name: Path(name).read_text(encoding="utf-8") for name in asked["files"]}
    limit = asked.get("limit_seconds", LIMIT_SECONDS)
    if all(name.endswith(".js") for name in texts):
        return _run_node(texts, limit)
    if "sources" in asked:
        return _run_c(*texts, asked["sources"], limit)
    expected = [f"{name}::{test}" for name, text in texts.items() for test in tests_in(text)]
    if not expected:
        print("The files have no tests.")
        return 1
    command = [sys.executable, "-I", str(Path(__file__).resolve())]
    by_pytest = not all(name.split("::")[1] in cases_in(texts[name.partition("::")[0]]) for name in expected)
    wrong: list[str] = []
    if asked["isolated"] and by_pytest:
        print("Tests are isolated only if they are methods of unittest.TestCase.")
        return 1
    if asked["isolated"]:
        for name in texts:
            Path(name).unlink()
        found = report_of([*command, "--isolated"], texts, limit)
        wrong += [name for name in expected if not (_is_one_of(name, asked["in_process"]) or has_passed(name, found))]
    if not asked["isolated"] or any(_of_workspace(text) for text in texts.values()):
        found = report_of([*command, "--by-pytest" if by_pytest else "--in-process"], texts, limit)
        wrong += [name for name in expected if name not in wrong and not has_passed(name, found)]
    return _verdict(expected, wrong)


def _verdict(expected: list[str], wrong: list[str]) -> int:
    for name in wrong[:SHOWN]:
        print(f"{name}: did not pass")
    print(f"{len(expected) - len(wrong)} of {len(expected)} tests pass.")
    return 1 if wrong or not expected else 0


def _run_node(texts: dict[str, str], limit: float) -> int:
    """Run tests of node:test; return 0 if each of them passes."""
    expected = [
        f"{name}::{test}" for name, text in texts.items() for test in re.findall(r'(?m)^test\("([^"\\]+)"', text)
    ]
    flags = "process.allowedNodeEnvironmentFlags.has('--permission')"
    asked = subprocess.run(["node", "-p", flags], capture_output=True, text=True, check=False)
    permission = "--permission" if asked.stdout.strip() == "true" else "--experimental-permission"
    for name in texts:
        Path(name).unlink()
    options = ["--no-warnings", "--frozen-intrinsics", permission, "--allow-fs-read=*"]
    command = ["node", *options, str(HERE / "node_tests.js")]
    found = report_of(command, texts, limit)
    return _verdict(expected, [name for name in expected if not has_passed(name, found)])


def _run_c(check: str, sources: list[str], limit: float) -> int:
    """Compile a program of tests with the code under test, and run it; return 0 if it ends well.

    The program decides by its exit code, so the code under test may not be able to end it or to take the place of what
    it uses: it gets functions for memory, texts and numbers alone, nothing runs before or after `main`, and its headers
    define no word that the program contains.
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = [f"{folder}/{number}.o" for number in range(len(sources) + 1)]
        for source, target in zip([check, *sources], objects):
            command = ["gcc", "-std=c11", "-Wall", "-I.", "-g", "-O1", "-fno-lto", "-c", "-o", target, source]
            if subprocess.run(command, check=False).returncode:
                return 1
        why = _forbidden_in(check, objects[0], objects[1:])
        if why:
            print(f"The code under test {why}.")
            return 1
        program = f"{folder}/check"
        if subprocess.run(["gcc", "-o", program, *objects], check=False).returncode:
            return 1
        Path(check).unlink()
        command = [sys.executable, "-I", str(Path(__file__).resolve()), "--program"]
        is_right = report_of(command, program, limit).get("code") == "0"
    print("1 of 1 tests pass." if is_right else "0 of 1 tests pass.")
    return 0 if is_right else 1


def _forbidden_in(check: str, tests: str, objects: list[str]) -> str:
    """Return what code under test does that tests in C cannot stand; empty: nothing."""
    text = Path(check).read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    system = _written(
        "gcc", "-std=c11", "-E", "-dM", "-xc", "-", given="\n".join(re.findall(r"(?m)^#include <.*>", text))
    )
    for line in set(_written("gcc", "-std=c11", "-I.", "-E", "-dM", check).splitlines()) - set(system.splitlines()):
        word = re.match(r"#define (\w+)", line)
        if word and word[1] in words and not re.search(rf"(?m)^\s*#\s*define\s+{word[1]}\b", text):
            return f"defines the word {word[1]}, which the tests use"
    library = ctypes.CDLL(None)
    symbols = {one: _symbols(one) for one in (tests, *objects)}
    own = {name for one in symbols for kind, name in symbols[one] if kind in "TDBRCWV"}
    for one, found in symbols.items():
        if re.search(r"(?m)^\s*\d+ \.(init|fini|preinit|ctors|dtors)", _written("objdump", "-h", one)):
            return "runs before or after the tests"
        if re.search(r"\t(syscall|sysenter|int|svc|ud2)\b", _written("objdump", "-d", one)):
            return "calls the system by itself"
        for kind, name in found:
            if one == tests and kind != "U" and kind.upper() in "TDBRI" and name not in words and "." not in name:
                return f"puts {name} into the tests"
            if one != tests and kind == "U" and name not in own | HARMLESS and not name.startswith("__builtin"):
                return f"uses {name}"
            if one != tests and kind in "TDBRCWVi" and (name == "main" or hasattr(library, name)):
                return f"defines {name}"
    return ""


def _symbols(file: str) -> list[tuple[str, str]]:
    lines = (line.split() for line in _written("nm", file).splitlines())
    return [(parts[-2], parts[-1]) for parts in lines if len(parts) > 1]


def _written(*command: str, given: str = "") -> str:
    done = subprocess.run(command, capture_output=True, input=given, text=True, errors="replace", check=True)
    return done.stdout


def run_program() -> None:
    """Run a program, and report how it has ended."""
    protect()
    report = Report()
    confine()
    report.send(code=str(subprocess.run([report.asked], check=False).returncode))


def _is_one_of(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.partition("::")[2], pattern) for pattern in patterns)


def _load(name: str, text: str) -> ModuleType:
    module = ModuleType(Path(name).stem)
    module.__file__ = str(Path(name).resolve())
    sys.modules.setdefault(module.__name__, module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def _run_cases(report: Report, load: Any) -> None:
    files = {Path(name).stem: name for name in report.asked}
    found = run_unittest(load)
    report.send(
        **{files[name.partition(".py::")[0]] + "::" + name.partition("::")[2]: how for name, how in found.items()}
    )


def run_isolated() -> None:
    """Run the tests here, and the code that they import in another process."""
    protect()
    report = Report()
    confine()
    subject = Subject()

    def load() -> list[ModuleType]:
        modules = []
        for name, text in report.asked.items():
            wanted = sorted(_of_workspace(text))
            earlier = {one: sys.modules.get(one) for one in wanted}
            sys.modules.update({one: subject.module(one) for one in wanted})
            try:
                modules.append(_load(name, text))
            finally:
                sys.modules.update({one: module for one, module in earlier.items() if module is not None})
            subject.peer.own_modules.add(modules[-1].__name__)
        return modules

    try:
        _run_cases(report, load)
    finally:
        subject.end()


def _of_workspace(text: str) -> set[str]:
    """Return the modules of the workspace that tests import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    tops = {name.partition(".")[0] for name in found}
    own = {top for top in tops if Path(f"{top}.py").exists() or Path(top).is_dir()}
    names = {".".join(name.split(".")[:end]) for name in found for end in range(1, name.count(".") + 2)}
    return {name for name in names if name.partition(".")[0] in own}


def run_in_process() -> None:
    """Run the tests and the code that they import here."""
    report = Report()
    confine()
    sys.path[:0] = paths_of_workspace()
    _run_cases(report, lambda: [_load(name, text) for name, text in report.asked.items()])


def run_by_pytest() -> None:
    """Run the tests and the code that they import here, by pytest."""
    report = Report()
    confine()
    try:
        report.send(**run_pytest(list(report.asked)))
    except ImportError:
        print("pytest is not installed for python3.")


if __name__ == "__main__":
    runs = {
        "--isolated": run_isolated,
        "--in-process": run_in_process,
        "--by-pytest": run_by_pytest,
        "--program": run_program,
    }
    if sys.argv[1:]:
        runs[sys.argv[1]]()
    else:
        sys.exit(main())
