"""A workspace may be requested in any directory. Either it is refused, or it contains no files of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from broker.runtime.errors import DeckhandsError, UsageError
from broker.runtime.settings import join_paths
from broker.secrets.secrets import load_key_file
from deckhands.client.named_directory import resolve_local_directory
from tests.integration.workspace_hosts import Terminal, opened
from tests.security.directory_world import IS_ROOT, World, mounted, world
from tool_worker.errors import WorkspaceRefused
from tool_worker.sandbox.sandbox import find_interpreter
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.bindings import read_or_create_identity
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.workspaces import Workspaces

BOUND = "bound, and nothing is reached"
ONE_DOT, WIDE_STOP = "\u2024", "\uff0e"
SYSTEM = (
    *("/", "//", "/.", "/etc", "/etc/", "/etc/ssl", "/usr", "/usr/lib", "/usr/local", "/var", "/var/lib", "/var/log"),
    *("/var/tmp", "/proc", "/proc/1", "/proc/self", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/run", "/boot"),
    *("/bin", "/lib", "/sbin", "/root", "/home", "/tmp", "/opt", "/srv", "/mnt", "/media"),
)
OURS = (
    *("home", "home/", "home/cluster", "home/cluster/valkey", "home/secret.key", "home/cluster/valkey/valkey.sock"),
    *("node", "node/neighbour", "node/neighbour/workspace", "node/neighbour/host", "node/new/workspace"),
    *("checkpoints", "checkpoints/neighbour"),
)
BELOW_ROOTS = {
    "roots": BOUND,  # with all its traps: none leads anywhere from inside
    **dict.fromkeys(("roots/good", "roots/good/", "roots//good", "roots/./good/.", "roots/good/inner"), BOUND),
    **dict.fromkeys(
        ("roots/with space", "roots/with:colon", "roots/-rf", "roots/üñí", "roots/...", "roots/everybodys"), BOUND
    ),
    **{
        f"roots/{name}": "refused"
        for name in (
            *("link", "link/cluster", "relative-link", "chain", "chain-2", "chain-3", "to-top", "to-top/home"),
            *("to-root", "to-root/etc", "to-etc", "to-node", "to-neighbour", "to-good", "to-good/inner", "loop"),
            *("through-proc", "dangling", "good/link", "good/to-root", "good/to-root/etc", "good/to-neighbour"),
            *("../home", "../roots/good", "good/../../home", "good/..", "..", "good/../good", "%2e%2e/home"),
            *("new\nline", "tab\there", "escape\x1b[31m", "good\0", "good\0/../../home", "good\n", "\u2028good"),
            *(f"{ONE_DOT * 2}/home", f"{WIDE_STOP * 2}/home", "good\u2215..", "GOOD", "goo\u0501", "missing"),
            *("missing/deeper", "file"),
            *("file/", "hard-link", "fifo", "x" * 256, "x/" * 3_000, "/".join(["d" * 200] * 25), "bytes-\udcff"),
            *("*", "~", "$HOME", "good;ls", "good/link/../.."),
        )
    },
}
ELSEWHERE = (
    *("outside", "roots-beside", "roots-beside/inner", "ROOTS/good", "root", "", "roots/../outside"),
    *("proc/self/root", "nowhere"),
)
RELATIVE = ("", " ", ".", "..", "good", "./good", "~", "~root", "-", "roots/good", "file:///etc", "C:\\", "\0", "\n")
MOUNTED = {
    **dict.fromkeys(("mounts/home", "mounts/node", "mounts/part-of-node", "mounts/etc", "mounts/slash"), "refused"),
    **dict.fromkeys(
        ("mounts/slash/tmp", "mounts/proc", "mounts/top", "mounts/top/cluster", "mounts/around"), "refused"
    ),
    **dict.fromkeys(("mounts/around/home", "mounts/around-part", "mounts/around-slash/deep", "mounts/"), "refused"),
    "mounts/again": BOUND,
    "mounts/fresh": BOUND,
}


def asked_for(made: World, waiting: subprocess.Popen[bytes], descriptor: int) -> dict[str, str]:
    """Return the requested directories, with the expected outcomes."""
    top, pid = made.top, waiting.pid
    cases = dict.fromkeys(SYSTEM, "refused")
    cases |= {f"{top}/{name}": "refused" for name in (*OURS, *ELSEWHERE)}
    cases |= {f"{top}/{name}": expected for name, expected in BELOW_ROOTS.items()}
    cases |= dict.fromkeys(RELATIVE, "refused")
    for around in (f"/proc/self/root{top}", f"/proc/{pid}/root{top}", f"/proc/{os.getpid()}/root{top}"):
        cases |= dict.fromkeys((f"{around}/roots/good", f"{around}/home", around), "refused")
    cases |= dict.fromkeys(
        (f"/proc/{pid}/cwd", "/proc/self/cwd", f"/proc/self/fd/{descriptor}", f"/dev/fd/{descriptor}"), "refused"
    )
    cases |= dict.fromkeys((f"/{top}/roots/good", f"{top}/roots/good " + "x" * 70_000), "refused")
    cases[f"//{top}/roots/good"] = BOUND  # three slashes are one, two are not (POSIX)
    cases[f"{top}/roots/" + "/".join(["d" * 200] * 13)] = BOUND
    if IS_ROOT:
        cases |= {f"{top}/{name}": expected for name, expected in MOUNTED.items()}
        cases |= dict.fromkeys((f"{top}/roots/somebodys", f"{top}/roots/device"), "refused")
    return cases


def is_clear(error: DeckhandsError) -> bool:
    """Return whether an error is of the right kind, names a remedy, and is one line of bounded length."""
    is_typed = error.code in ("workspace_refused", "workspace_lost")
    return is_typed and bool(error.remedy) and str(error).isprintable() and len(str(error)) < 1_000


async def outcome(made: World, workspaces: Workspaces, conversation_id: str, path: str) -> str:
    """Ask for a directory as a conversation does, and return the outcome."""
    try:
        run = Terminal(await workspaces.open(conversation_id, WorkspaceSpec(path=path)))
        own = Path(path).resolve() if Path(path).is_absolute() else None
        return ", ".join(await made.reached_from(run, own=own)) or BOUND
    except DeckhandsError as error:
        return "refused" if is_clear(error) or path.endswith("somebodys") else f"refused badly: {error!r}"
    finally:
        await workspaces.close(conversation_id)
        # So that each case is the first to name its directory.
        subprocess.run(["rm", "-rf", made.node / conversation_id], check=True)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Return the expected and the actual outcome of each directory, on a node with roots."""
    with world() as made, ExitStack() as closing:
        if IS_ROOT:
            closing.enter_context(mounted(made))
        waiting = closing.enter_context(
            subprocess.Popen([find_interpreter(), "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, cwd=made.outside)
        )
        descriptor = os.open(made.roots / "good", os.O_RDONLY | os.O_DIRECTORY)
        closing.callback(os.close, descriptor)
        cases = asked_for(made, waiting, descriptor)
        named = load_tool_settings(made.environment).named

        async def every() -> dict[str, str]:
            async with opened(made.node, sandbox="bwrap", named=named) as workspaces:
                return {
                    path: await outcome(made, workspaces, f"case-{number}", path) for number, path in enumerate(cases)
                }

        found = asyncio.run(every())
        waiting.communicate(b"\n", timeout=10)
        shortened = {path: path.replace(str(made.top), "<world>") for path in cases}
        yield (
            {shortened[path]: expected for path, expected in cases.items()},
            {shortened[path]: came for path, came in found.items()},
        )


def test_no_directory_leads_to_what_is_somebody_elses(outcomes: tuple[dict[str, str], dict[str, str]]) -> None:
    expected, found = outcomes
    assert {path: came for path, came in found.items() if came != expected[path]} == {}
    assert len(found) >= 150 + 12 * IS_ROOT
    assert sum(came == BOUND for came in found.values()) >= 12


async def test_the_probe_finds_what_a_careless_node_gives_away(tmp_path: Path) -> None:
    with world() as made:
        careless = NamedDirectories([made.top])
        async with opened(tmp_path / "node", sandbox="bwrap", named=careless) as workspaces:
            run = Terminal(await workspaces.open("careless", WorkspaceSpec(path=str(made.top))))
            found = await made.reached_from(run)
    expected = [("connected to" if "sock" in path.name else "read", path) for path in made.files]
    assert {f"{verb} {path}" for verb, path in expected} <= set(found)
    assert {f"wrote {path.parent}" for path in made.files} <= set(found)


def test_lookalikes_are_what_they_seem() -> None:
    assert unicodedata.normalize("NFKC", f"{ONE_DOT}{WIDE_STOP}") == ".."


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
async def test_without_roots_no_directory_is_taken(tmp_path: Path, sandbox: str) -> None:
    (tmp_path / "project").mkdir()
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        for path in (tmp_path / "project", tmp_path, "/etc", "/var/log", "/usr/local"):
            with pytest.raises(WorkspaceRefused, match="it is below none of this node's workspace roots; it has none"):
                await workspaces.open("conversation", WorkspaceSpec(path=str(path)))
        assert (await Terminal(await workspaces.open("conversation"))("echo served")).content == "served"


PERSONS = {
    **dict.fromkeys(("outside", "roots/good", "roots/to-good", "roots/good/../good", "roots/with:colon"), True),
    **dict.fromkeys(("", "home", "home/cluster", "home/new", "node", "node/neighbour/workspace"), False),
    **dict.fromkeys(("node/neighbour/host", "checkpoints", "roots/link", "roots/chain", "roots/relative-link"), False),
    **dict.fromkeys(("roots/to-top", "roots/to-root", "roots/to-etc", "roots/to-node", "roots/to-neighbour"), False),
    **dict.fromkeys(("roots/through-proc", "roots/good/../../home", "roots/loop", "roots/dangling"), False),
    **dict.fromkeys(("roots/file", "roots/fifo", "roots/new\nline", "roots/missing"), False),
}


async def test_person_may_name_only_directories_of_theirs() -> None:
    with world() as made:
        (made.home / "new").mkdir()
        for path in {*SYSTEM} - {str(Path.home())}:
            with pytest.raises(UsageError, match=r"may not be a workspace|cannot be used|does not exist"):
                resolve_local_directory(Path(path), made.environment)
        for name, is_taken in PERSONS.items():
            path = made.top / name
            if not is_taken:
                with pytest.raises(UsageError, match=r"may not be a workspace|cannot be used|is not a dir|not exist"):
                    resolve_local_directory(path, made.environment)
                continue
            directory = resolve_local_directory(path, made.environment)
            environment = {**made.environment, "DECKHANDS_WORKSPACE_ROOTS": join_paths([directory])}
            named = load_tool_settings(environment).named
            async with opened(made.node, sandbox="bwrap", named=named) as workspaces:
                assert await outcome(made, workspaces, "persons", str(directory)) == BOUND


@pytest.mark.parametrize("way", ["home", "link to the home", "link around the home", "home is a link in it"])
def test_where_the_home_lies_is_no_secret_of_a_link(tmp_path: Path, way: str) -> None:
    person, real = tmp_path / "person", tmp_path / "real"
    for path in (person, real):
        path.mkdir()
    home, named = person / ".deckhands", person
    if way == "link to the home":
        named = tmp_path / "link"
        named.symlink_to(person)
    elif way == "link around the home":
        (tmp_path / "around").symlink_to(person)
        home = tmp_path / "around" / ".deckhands"
    elif way == "home is a link in it":
        home.symlink_to(real)  # an agent could put another home in the place of the link
    home.resolve().mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=f"may not be a workspace: it holds {home}, which is Deckhands' own"):
        resolve_local_directory(named, {"DECKHANDS_HOME": str(home)})


@pytest.mark.parametrize("root", ["/", "/etc", "/usr/share", "relative", "/nowhere/at/all", "/etc/passwd", "/var/lib"])
def test_roots_that_cannot_be_used_are_named(root: str) -> None:
    with pytest.raises(UsageError, match=f"The workspace root {root} cannot be used"):
        load_tool_settings({"DECKHANDS_WORKSPACE_ROOTS": root})


def test_roots_are_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "with:colon").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "with:colon")
    roots = join_paths([tmp_path / "link", tmp_path / "with:colon", tmp_path])
    assert load_tool_settings({"DECKHANDS_WORKSPACE_ROOTS": roots}).named.roots == (
        tmp_path / "with:colon",
        tmp_path / "with:colon",
        tmp_path,
    )


