"""A small machine with every directory that no workspace may use: our home, a store, keys, another tenant's workspace.

<world>/home/                       DECKHANDS_HOME: secret.key, cluster/valkey with a live socket
<world>/node/neighbour/             another tenant's workspace, and the live socket of its host
<world>/checkpoints/neighbour       its saved files
<world>/outside/                    files of a user that are below no root
<world>/roots/                      the operator's roots, with traps in it; `good` is a valid one
<world>/mounts/                     a second root, in which directories are mounted
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.integration.workspace_hosts import Terminal
from tool_worker.sandbox.sandbox import find_interpreter

CANARY = "canary-of-a-neighbour"
IS_ROOT = os.getuid() == 0

# Runs in a workspace: lists everything outside it that it can read, enter, write or connect to.
PROBE = """
import json, os, socket, stat, sys
known = json.loads(sys.argv[1])
found = []
def look(path):
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode) and os.path.getsize(path) < 100_000:
            if known["canary"].encode() in open(path, "rb").read():
                found.append("read " + path)
        elif stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                found.append("connected to " + path)
    except OSError:
        pass
for path in known["files"]:
    look(path)
for folder in known["folders"]:
    try:
        open(os.path.join(folder, "written-from-inside"), "w").close()
        found.append("wrote " + folder)
    except OSError:
        pass
skipped = {"/proc", "/sys", "/usr", "/dev", "/lib", "/lib64", "/bin", "/sbin", sys.base_prefix}
for folder, names, files in os.walk("/"):
    names[:] = [name for name in names if os.path.join(folder, name) not in skipped]
    for name in (*files, *names):
        path = os.path.join(folder, name)
        look(path)
        if os.path.islink(path):
            for inner in ("secret.key", "file", "etc/shadow", "password"):
                look(os.path.join(path, inner))
print(json.dumps(sorted(set(found))))
"""


class World:
    """The machine, while its block lasts."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.home, self.node, self.checkpoints = top / "home", top / "node", top / "checkpoints"
        self.outside, self.roots, self.mounts = top / "outside", top / "roots", top / "mounts"
        self.store = self.home / "cluster" / "valkey"
        self.neighbour = self.node / "neighbour"
        self.environment = {
            "DECKHANDS_HOME": str(self.home),
            "DECKHANDS_NODE_DIR": str(self.node),
            "DECKHANDS_URL": f"unix://{self.store}/valkey.sock",
            "DECKHANDS_CHECKPOINTS": f"file://{self.checkpoints}",
            "DECKHANDS_WORKSPACE_ROOTS": f"{self.roots}:{self.mounts}",
        }

    @property
    def files(self) -> list[Path]:
        """Return the files that must not be read or connected to."""
        return [
            self.home / "secret.key",
            self.store / "password",
            self.store / "valkey.sock",
            self.neighbour / "workspace" / "file",
            self.neighbour / "host" / "journal",
            self.neighbour / "host" / "socket",
            self.checkpoints / "neighbour",
            self.outside / "file",
        ]

    async def reached_from(self, run: Terminal, *, own: Path | None = None) -> list[str]:
        """Return the files and sockets that a program in a workspace reaches.

        Args:
            own: a directory of this machine that it was given, and may read and change.
        """
        given = [path for path in self.files if own is not None and path.is_relative_to(own)]
        files = [str(path) for path in self.files if path not in given]
        folders = [str(path.parent) for path in self.files if path not in given]
        known = json.dumps({"canary": CANARY, "files": files, "folders": folders})
        command = f"{find_interpreter()} -I -S - {shlex.quote(known)} <<'END'\n{PROBE}\nEND"
        answer = await run(command, blocking=True, timeout=60)
        assert answer.exit_code == 0, answer.content
        found: list[str] = json.loads(answer.content)
        return [text for text in found if text not in {f"read {path}" for path in given}]


@contextmanager
def world() -> Iterator[World]:
    """Build the machine; at the end all of it goes."""
    # Short: a unix socket's path has 107 bytes at most.
    top = Path(tempfile.mkdtemp(prefix="deck-")).resolve()
    made = World(top)
    with ExitStack() as closing:
        closing.callback(shutil.rmtree, top, ignore_errors=True)
        _fill(made, closing)
        yield made


def _fill(made: World, closing: ExitStack) -> None:
    top = made.top
    for path in made.files:
        path.parent.mkdir(parents=True, exist_ok=True)
        if "sock" in path.name:
            listener = closing.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
        else:
            path.write_text(CANARY)
    good = made.roots / "good"
    (good / "inner").mkdir(parents=True)
    links = {
        "link": made.home,
        "relative-link": Path("../home"),
        "chain": Path("chain-2"),
        "chain-2": Path("chain-3"),
        "chain-3": made.home,
        "to-top": top,
        "to-root": Path("/"),
        "to-etc": Path("/etc"),
        "to-node": made.node,
        "to-neighbour": made.neighbour / "workspace",
        "to-good": good,
        "loop": Path("loop"),
        "through-proc": Path(f"/proc/self/root{made.home}"),
        "dangling": Path("nothing"),
    }
    for name, target in links.items():
        (made.roots / name).symlink_to(target)
    # Links in a workspace may point anywhere: in the sandbox they lead nowhere.
    for name in ("link", "to-root", "to-node", "to-neighbour"):
        (good / name).symlink_to(links[name])
    for name in ("new\nline", "tab\there", "escape\x1b[31m", "-rf", "with space", "with:colon", "üñí", "..."):
        (made.roots / name).mkdir()
    (made.roots / os.fsdecode(b"bytes-\xff")).mkdir()
    (made.roots / "file").write_text("no directory")
    (made.roots / "hard-link").hardlink_to(made.roots / "file")
    os.mkfifo(made.roots / "fifo")
    shutil.copytree(good, top / "roots-beside", symlinks=True)
    deep = made.roots / ("d" * 200)
    for _ in range(12):
        deep = deep / ("d" * 200)
    deep.mkdir(parents=True)
    for name, mode in (("somebodys", 0o700), ("everybodys", 0o755)):
        (made.roots / name).mkdir()
        if IS_ROOT:
            os.chown(made.roots / name, 4321, 4321)
        (made.roots / name).chmod(mode)
    if IS_ROOT:
        os.mknod(made.roots / "device", 0o600 | 0o020000, os.makedev(1, 3))
    made.mounts.mkdir()


@contextmanager
def mounted(made: World) -> Iterator[None]:
    """Mount directories in the second root; only root can."""
    mounts = {
        "home": made.home,
        "node": made.node,
        "part-of-node": made.neighbour / "workspace",
        "etc": Path("/etc"),
        "slash": Path("/"),
        "proc": Path("/proc"),
        "top": made.top / "home",
        "around/home": made.home,
        "around-part/file": made.neighbour / "host",
        "around-slash/deep/root": Path("/"),
        "again": made.roots / "good",
    }
    with ExitStack() as closing:
        for name, source in mounts.items():
            target = made.mounts / name
            target.mkdir(parents=True)
            subprocess.run(["mount", "--bind", source, target], check=True)
            closing.callback(subprocess.run, ["umount", "--lazy", target], check=True)
        fresh = made.mounts / "fresh"
        fresh.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", fresh], check=True)
        closing.callback(subprocess.run, ["umount", "--lazy", fresh], check=True)
        yield
