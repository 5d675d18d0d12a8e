"""The tree keeps the house rules, and each rule finds what it is there to find."""

from __future__ import annotations

import gc
import re
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.environment_variables import find_unnamed_variables
from tests.house_rules import RULES
from tests.package_graph import (
    Edges,
    edges_of,
    find_broken_imports,
    find_cycle,
    find_imports_of_optional_packages,
    find_imports_of_the_command_line,
    find_imports_past_faces,
)
from tests.source_code import ROOT, Source, tracked_sources

RULE_BY_NAME = {rule.name: rule for rule in RULES}

MODULE = "broker/a.py"
TEST = "tests/unit/test_a.py"
HOST = "tool_worker/host/shell/shell.py"
CONCERN = "controller_worker/core/concerns/a.py"
BACKEND = "controller_worker/providers/a_backend.py"

# rule, path, text, the lines that break it
BROKEN = [
    ("floors", MODULE, "import controller_worker.core.state", {1}),
    ("floors", "controller_worker/a.py", "def f():\n    from tool_worker.tools.tool import tools", {2}),
    ("floors", "tool_worker/tools/a.py", "from ...controller_worker import state", {1}),
    ("floors", "tool_worker/a.py", "import importlib\nimportlib.import_module('controller_worker.providers')", {2}),
    ("floors", MODULE, "from tests.server_parts import start", {1}),
    ("core_below_and_above", CONCERN, "from controller_worker.core import state", {1}),
    ("core_below_and_above", CONCERN, "import json\nfrom controller_worker.core.controller import fold", {2}),
    (
        "core_below_and_above",
        "controller_worker/core/pending.py",
        "from controller_worker.core.concerns.delegation import Delegate",
        {1},
    ),
    ("store_imports", "controller_worker/a.py", "import redis.asyncio as store", {1}),
    ("store_imports", "deckhands/a.py", "def f():\n    from hiredis import Reader", {2}),
    ("celery_imports", "broker/coordination/ownership.py", "from celery import Celery", {1}),
    ("model_imports", "controller_worker/core/controller.py", "import litellm", {1}),
    ("asgi_imports", "deckhands/client/runs/headless.py", "from starlette.routing import Route", {1}),
    ("environment_imports", MODULE, "import os\nx = os.environ.get('A')", {2}),
    ("environment_imports", MODULE, "from os import getenv as read\nx = read('A')", {1, 2}),
    ("clock_imports", "broker/coordination/ownership.py", "import time", {1}),
    ("random_imports", HOST, "import uuid\nx = uuid.uuid4()", {2}),
    ("random_imports", MODULE, "from datetime import UTC, datetime\nx = datetime.now(UTC)", {2}),
    ("late_model_libraries", "controller_worker/providers/litellm_backend.py", "import litellm", {1}),
    ("late_model_libraries", BACKEND, "try:\n    import anthropic\nfinally:\n    x = 1", {2}),
    ("declared_dependencies", MODULE, "import hypothesis", {1}),
    ("declared_dependencies", MODULE, "def f():\n    import some_unknown_library", {2}),
    ("host_standard_library", HOST, "from broker.runtime.errors import UsageError", {1}),
    ("host_standard_library", HOST, "from tool_worker.errors import mask", {1}),
    ("host_standard_library", HOST, "from ... import completion", {1}),
    ("safe_loading", MODULE, "def f():\n    from marshal import loads", {2}),
    ("safe_loading", MODULE, "import yaml\nx = yaml.load('')", {2}),
    ("safe_loading", MODULE, "from yaml import load as read\nx = read('')", {2}),
    ("no_dynamic_code", "tool_worker/tools/a.py", "def f(text):\n    exec(text)", {2}),
    ("docstrings", MODULE, '"""M."""\ndef f():\n    return 1', {2}),
    ("docstrings", MODULE, '"""M."""\nclass A:\n    """A."""\n    async def f(self):\n        return 1', {4}),
    ("docstrings", MODULE, '"""M."""\nif True:\n    class A:\n        x = 1', {3}),
    ("positional_parameters", MODULE, "def f(a, b, c, d, e, g): ...", {1}),
    ("positional_parameters", MODULE, "class A:\n    def f(self, a, b, c, /, d, e, g): ...", {2}),
    ("noun_files", "broker/event_log_2.py", '"""M."""', {1}),
    ("noun_files", "broker/event_log_impl.py", '"""M."""', {1}),
    (
        "named_files_and_modules",
        MODULE,
        '"""M.\n\nSee broker/lo¦g/gone.py.\n"""\nx = 1  # see `broker.lo¦g.gone`',
        {3, 5},
    ),
    ("named_files_and_modules", MODULE, '"""See `broker.lo¦g.NoSuchLog`, `deckhands.cl¦ient.gone`."""', {1}),
    ("named_files_and_modules", "docs/a.md", "see\n`tests/un¦it/test_gone.py`", {2}),
    ("named_files_and_modules", "broker/log/lua/append.lua", "-- see docs/go¦ne.md", {1}),
    (
        "test_names",
        TEST,
        "def test_a_b_c_d_e_f_g_h_i_j_k(): ...\nclass A:\n    async def test_1_2_3_4_5_6_7_8_9_10_11(): ...",
        {1, 3},
    ),
    ("finished", MODULE, "x = 1  # TODO: later", {1}),
    ("finished", "broker/log/lua/append.lua", "-- here\n-- FIXME: there", {2}),
    ("finished", MODULE, "def f():\n    raise NotImplementedError", {2}),
    ("finished", MODULE, 'def f():\n    """F."""\n    ...', {1}),
    ("finished", MODULE, "class A:\n    def f(self):\n        pass", {2}),
    ("no_print", HOST, "print('x')", {1}),
    ("no_print", "deckhands/client/runs/headless.py", "def f():\n    print('x')", {2}),
    ("no_lingering_state", MODULE, "x = 1\ndef f():\n    global x\n    x = 2", {3}),
    ("no_lingering_state", MODULE, "class A:\n    def __del__(self): ...", {2}),
    ("no_sleep", TEST, "from asyncio import sleep\nasync def test():\n    await sleep(0.1)", {3}),
    ("no_sleep", TEST, "import asyncio as aio\npause = aio.sleep", {2}),
    ("no_mocks", TEST, "from unittest import mock", {1}),
    ("no_mocks", TEST, "def test(monkeypatch):\n    monkeypatch.setattr('broker.runtime.ids.new_key', str)", {2}),
    ("no_mocks", TEST, "from broker.runtime import ids\ndef test(mp):\n    mp.setattr(ids, 'new_key', str)", {3}),
    ("no_mocks", TEST, "def test(monkeypatch, log):\n    monkeypatch.delattr(log, 'append')", {2}),
    ("no_mocks", TEST, "import broker.runtime.ids\nbroker.ids.new_key = str", {2}),
    ("no_lock_files", "uv.lock", "", {1}),
    ("no_machine_addresses", "docs/a.md", "see\n/ro¦ot/x", {2}),
    ("no_machine_addresses", "Makefile", "pip install --index¦-url x", {1}),
    ("no_machine_addresses", "Dockerfile", "ARG index=https://pypi¦.org/simple", {1}),
    ("wording", MODULE, '"""It go¦es on.\n\nHolds: it is\nt¦old so.\n"""', {1, 3}),
    ("wording", MODULE, "x = 1  # who¦ever\n# a room of its\n# ow¦n\ny = 2", {1, 2}),
    ("wording", MODULE, 'x = "begin "\ny = f"{x} an¦ew"\nz = "what ca" "me o¦f it"', {2, 3}),
    ("wording", "broker/log/lua/append.lua", "-- It ends una¦wares, be\n-- it¦ early", {1}),
    ("wording", "docs/a.md", "Men¦d it.\nOf two¦ workers that claim, one wins.", {1, 2}),
    ("wording", "Makefile", "run: ## Work go¦es\n	 on", {1}),
]