def installation(path: Path) -> Path:
    """A home of Deckhands with a store in it, as another user or another DECKHANDS_HOME has one."""
    (path / "cluster" / "valkey").mkdir(parents=True)
    load_key_file(path / "secret.key", is_made=True)
    for name in ("server.lock", "password"):
        (path / "cluster" / "valkey" / name).touch(mode=0o600)
    return path


@pytest.mark.parametrize("kind", ["home", "store", "node", "keys"])
def test_other_installations_are_recognised(tmp_path: Path, kind: str) -> None:
    mine, project = tmp_path / "mine", tmp_path / "project"
    mine.mkdir()
    (project / "src" / "deep" / "er").mkdir(parents=True)
    theirs = project / "src" / "theirs"
    theirs.mkdir()
    if kind == "home":
        installation(theirs)
    elif kind == "store":
        for name in ("server.lock", "password"):
            (theirs / name).touch(mode=0o600)
    elif kind == "node":
        read_or_create_identity(theirs)
    else:
        (theirs / "server.key").touch(mode=0o600)
        (theirs / "server.key").write_text(f"dh_{'a' * 12}_{'b' * 43}\n")
    (theirs / "below" / "it").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(theirs)
    environment = {"DECKHANDS_HOME": str(mine), "DECKHANDS_WORKSPACE_ROOTS": str(tmp_path)}
    named = load_tool_settings(environment).named
    for path in (theirs, theirs / "below", theirs / "below" / "it", project, project / "src", link, link / "below"):
        with pytest.raises(
            UsageError, match=r"may not be a workspace: it (is a part of|holds) .* directory of Deckhands"
        ):
            resolve_local_directory(path, environment)
        with pytest.raises(WorkspaceRefused, match=r"directory of Deckhands|symbolic link"):
            named.open(str(path))
    named.open(str(project / "src" / "deep")).close()
    assert resolve_local_directory(project / "src" / "deep", environment) == project / "src" / "deep"


