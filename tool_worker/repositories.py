"""Git, as a tool worker uses it: to clone what a workspace begins with, and to say what was changed since.

Holds:
    - Git runs in the node's sandbox, with a configuration of ours alone: no hooks, no helpers, no submodules, and no
      protocol but the one that was asked for. Of a repository's own settings none is read while anything is cloned.
    - A password reaches git in its environment, and is offered to the one host that it is for.
    - What a workspace began with is kept outside of it, where no program of the workspace can change it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from broker.workspace_sources import GitSource
from tool_worker.confined import Ran, run_confined
from tool_worker.drafts import drafting_in
from tool_worker.file_tree import TreeLimits, measure
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Enclosure, Sandbox
from tool_worker.workspace_errors import SourceUnusable

CLONE_LIMIT_SECONDS = 600.0
DIFF_LIMIT_SECONDS = 120.0
SCRATCH_LIMIT = TreeLimits(files=400_000, bytes=2 * 2**30)
DEFAULT_USER = "x-access-token"
_COMMIT = re.compile(r"[0-9a-f]{40}")

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.bigFileThreshold": "16m",
    "submodule.recurse": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "advice.detachedHead": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "http.followRedirects": "false",
    "credential.helper": "",
}
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "/bin/false",
    "GIT_LFS_SKIP_SMUDGE": "1",
}

_RECORD = """
set -e
git init --quiet --bare --template= "$BASE"
if [ -e "$TREE/.git" ] && git -C "$TREE" rev-parse --quiet --verify HEAD >/dev/null; then
    git --git-dir="$BASE" fetch --quiet --depth=1 --no-tags "file://$TREE" HEAD
    tree=$(git --git-dir="$BASE" rev-parse 'FETCH_HEAD^{tree}')
else
    git --git-dir="$BASE" --work-tree="$TREE" add --all --force "$TREE"
    tree=$(git --git-dir="$BASE" write-tree)
fi
git --git-dir="$BASE" update-ref refs/deckhands/base "$tree"
"""

_COMPARE = """
set -e
git init --quiet --bare --template= repository
export GIT_DIR="$PWD/repository" GIT_INDEX_FILE="$PWD/index" GIT_WORK_TREE="$TREE"
if [ -n "$BASE" ]; then
    tree=$(git --git-dir="$BASE" rev-parse --verify refs/deckhands/base)
    export GIT_ALTERNATE_OBJECT_DIRECTORIES="$BASE/objects"
else
    tree=$(git hash-object -t tree -w /dev/null)
fi
cd "$TREE"
git read-tree "$tree"
git add --all --ignore-errors . 2>/dev/null || true
exec git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color "$tree"
"""


class Repositories:
    """Git in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def clone(
        self, source: GitSource, directory: Path, limits: TreeLimits, *, password: str = "", address: str = ""
    ) -> str:
        """Clone a repository, or a bundle on this machine, into an empty directory and return the commit it is at.

        Args:
            address: what the clone calls its origin; the source's own if empty.

        Raises:
            SourceUnusable: git says no; the text says why.
            WorkspaceTooLarge: it is larger than the limits.
            WorkspaceUnavailable: it took too long.
        """
        parts = urlsplit(source.url)
        steps = _steps(source)
        if address:
            steps.append(["remote", "set-url", "origin", address])
        settings: dict[str, str] = {}
        environment = {"GIT_ALLOW_PROTOCOL": "http:https" if parts.scheme == "http" else parts.scheme}
        if password:
            server = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
            settings[f"credential.{server}.helper"] = (
                '!f() { [ "$1" = get ] && printf "username=%s\\npassword=%s\\n" "$CLONE_USER" "$CLONE_PASSWORD"; }; f'
            )
            environment |= {"CLONE_USER": parts.username or DEFAULT_USER, "CLONE_PASSWORD": password}
        enclosure = Enclosure(
            directory,
            str(directory),
            has_network=parts.scheme != "file",
            read_only=(Path(parts.path),) if parts.scheme == "file" else (),
            ends_with_starter=True,
        )
        for step in steps:
            ran = await run_confined(
                self._sandbox,
                enclosure,
                _git(*step, **settings),
                environment={**_ENVIRONMENT, **environment},
                limit_seconds=CLONE_LIMIT_SECONDS,
                look=lambda: measure(directory, limits),
            )
            if ran.code != 0:
                raise SourceUnusable(
                    f"{source.title} cannot be cloned: {_reason(ran).rstrip('.')}.",
                    remedy="Check the address, the ref and whether a secret is needed.",
                )
        await asyncio.to_thread(measure, directory, limits)
        ran = await run_confined(
            self._sandbox,
            enclosure,
            _git("rev-parse", "--quiet", "--verify", "HEAD"),
            environment=_ENVIRONMENT,
            limit_seconds=DIFF_LIMIT_SECONDS,
        )
        return ran.output.decode().strip() if ran.code == 0 else ""  # a repository without a commit

    async def record(self, directory: Path, base: Path) -> None:
        """Keep what a workspace begins with in the empty directory `base`.

        Raises:
            SourceUnusable: git says no.
            WorkspaceTooLarge, WorkspaceUnavailable: see `clone`.
        """
        enclosure = Enclosure(base, str(base), read_only=(directory,), ends_with_starter=True)
        environment = {"BASE": str(base), "TREE": str(directory), "GIT_ALLOW_PROTOCOL": "file"}
        ran = await self._script(_RECORD, enclosure, environment, scratch=base)
        if ran.code != 0:
            raise SourceUnusable(f"What the workspace begins with cannot be recorded: {_reason(ran)}")

    async def difference(self, directory: Path, base: Path | None, *, limit_bytes: int) -> bytes:
        """Return what was changed since, as a patch for `git apply`; ignored files are left out.

        Args:
            base: where `record` has kept the beginning; None: there was nothing.

        Raises:
            SourceUnusable: git says no.
            WorkspaceTooLarge, WorkspaceUnavailable: the patch is too large, or took too long.
        """
        async with drafting_in(directory.parent) as scratch:
            read_only = (directory,) if base is None else (directory, base)
            enclosure = Enclosure(scratch, str(scratch), read_only=read_only, ends_with_starter=True)
            environment = {"BASE": "" if base is None else str(base), "TREE": str(directory)}
            ran = await self._script(_COMPARE, enclosure, environment, scratch=scratch, output_limit_bytes=limit_bytes)
        if ran.code != 0:
            raise SourceUnusable(f"What was changed cannot be told: {_reason(ran)}")
        return ran.output

    async def _script(
        self,
        script: str,
        enclosure: Enclosure,
        environment: Mapping[str, str],
        *,
        scratch: Path,
        output_limit_bytes: int = 2**20,
    ) -> Ran:
        settings = {
            "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
            **{f"GIT_CONFIG_KEY_{n}": name for n, name in enumerate(_SETTINGS)},
            **{f"GIT_CONFIG_VALUE_{n}": value for n, value in enumerate(_SETTINGS.values())},
        }
        return await run_confined(
            self._sandbox,
            enclosure,
            ["/bin/sh", "-c", script],
            environment={**_ENVIRONMENT, **settings, **environment},
            limit_seconds=DIFF_LIMIT_SECONDS,
            output_limit_bytes=output_limit_bytes,
            look=lambda: measure(scratch, SCRATCH_LIMIT),
        )


