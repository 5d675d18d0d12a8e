"""Git operations of a tool worker: clones a workspace's source, and keeps its original state for comparisons.

On the tool worker's own machine, only repositories below the operator's configured directories may be cloned.

Holds:
    - Git runs in the node's sandbox, and only with our configuration: no hooks, no helpers, no submodules, and only the
      requested protocol. A clone reads no settings of the repository.
    - A clone reaches one host, by a proxy that checks its addresses (see `egress`); in a confining sandbox there is no
      other way. The host's own messages are not repeated.
    - A password reaches git in its environment, and is offered only to its own host.
    - The original state is kept outside of the workspace, where no program of the workspace can change it.
    - A local path is below such a directory and contains no link, as the kernel resolves it. Nothing below the node's
      own directory can be cloned. For a forbidden path, the answer does not reveal whether the path exists.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

from broker.contract import GitSource, parse_authority, render_authority
from tool_worker.errors import SourceUnusable
from tool_worker.sandbox import BubblewrapSandbox, Enclosure, Sandbox
from tool_worker.workspace.files.file_tree import TreeLimits, measure
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.opening.confined_program import ProgramResult, open_program_egress, run_confined

_REMEDY = (
    "Let the operator name a directory above it in DECKHANDS_REPOSITORY_ROOTS, or upload it as a `git bundle` "
    "(`-w FILE.bundle`)."
)


@dataclass(frozen=True, slots=True)
class RepositoryRoots:
    """The directories below which repositories may be cloned; if empty, no local repository may be cloned."""

    directories: tuple[Path, ...] = ()

    def find_repository(self, url: str, *, node_dir: Path) -> Path:
        """Return the path of the repository, or of the bundle, of a `file://` address. Blocks for some system calls.

        Args:
            node_dir: Directory of this node's workspaces.

        Raises:
            SourceUnusable: The repository may not be cloned, or does not exist.
        """
        parts = urlsplit(url)
        path = Path(parts.path)
        if parts.netloc or parts.query or parts.fragment or ".." in path.parts:
            raise SourceUnusable(
                f"{url} is not the address of a repository on this machine.",
                remedy="Write git+file:///PATH#BRANCH, without a host and without `..`.",
            )
        for root in self.directories:
            for spelling in dict.fromkeys((root, root.resolve())):
                if path.is_relative_to(spelling):
                    return _below(spelling.resolve(), path.relative_to(spelling), url, node_dir.resolve())
        raise SourceUnusable(f"{url} cannot be cloned: this node clones no repository from there.", remedy=_REMEDY)


def to_git_address(path: Path) -> str:
    """Return a git address that means exactly this path: git decodes `%`-escapes itself."""
    return f"file://{quote(str(path))}"


def _below(root: Path, path: Path, url: str, node_dir: Path) -> Path:
    try:
        with Directory(root) as directory:
            descriptor = directory.open(str(path), os.O_PATH, follows_links=False)
    except OSError as error:
        raise SourceUnusable(
            f"{url} cannot be cloned: {error.strerror}.",
            remedy="Check the path; links in it are not followed.",
        ) from error
    try:
        mode = os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)
    found = root / path
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise SourceUnusable(
            f"{url} cannot be cloned: it is neither a directory nor a bundle.", remedy="Name a repository."
        )
    if found.is_relative_to(node_dir) or node_dir.is_relative_to(found):
        raise SourceUnusable(f"{url} cannot be cloned: the workspaces of this node are there.", remedy=_REMEDY)
    return found


CLONE_LIMIT_SECONDS = 600.0
RECORD_LIMIT_SECONDS = 120.0
SCRATCH_LIMIT = TreeLimits(files=400_000, bytes=2 * 2**30)
DEFAULT_USER = "x-access-token"
REACHING_OUT = ("clone", "fetch")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.sshCommand": "/bin/false",
    "core.autocrlf": "false",
    "core.bigFileThreshold": "16m",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "transfer.bundleURI": "false",
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
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "HOME": "/nonexistent",  # where curl looks for passwords
}
# Git's own messages about a server; other lines may quote the server.
_SERVER_MESSAGES = re.compile(
    r"fatal: (unable to access '.*': .*|repository '.*' not found|Authentication failed for '.*'"
    r"|could not read (Username|Password) for '.*'|Remote branch .* not found in upstream .*"
    r"|couldn't find remote ref .*|reference is not a tree: .*|.* not valid: is this a git repository\?)"
)

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


class SandboxedGit:
    """Git in one sandbox."""

    def __init__(self, sandbox: Sandbox, gate: EgressGate | None = None) -> None:
        self._sandbox = sandbox
        self._gate = gate or EgressGate()

    async def clone(
        self,
        source: GitSource,
        directory: Path,
        limits: TreeLimits,
        *,
        password: str = "",
        user: str = "",
        address: str = "",
        local: Path | None = None,
        refs: Sequence[str] = ("refs/*",),
    ) -> str:
        """Clone a repository into an empty directory and return its commit.

        Args:
            user: The name that goes with the password; if empty, the address's own, or the usual one.
            refs: Where a commit is looked for; forges keep unreviewed ones in `refs/pull/*` and the like.
            address: The clone's `origin`; if empty, the source's own address.
            local: The repository, or the bundle, on this machine that the source means.

        Raises:
            SourceUnusable: Git fails, or access to the address is not allowed; the text gives the reason.
            WorkspaceTooLarge: The repository exceeds the limits.
            WorkspaceUnavailable: The clone took too long.
        """
        settings, environment = _make_credentials(source, password, user) if local is None else ({}, {})
        allowed = {"GIT_ALLOW_PROTOCOL": "file" if local is not None else urlsplit(source.url).scheme}
        enclosure = Enclosure(
            directory, str(directory), read_only=() if local is None else (local,), ends_with_starter=True
        )
        run = partial(
            run_confined,
            self._sandbox,
            environment={**_ENVIRONMENT, **allowed, **environment},
            limit_seconds=CLONE_LIMIT_SECONDS,
            look=lambda: measure(directory, limits),
        )
        for step in [
            *_plan_steps(source, local, refs),
            *([["remote", "set-url", "--", "origin", address]] if address else []),
        ]:
            if local is not None or step[0] not in REACHING_OUT:
                ran = await run(enclosure, _make_git_command(*step, **settings))
                reason = ""
            else:
                folder = directory.with_name("way-out")
                async with open_program_egress(
                    self._sandbox, folder, self._gate, [parse_host(source)], name="clone"
                ) as out:
                    seeing = replace(enclosure, read_only=out.read_only)
                    ran = await run(seeing, out.wrap(_make_git_command(*step, **settings, **{"http.proxy": out.proxy})))
                    reason = out.read_last_refusal() or _find_server_reason(ran)
            if ran.code != 0:
                raise SourceUnusable(
                    f"{source.title} cannot be cloned: {(reason or find_reason(ran)).rstrip('.')}.",
                    remedy="Check the address, the ref and whether a secret is needed.",
                )
        await asyncio.to_thread(measure, directory, limits)
        ran = await run(enclosure, _make_git_command("rev-parse", "--quiet", "--verify", "HEAD"))
        return ran.output.decode().strip() if ran.code == 0 else ""  # a repository without commits

    async def record(self, directory: Path, base: Path) -> None:
        """Record the original state of a workspace in the empty directory `base`.

        Raises:
            SourceUnusable: Git fails.
            WorkspaceTooLarge, WorkspaceUnavailable: See `clone`.
        """
        enclosure = Enclosure(base, str(base), read_only=(directory,), ends_with_starter=True)
        environment = {"BASE": str(base), "TREE": str(directory), "GIT_ALLOW_PROTOCOL": "file"}
        ran = await self.run_script(_RECORD, enclosure, environment, scratch=base)
        if ran.code != 0:
            raise SourceUnusable(f"The original state of the workspace cannot be recorded: {find_reason(ran)}")

    async def run_script(
        self,
        script: str,
        enclosure: Enclosure,
        environment: Mapping[str, str],
        *,
        scratch: Path,
        output_limit_bytes: int = 2**20,
        limit_seconds: float = RECORD_LIMIT_SECONDS,
    ) -> ProgramResult:
        """Run a shell script in which git has our settings. Raises the errors of `run_confined`.

        Args:
            scratch: Directory that the script writes to; its size is limited.
        """
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
            limit_seconds=limit_seconds,
            output_limit_bytes=output_limit_bytes,
            look=lambda: measure(scratch, SCRATCH_LIMIT),
        )


async def choose_git_sandbox(demanded: Callable[[], Awaitable[Sandbox]], files: Path) -> Sandbox:
    """Return the sandbox for git: the node's sandbox, or bubblewrap instead of containers if it works here.

    An image may lack git, and a container takes a second to start.
    """
    sandbox = await demanded()
    if not sandbox.capabilities.runs_images:
        return sandbox
    bubblewrap = BubblewrapSandbox(files)
    return sandbox if await asyncio.to_thread(bubblewrap.reason_unavailable) else bubblewrap


def require_git() -> None:
    """Check that git is installed on this machine.

    Raises:
        SourceUnusable: Git is not installed.
    """
    if not is_git_installed():
        raise SourceUnusable("git is not installed on the tool worker's host.", remedy="Install it there.")


def is_git_installed() -> bool:
    """Return whether git is installed on this machine."""
    return shutil.which("git") is not None


def parse_host(source: GitSource) -> str:
    """Return the host and the port that a repository is cloned from.

    Raises:
        SourceUnusable: The address is ambiguous: two parsers could read two different hosts.
    """
    parts = urlsplit(source.url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return render_authority(*parse_authority(render_authority(parts.hostname or "", port)))
    except ValueError as error:
        raise SourceUnusable(
            f"{source.title} cannot be cloned: {error}.",
            remedy="Write the host as a name, as 192.0.2.7, or as [2001:db8::7].",
        ) from error


def _make_credentials(source: GitSource, password: str, user: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings and the environment that give git a password for one server."""
    if not password:
        return {}, {}
    parts = urlsplit(source.url)
    server = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    helper = '!f() { [ "$1" = get ] && printf "username=%s\\npassword=%s\\n" "$CLONE_USER" "$CLONE_PASSWORD"; }; f'
    variables = {"CLONE_USER": user or parts.username or DEFAULT_USER, "CLONE_PASSWORD": password}
    return {f"credential.{server}.helper": helper}, variables


