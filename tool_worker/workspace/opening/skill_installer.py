"""Installs the skills that a task names in its workspace: from a Git repository, an archive or a folder.

    <node directory>/.skills/<hash of source, pin and credential>.tar  the checked skills of a source, then a digest
    <workspace>/.agents/skills/NAME/                       a skill, with a .gitignore that hides it from Git

Holds:
    - A source is fetched only if the operator's rules allow it to the tenant, and then only its pinned content counts.
    - An address is reached through the egress proxy, which checks the host and its addresses. Redirects are not
      followed.
    - Only regular files of folders with a `SKILL.md` are installed, each skill atomically, and none through a link. A
      folder that exists in the workspace is never replaced.
    - A private place gets the operator's credential, and what it served is for tenants with that credential alone.
    - Size, number and time are limited. A killed worker leaves nothing that counts.
Untrusted: the source that a task names, all content of a source before its digest is known, and the workspace.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import tarfile
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from broker.contract import (
    SKILL_FOLDERS,
    GitSource,
    SkillSource,
    SkillSourceRule,
    check_skill_folder,
    find_skill_folders,
    find_skill_name,
    parse_host_rules,
    parse_skill_source,
)
from broker.runtime import AddressRules, DeckhandsError, failpoint
from tool_worker.errors import SkillsUnavailable
from tool_worker.sandbox import Sandbox
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.files.file_tree import FILE, TreeLimits, iter_entries
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.staging import create_staging_async
from tool_worker.workspace.files.unpacking import Unpacking
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.opening.repositories import SandboxedGit, require_git
from tool_worker.workspace.opening.skill_credentials import SkillCredential, choose_credential

CACHE = ".skills"
MAX_CACHED = 64
"""Sources in the cache of a node; the one that was used least recently is removed."""
MAX_FILES = 500
MAX_BYTES = 16 * 2**20
"""Of the skills of one source."""
MAX_ARCHIVE_BYTES = 64 * 2**20
TREE_LIMITS = TreeLimits(files=50_000, bytes=256 * 2**20)
"""Of an unpacked archive, or of a repository with its history."""
INSTALL_LIMITS = TreeLimits(files=10 * MAX_FILES, bytes=2 * MAX_BYTES)
DOWNLOAD_SECONDS = 120.0
REVIEWED = ("refs/heads/*", "refs/tags/*")
"""Without the requests of strangers, which forges keep in the same repository."""
INSTALLED = SKILL_FOLDERS[-1]
DRAFT = ".new-"
DIGEST_BYTES = 32
IGNORE_ALL = b"*\n"
SETTING = "The operator of the tool workers names places in DECKHANDS_SKILL_SOURCES."
Tree = Mapping[str, tuple[bytes, bool]]
"""Files by their paths: the content, and whether it can be executed."""


class SkillInstaller:
    """Installs skills in the workspaces of one node.

    Args:
        root: Directory of the node's workspaces.
        sandbox: Returns the sandbox for Git.
        rules: What tasks may name; none: nothing.
        bindings: Opens the workspaces' directories.
        gate: Network access of this node.
        credentials: For private places.
    """

    def __init__(
        self,
        root: Path,
        sandbox: Callable[[], Awaitable[Sandbox]],
        rules: Sequence[SkillSourceRule],
        bindings: Bindings,
        *,
        gate: EgressGate | None = None,
        credentials: Sequence[SkillCredential] = (),
    ) -> None:
        self._root = root.absolute()
        self._cache = self._root / CACHE
        self._sandbox = sandbox
        self._rules = tuple(rules)
        self._bindings = bindings
        self._gate = gate or EgressGate()
        self._credentials = tuple(credentials)
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def install(self, conversation_id: str, sources: Iterable[str], tenant: str) -> tuple[str, ...]:
        """Install skills in an open workspace, and return why some are left out, as sentences. Idempotent.

        Raises:
            SkillsUnavailable: A source is not allowed, cannot be fetched, has other content than its pin, or has no
                usable skill.
        """
        notices: list[str] = []
        for text in sources:
            try:
                source = parse_skill_source(text)
            except ValueError as error:
                raise SkillsUnavailable(f"The skills of the task cannot be used: {error}.") from error
            try:
                content = await self._load(source, self._find_rule(source, tenant), tenant)
                notices += await asyncio.to_thread(self._place, conversation_id, content)
            except SkillsUnavailable:
                raise
            except DeckhandsError as error:
                raise SkillsUnavailable(f"The skills of {source.address} cannot be used: {error}") from error
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise SkillsUnavailable(f"The skills of {source.address} cannot be used: {reason}.") from error
        return tuple(notices)

    def _find_rule(self, source: SkillSource, tenant: str) -> SkillSourceRule:
        found = next((rule for rule in self._rules if rule.allows(source, tenant)), None)
        if found is None:
            raise SkillsUnavailable(
                f"The task may not name skills from {source.place}. Nothing was fetched.",
                remedy=SETTING,
            )
        return found

    async def _load(self, source: SkillSource, rule: SkillSourceRule, tenant: str) -> bytes:
        """Return a tar file with the skills of a source, from the cache if it has it."""
        if source.kind == "folder":
            return await asyncio.to_thread(_pack_folder, source, Path(rule.place))
        credential = choose_credential(self._credentials, source, tenant)
        scope = (
            f" {credential.scope}" if credential is not None else ""
        )  # others must not find its content in the cache
        name = sha256(f"{source.kind} {source.address} {source.pin}{scope}".encode()).hexdigest()
        file = self._cache / f"{name}.tar"
        lock = self._fetching.setdefault(name, asyncio.Lock())
        async with lock:
            if (cached := await asyncio.to_thread(_read_cached, file)) is not None:
                return cached
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            return await self._fetch(source, file, credential)

    async def _fetch(self, source: SkillSource, file: Path, credential: SkillCredential | None) -> bytes:
        """Fetch a source, and keep its skills in the cache."""
        self._gate.check((source.authority,), has_network=False, is_confined=True)
        user = credential.user if credential is not None else ""
        password = await credential.load_password(source) if credential is not None else ""
        async with create_staging_async(self._cache) as staging:
            tree = staging / "files"
            tree.mkdir(mode=0o700)
            if source.kind == "git":
                require_git()
                git = SandboxedGit(await self._sandbox(), self._gate)
                wanted = GitSource(url=source.address, ref=source.pin)
                commit = await git.clone(wanted, tree, TREE_LIMITS, password=password, user=user, refs=REVIEWED)
                if commit != source.pin:
                    raise SkillsUnavailable(f"{source.address} has the commit {commit}, not {source.pin}.")
            else:
                content = await self._download(source, (user, password) if credential is not None else None)
                found = sha256(content).hexdigest()
                if found != source.pin:
                    raise SkillsUnavailable(
                        f"{source.address} has the SHA-256 digest {found}, not {source.pin}.",
                        remedy="Check who has changed it.",
                    )
                await asyncio.to_thread(_unpack, content, tree)
            with Directory(tree) as directory:
                packed = await asyncio.to_thread(_pack_skills, directory, source)
            await asyncio.to_thread(_keep, staging / file.name, packed, file)
            return packed

    async def _download(self, source: SkillSource, login: tuple[str, str] | None) -> bytes:
        """Download an archive through a separate proxy, which connects to checked addresses of its host alone."""
        import httpx

        from tool_worker.sandbox import EgressProxy, EgressRules

        refusals: list[str] = []
        hosts, addresses = parse_host_rules([source.authority]), AddressRules.parse(self._gate.private)
        proxy = EgressProxy(
            EgressRules(hosts, addresses, limit_bytes=2 * MAX_ARCHIVE_BYTES), lambda _, why: refusals.append(why)
        )
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        plain = {"Accept-Encoding": "identity"}
        content = bytearray()
        try:
            async with (
                asyncio.timeout(DOWNLOAD_SECONDS),
                await proxy.serve(listener),
                httpx.AsyncClient(proxy=address, trust_env=False, headers=plain, timeout=30.0) as client,
                client.stream("GET", source.address, auth=login) as answer,
            ):
                if answer.status_code != httpx.codes.OK:
                    reason = refusals[-1] if refusals else f"the server answers {answer.status_code}"
                    raise _make_failure(source, reason, "Name the address of the file; redirects are not followed.")
                async for part in answer.aiter_raw():
                    content += part
                    if len(content) > MAX_ARCHIVE_BYTES:
                        raise _make_failure(source, f"it has more than {MAX_ARCHIVE_BYTES:,} bytes")
        except TimeoutError as error:
            raise _make_failure(source, f"it takes more than {DOWNLOAD_SECONDS:g} seconds") from error
        except httpx.HTTPError as error:
            raise _make_failure(source, refusals[-1] if refusals else str(error) or type(error).__name__) from error
        return bytes(content)

    def _place(self, conversation_id: str, content: bytes) -> list[str]:
        folder = HostFolder(self._root, conversation_id)
        with self._bindings.open(folder, folder.read_binding()) as workspace:
            return _install(workspace, content)


def _make_failure(source: SkillSource, reason: str, remedy: str = "") -> SkillsUnavailable:
    return SkillsUnavailable(f"{source.address} cannot be fetched: {reason.rstrip('.')}.", remedy=remedy)


def _unpack(content: bytes, tree: Path) -> None:
    form: Literal["tar", "zip"] = "zip" if content.startswith(b"PK") else "tar"
    with Directory(tree) as directory:
        Unpacking(directory, TREE_LIMITS).unpack(content, form)


def _pack_folder(source: SkillSource, root: Path) -> bytes:
    """Return the skills of a folder below a directory that the operator has named; links in it are not followed."""
    name = os.path.relpath(source.place, root)
    with Directory(root.resolve(strict=True)) as top:
        if name == ".":
            return _pack_skills(top, source)
        os.close(top.open(name, os.O_PATH | os.O_DIRECTORY, follows_links=False))
        with Directory.open_inside(top, name) as directory:
            return _pack_skills(directory, source)


def _pack_skills(directory: Directory, source: SkillSource) -> bytes:
    """Return a tar file with the skills of a directory.

    Raises:
        SkillsUnavailable: It has none, too large ones, or one that departs from AgentSkills; the text names it.
    """
    sizes = {
        entry.path: (entry.size, entry.mode)
        for entry in iter_entries(directory, TREE_LIMITS)
        if entry.kind == FILE and not entry.path.startswith(".git/")
    }
    folders = find_skill_folders(sizes)
    if not folders:
        raise SkillsUnavailable(f"{source.address} has no folder with a SKILL.md.")
    chosen = {path: folder for path in sizes if (folder := _find_folder(path, folders)) is not None}
    total = sum(sizes[path][0] for path in chosen)
    if len(chosen) > MAX_FILES or total > MAX_BYTES:
        raise SkillsUnavailable(
            f"The skills of {source.address} have {len(chosen):,} files and {total:,} bytes; {MAX_FILES:,} and "
            f"{MAX_BYTES:,} are allowed.",
            remedy="Publish those that are needed.",
        )
    skills: dict[str, dict[str, tuple[bytes, bool]]] = {folder: {} for folder in folders}
    for path, folder in chosen.items():
        content = directory.read(path, MAX_BYTES, follows_links=False)
        skills[folder][path.removeprefix(folder)] = content, bool(sizes[path][1] & 0o100)
    named: dict[str, Tree] = {}
    for folder, files in skills.items():
        text = files["SKILL.md"][0].decode(errors="replace")
        name = find_skill_name(folder, text)
        problems = check_skill_folder(name, text)
        if name in named:
            problems.append("two of its folders have this name")
        if problems:
            raise SkillsUnavailable(
                f"The skill {ascii(folder)[1:101] or 'at the top'} of {source.address} cannot be used: "
                f"{'; '.join(problems)}."
            )
        named[name] = {**files, ".gitignore": (IGNORE_ALL, False)}
    return _pack(named)


def _find_folder(path: str, folders: Sequence[str]) -> str | None:
    """Return the folder that a path is in; the folders are sorted, and none is inside another."""
    at = bisect_right(folders, path)  # so only the last one that is not after the path can hold it
    return folders[at - 1] if at and path.startswith(folders[at - 1]) else None


def _pack(skills: Mapping[str, Tree], *, below: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, files in sorted(skills.items()):
            for path, (content, is_executable) in sorted(files.items()):
                member = tarfile.TarInfo(f"{below}{name}/{path}")
                member.size, member.mode = len(content), 0o755 if is_executable else 0o644
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _read_packed(content: bytes) -> dict[str, Tree]:
    skills: dict[str, dict[str, tuple[bytes, bool]]] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            name, _, path = member.name.partition("/")
            file = archive.extractfile(member)
            assert file is not None
            skills.setdefault(name, {})[path] = file.read(), bool(member.mode & 0o100)
    return {**skills}


def _read_cached(file: Path) -> bytes | None:
    """Return a tar file of the cache; None if there is none, or a damaged one, as after a loss of power."""
    try:
        kept = file.read_bytes()
    except FileNotFoundError:
        return None
    content, digest = kept[:-DIGEST_BYTES], kept[-DIGEST_BYTES:]
    if sha256(content).digest() != digest:
        file.unlink(missing_ok=True)
        return None
    with suppress(OSError):
        os.utime(file)
    return content


def _keep(draft: Path, content: bytes, file: Path) -> None:
    """Add to the cache, and remove what was used least recently."""
    draft.write_bytes(content + sha256(content).digest())
    draft.replace(file)
    kept = sorted(file.parent.glob("*.tar"), key=_read_time, reverse=True)
    for old in kept[MAX_CACHED:]:
        old.unlink(missing_ok=True)


def _read_time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _install(workspace: Directory, content: bytes) -> list[str]:
    """Put the skills of a tar file into a workspace, and return why some are left out."""
    skills = _read_packed(content)
    missing = {name: files for name, files in skills.items() if _read_skill(workspace, name) is None}
    draft = f"{DRAFT}{sha256(content).hexdigest()[:16]}"
    if missing:
        Unpacking(workspace, INSTALL_LIMITS).unpack(_pack(missing, below=f"{INSTALLED}/{draft}/"), "tar")
        failpoint("tool.skills_drafted")
    with ExitStack() as opened:
        # Open from here on: a program may replace each name by a link.
        home = workspace.open(INSTALLED, os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
        opened.callback(os.close, home)
        if missing:
            source = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=home)
            opened.callback(os.close, source)
            for name in missing:
                with suppress(OSError):  # a folder of this name has appeared meanwhile
                    os.rename(name, name, src_dir_fd=source, dst_dir_fd=home)
            failpoint("tool.skills_renamed")
        shutil.rmtree(draft, ignore_errors=True, dir_fd=home)
    return [
        f"the skill {name} of the task is left out: the workspace has its own {INSTALLED}/{name}"
        for name, files in skills.items()
        if _read_skill(workspace, name) != {path: content for path, (content, _) in files.items()}
    ]


def _read_skill(workspace: Directory, name: str) -> dict[str, bytes] | None:
    """Return the files of a skill's folder in a workspace, as far as they fit; None if there is no such entry."""
    path = f"{INSTALLED}/{name}"
    try:
        os.close(workspace.open(path, os.O_PATH | os.O_NOFOLLOW, follows_links=False))
    except FileNotFoundError:
        return None
    try:
        with Directory.open_inside(workspace, path) as folder:
            return {
                entry.path: folder.read(entry.path, MAX_BYTES, follows_links=False)
                for entry in iter_entries(folder, INSTALL_LIMITS)
                if entry.kind == FILE
            }
    except (OSError, DeckhandsError):
        return {}