def test_the_tree_keeps_every_rule() -> None:
    """All in one test: the tree is read once, and by one of those who share the tests."""
    gc.disable()  # syntax trees are millions of objects and leave no garbage
    findings = [
        f"{source.path}:{line}: {text} ({rule.name})"
        for source in tracked_sources()
        for rule in RULES
        if rule.applies(source.path)
        for line, text in rule.check(source)
    ]
    findings += find_broken_imports(tracked_sources())
    findings += find_unnamed_variables(tracked_sources())
    gc.freeze()
    gc.enable()
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("name", "path", "text", "lines"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_rule_finds(name: str, path: str, text: str, lines: set[int]) -> None:
    # The bar keeps an address from standing in this file; the rule reads the text without it.
    rule, source = RULE_BY_NAME[name], Source(path, text.replace("¦", ""))
    assert rule.applies(source.path)
    assert {line for line, _ in rule.check(source)} == lines


def test_every_rule_is_tried() -> None:
    assert {case[0] for case in BROKEN} == set(RULE_BY_NAME)


@pytest.mark.parametrize(
    ("find", "path", "text"),
    [
        (find_cycle, "broker/runtime/a.py", "def f():\n    from broker.log import EventLog"),
        (find_imports_past_faces, "deckhands/client/a.py", "from broker.log.event_log import EventLog"),
        (find_imports_past_faces, "deckhands/server/a.py", "from deckhands.client import no_such_name"),
        (find_imports_of_the_command_line, "deckhands/operations/jobs/a.py", "import deckhands.cli"),
        (find_imports_of_optional_packages, "deckhands/client/a.py", "from deckhands import evaluation"),
        (
            find_imports_of_optional_packages,
            "broker/log/a.py",
            "import importlib\nimportlib.import_module('deckhands.interop')",
        ),
    ],
)
def test_an_import_against_a_rule_is_found(find: Callable[[Edges], list[str]], path: str, text: str) -> None:
    above = Source("broker/log/b.py", "from broker.runtime import Clock")  # closes the cycle
    assert [line for line in find(edges_of([above, Source(path, text)])) if line.startswith(f"{path}:")]


def test_no_two_test_files_share_a_name() -> None:
    """Pytest imports the files of a folder that is not a package by their bare names."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in files)
    shared = [str(path.relative_to(ROOT)) for path in files if names[path.name] > 1]
    assert not shared, f"rename all but one of each name: {', '.join(sorted(shared))}"


def test_constraints_are_plain_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    odd = [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+( ; [\w. <>=\"']+)?", line)]
    assert not odd, "not of the form name==version ; marker:\n" + "\n".join(odd)


LOCKED = r"([\w.-]+)==([\w.]+)(?: ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"


@pytest.mark.parametrize(
    ("name", "extras"),
    [("tools", ["build"]), ("run", ["build", "all"]), ("dev", ["build", "dev"]), ("claude", ["build", "claude"])],
)
def test_installations_are_hashed_in_the_pinned_versions(name: str, extras: list[str]) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.sub(LOCKED, "", text), "not of the form name==version ; marker, with hashes: run `make lock`"
    locked = {canonicalize_name(found[1]): found[2] for found in re.finditer(LOCKED, text)}
    pinned = {canonicalize_name(one.name): str(one.specifier)[2:] for one in map(Requirement, _requirement_lines())}
    others = {name: version for name, version in locked.items() if version != pinned.get(name, version)}
    assert not others, f"not as in constraints.txt, run `make lock`: {others}"
    missing = {canonicalize_name(one.name) for one in _asked_for(*extras)} - set(locked)
    assert not missing, f"run `make lock` for {', '.join(sorted(missing))}"


def test_every_installation_checks_hashes() -> None:
    for name in ("Makefile", "Dockerfile"):
        installs = re.findall(r"pip install [^\n]+", (ROOT / name).read_text(encoding="utf-8"))
        loose = [line for line in installs if "--require-hashes" not in line and "--no-deps" not in line]
        assert installs, name
        assert not loose, f"{name} installs what has no hash: {loose}"


def test_no_file_runs_code_at_every_start_of_python() -> None:
    """A `.pth` file is run by every interpreter, with nothing imported: a stolen package came that way."""
    found = {path.name for path in Path(sysconfig.get_paths()["purelib"]).glob("*.pth")}
    known = {"distutils-precedence.pth", "a1_coverage.pth"}  # of setuptools; of coverage, idle without its variables
    ours = {name for name in found if re.fullmatch(r"__editable__\.deckhands-[\w.]+\.pth", name)}
    assert not found - known - ours, "look at these before they are let in"


def test_constraints_pin_everything_that_an_installation_brings() -> None:
    pinned = {canonicalize_name(Requirement(line).name) for line in _requirement_lines()}
    direct = _asked_for("dev")
    waiting = [one for one in direct if one.marker is None or one.marker.evaluate()]
    reached: set[tuple[str, str]] = set()
    missing: set[str] = {canonicalize_name(one.name) for one in direct} - pinned
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in reached:
                continue
            reached.add((name, extra))
            if name not in pinned:
                missing.add(name)
                continue
            further = [Requirement(line) for line in metadata.requires(name) or []]
            waiting += [one for one in further if one.marker is None or one.marker.evaluate({"extra": extra})]
    assert not missing, f"pin these in constraints.txt: {', '.join(sorted(missing))}"


def _asked_for(*extras: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml without extras, with these extras, and with those that they include."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            if (asked := Requirement(line)).name == project["name"]:
                waiting += asked.extras
            else:
                lines.append(line)
    return [Requirement(line) for line in lines]


def _requirement_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]