async def sandbox_of_git(demanded: Callable[[], Awaitable[Sandbox]], files: Path) -> Sandbox:
    """Return what git runs in: what the node demands, but bubblewrap in the place of containers if it works.

    An image need not have a git, and a container takes a second to start.
    """
    sandbox = await demanded()
    if sandbox.inherits_descriptors:
        return sandbox
    bubblewrap = BubblewrapSandbox(files)
    return sandbox if await asyncio.to_thread(bubblewrap.reason_unavailable) else bubblewrap


def require_git() -> None:
    """See to it that there is a git on this machine.

    Raises:
        SourceUnusable: there is none.
    """
    if not is_installed():
        raise SourceUnusable("git is not installed on the tool worker's host.", remedy="Install it there.")


def is_installed() -> bool:
    """Say whether there is a git on this machine."""
    return shutil.which("git") is not None


def _steps(source: GitSource) -> list[list[str]]:
    """Return what git is told, one call after the other.

    Raises:
        SourceUnusable: what is to be cloned would be here, and is not.
    """
    depth = [f"--depth={source.depth}"] if source.depth else []
    parts = urlsplit(source.url)
    url = source.url
    if parts.scheme == "file":
        if not Path(parts.path).exists():
            raise SourceUnusable(f"{parts.path} cannot be cloned: it is not on the tool worker's host.")
        if Path(parts.path).is_file():
            url = parts.path  # a bundle; behind `file://` git expects a repository
    if not _COMMIT.fullmatch(source.ref):
        branch = [f"--branch={source.ref}"] if source.ref else []
        return [["clone", "--quiet", "--template=", *depth, *branch, "--", url, "."]]
    return [
        ["init", "--quiet", "--template="],
        ["remote", "add", "origin", url],
        ["fetch", "--quiet", *depth, "origin", *([source.ref] if depth else ["+refs/*:refs/remotes/origin/*"])],
        ["checkout", "--quiet", "--detach", source.ref],
    ]


def _git(*arguments: str, **settings: str) -> list[str]:
    """Return a command line of git with our settings and those given."""
    chosen = _SETTINGS | settings
    return [
        "/usr/bin/env",
        "git",
        *(word for name, value in chosen.items() for word in ("-c", f"{name}={value}")),
        *arguments,
    ]


def _reason(ran: Ran) -> str:
    lines = [line for line in ran.complaint.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("fatal:", "error:", "remote:"))]
    return " ".join(telling or lines[-3:])[:1_000] or f"git ended with exit code {ran.code}."