def _plan_steps(source: GitSource, local: Path | None, refs: Sequence[str]) -> list[list[str]]:
    """Return the git commands, in order."""
    depth = [f"--depth={source.depth}"] if source.depth else []
    url = source.url
    if local is not None:
        url = str(local) if local.is_file() else to_git_address(local)  # git accepts no bundle as a `file://` address
    if not _COMMIT.fullmatch(source.ref):
        branch = [f"--branch={source.ref}"] if source.ref else []
        return [["clone", "--quiet", "--template=", *depth, *branch, "--", url, "."]]
    wanted = [f"+{ref}:refs/remotes/origin/{ref.removeprefix('refs/')}" for ref in refs]
    return [
        ["init", "--quiet", "--template="],
        ["remote", "add", "origin", url],
        ["fetch", "--quiet", *depth, "origin", *([source.ref] if depth else wanted)],
        ["checkout", "--quiet", "--detach", source.ref],
    ]


def _make_git_command(*arguments: str, **settings: str) -> list[str]:
    """Return a git command line with our settings and the given ones."""
    chosen = _SETTINGS | settings
    return [
        "/usr/bin/env",
        "git",
        *(word for name, value in chosen.items() for word in ("-c", f"{name}={value}")),
        *arguments,
    ]


def _find_server_reason(ran: ProgramResult) -> str:
    """Return git's own message about a server, without the server's messages."""
    message = next((line for line in ran.complaint.splitlines() if _SERVER_MESSAGES.fullmatch(line)), "")
    return message[:500] or f"git ended with exit code {ran.code}; what the server answered is not repeated here"


def find_reason(ran: ProgramResult) -> str:
    """Return git's own reason for its failure."""
    lines = [line for line in ran.complaint.splitlines() if line.strip()]
    notifying = [line for line in lines if line.startswith(("fatal:", "error:", "remote:"))]
    return " ".join(notifying or lines[-3:])[:1_000] or f"git ended with exit code {ran.code}."