@pytest.mark.skipif(not IS_ROOT, reason="only root may mount")
def test_other_installation_is_recognised_through_a_mount(tmp_path: Path) -> None:
    theirs = installation(tmp_path / "theirs")
    (theirs / "workspace").mkdir()
    shown = tmp_path / "shown"
    shown.mkdir()
    environment = {"DECKHANDS_HOME": str(tmp_path / "mine"), "DECKHANDS_WORKSPACE_ROOTS": str(tmp_path)}
    for source in (theirs, theirs / "workspace"):
        subprocess.run(["mount", "--bind", source, shown], check=True)
        try:
            with pytest.raises(WorkspaceRefused, match="directory of Deckhands"):
                load_tool_settings(environment).named.open(str(shown))
        finally:
            subprocess.run(["umount", shown], check=True)


def test_a_file_of_another_user_closes_no_directory(tmp_path: Path) -> None:
    project, shared = tmp_path / "project", tmp_path / "shared"
    for path in (project, shared / "below"):
        path.mkdir(parents=True)
    (project / "secret.key").write_text("of the project")
    (project / "secret.key").chmod(0o644)
    (project / "cluster" / "valkey").mkdir(parents=True)
    shared.chmod(0o1777)
    load_key_file(shared / "secret.key", is_made=True)
    environment = {"DECKHANDS_HOME": str(tmp_path / "mine")}
    assert resolve_local_directory(project, environment) == project
    assert resolve_local_directory(shared / "below", environment) == shared / "below"
