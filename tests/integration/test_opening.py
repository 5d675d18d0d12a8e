"""Workspaces from a repository or an archive: real git, real servers, in the real sandbox."""

from __future__ import annotations

import base64
import fcntl
import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

from broker.contract.allowed_hosts import parse_host_rules
from broker.contract.events import ConversationCreated
from broker.contract.workspace_sources import GitSource, UploadedSource, parse_git_source
from broker.coordination.transfers import PIECE_BYTES, StoredFiles, make_content_name
from broker.log.event_log import EventLog
from broker.runtime.errors import UsageError
from broker.secrets.secrets import Secrets, SecretsLocked
from broker.store.embedded import EmbeddedValkey
from broker.store.store import Store, open_store
from tool_worker.errors import EgressRefused, FileUnfit, SourceUnusable, WorkspaceTooLarge
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.files.staging import remove_staging
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.opening.repositories import RepositoryRoots
from tool_worker.workspace.opening.workspace_opener import OpenResult, WorkspaceOpener

CID = "conversation"
PASSWORD = "correct-horse-battery"
KEY = b"k" * 32


def git(folder: Path, *arguments: str) -> str:
    env = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    command = ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *arguments]
    return subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two branches, a tag and two commits on main."""
    folder = tmp_path_factory.mktemp("project")
    git(folder, "init", "--quiet")
    (folder / "README").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    git(folder, "tag", "v1")
    git(folder, "branch", "side")
    (folder / "README").write_text("two\n")
    (folder / ".gitignore").write_text("*.log\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "two")
    git(folder, "update-server-info")
    return folder


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store, Secrets(memory_store, lambda: KEY))
    await log.create(ConversationCreated(conversation_id=CID))
    return log


class World:
    """A node that opens workspaces."""

    def __init__(self, log: EventLog, store: Store, root: Path, repositories: Path) -> None:
        self.log, self.root, self.repositories = log, root, repositories
        self.stored_files = StoredFiles(store, lambda: KEY)
        self.sandbox: Sandbox = BubblewrapSandbox(root / ".sandbox")

    async def open(
        self, source: GitSource | UploadedSource, *, cid: str = CID, gate: EgressGate | None = None, **limits: int
    ) -> OpenResult:
        async def sandbox() -> Sandbox:
            return self.sandbox

        gate = gate or EgressGate(private=("127.0.0.1",))
        roots = RepositoryRoots((self.repositories,))
        opener = WorkspaceOpener(
            self.log, self.root, self.stored_files, sandbox, TreeLimits(**limits), gate=gate, roots=roots
        )
        return await opener.open(cid, source)

    @property
    def workspace(self) -> Path:
        return self.root / CID / "workspace"

    def left(self) -> set[str]:
        return {path.name for path in (self.root / CID).iterdir()}


@pytest.fixture
def world(log: EventLog, memory_store: Store, tmp_path: Path) -> World:
    return World(log, memory_store, tmp_path / "node", tmp_path.parent)


@contextmanager
def served(folder: Path, *, password: str = "") -> Iterator[str]:
    """Serve a directory over HTTP; with a password, to clients that send it."""

    class Server(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            wanted = base64.b64encode(f"x-access-token:{password}".encode()).decode()
            if password and self.headers.get("Authorization") != f"Basic {wanted}":
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.end_headers()
                return
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("ref", "depth", "text", "commits"),
    [
        *(("", None, "two\n", 2), ("side", None, "one\n", 1), ("v1", None, "one\n", 1)),
        *(("commit", None, "one\n", 1), ("main", 1, "two\n", 1)),
    ],
)
async def test_a_repository_at_a_ref(
    world: World, project: Path, ref: str, depth: int | None, text: str, commits: int
) -> None:
    name = git(project, "rev-parse", "v1") if ref == "commit" else ref
    opened = await world.open(GitSource(url=f"file://{project}", ref=name, depth=depth))
    assert (world.workspace / "README").read_text() == text
    assert opened.commit == git(project, "rev-parse", name or "main")
    assert opened.commit[:12] in opened.text
    assert int(git(world.workspace, "rev-list", "--count", "HEAD")) == commits
    assert world.left() == {"workspace", "base.git", "opened.json"}
    assert await world.open(GitSource(url="file:///nowhere")) == opened  # once, however often it is asked for


async def test_a_repository_behind_a_password_that_no_file_keeps(world: World, project: Path) -> None:
    with served(project, password=PASSWORD) as url:
        source = GitSource(url=f"{url}/.git", secret="TOKEN")
        with pytest.raises(SourceUnusable, match="has no secret TOKEN"):
            await world.open(source)
        with pytest.raises(SourceUnusable, match="cannot be cloned"):
            await world.open(GitSource(url=f"{url}/.git"))
        await world.log.secrets.put(CID, "TOKEN", PASSWORD)
        await world.open(source)
    assert (world.workspace / "README").read_text() == "two\n"
    for path in world.workspace.parent.rglob("*"):
        assert path.is_dir() or path.is_symlink() or PASSWORD.encode() not in path.read_bytes(), path


async def test_repository_on_a_forbidden_host_is_not_cloned(world: World, project: Path) -> None:
    with served(project) as url:
        source = GitSource(url=f"{url}/.git")
        with pytest.raises(EgressRefused, match="DECKHANDS_EGRESS"):
            await world.open(source, gate=EgressGate(parse_host_rules(["127.0.0.1:9"]), ("127.0.0.1",)))
        await world.open(source, gate=EgressGate(parse_host_rules([url.removeprefix("http://")]), ("127.0.0.1",)))
    assert (world.workspace / "README").read_text() == "two\n"


async def test_missing_source_is_reported_and_leaves_nothing(world: World, project: Path, tmp_path: Path) -> None:
    for source in (
        GitSource(url=f"file://{tmp_path}/nowhere.git"),
        GitSource(url=f"file://{project}", ref="no-such-branch"),
        GitSource(url="http://127.0.0.1:9/x.git"),
    ):
        why = r"cannot be cloned: (fatal:|No such file|127.0.0.1:9 cannot be)"
        with pytest.raises(SourceUnusable, match=why) as raised:
            await world.open(source)
        assert len(raised.value.message) < 400
        assert world.left() == set()


async def test_half_filled_leftovers_are_removed_unless_being_filled(world: World, project: Path) -> None:
    source = GitSource(url=f"file://{project}")
    half = world.root / CID / ".draft-0"
    (half / "workspace").mkdir(parents=True)
    filling = os.open(world.root / CID, os.O_RDONLY)
    fcntl.flock(filling, fcntl.LOCK_SH)  # as a worker does that fills it
    remove_staging(world.root / CID)
    await world.open(source, cid=CID)
    assert half.exists()
    os.close(filling)
    await world.open(source)
    assert half.exists()  # it was open already, and nothing was filled
    remove_staging(world.root / CID)
    assert world.left() == {"workspace", "base.git", "opened.json"}
    half.mkdir()
    world.workspace.rename(world.workspace.with_name("elsewhere"))
    await world.open(source)
    assert not half.exists()


async def test_one_of_two_concurrent_openings_is_taken(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def other_was_first(draft: Path, target: Path) -> Path:
        if target == world.workspace:
            target.mkdir()
            (target / "of the other").touch()
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", other_was_first)
    assert (await world.open(GitSource(url=f"file://{project}"))).files > 0
    assert [path.name for path in world.workspace.iterdir()] == ["of the other"]
    assert world.left() == {"workspace", "base.git", "opened.json"}


async def test_too_large_source_is_not_kept(world: World, project: Path) -> None:
    with pytest.raises(WorkspaceTooLarge):
        await world.open(GitSource(url=f"file://{project}"), bytes=100)
    assert world.left() == set()


async def test_a_hostile_repository_runs_nothing_and_brings_no_other(
    world: World, project: Path, tmp_path: Path
) -> None:
    evil, mark = tmp_path / "evil", tmp_path / "ran"
    evil.mkdir()
    git(evil, "init", "--quiet")
    git(evil, "submodule", "--quiet", "add", f"file://{project}", "sub")
    (evil / ".gitmodules").write_text(
        f'[submodule "sub"]\n path = sub\n url = ext::sh -c "touch {mark}"\n update = !touch {mark}\n'
    )
    (evil / ".gitattributes").write_text("* filter=evil diff=evil\n")
    (evil / "hooks").mkdir()
    (evil / "hooks" / "post-checkout").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (evil / "hooks" / "post-checkout").chmod(0o755)
    (evil / "out").symlink_to("/etc/passwd")
    git(evil, "add", "--all")
    git(evil, "commit", "--quiet", "-m", "evil")
    for name in ("post-checkout", "post-upload-pack"):
        hook = evil / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
        hook.chmod(0o755)
    git(evil, "config", "core.fsmonitor", f"touch {mark}")
    git(evil, "config", "filter.evil.smudge", f"touch {mark}")
    await world.open(GitSource(url=f"file://{evil}"))
    assert (world.workspace / "hooks" / "post-checkout").exists()
    assert list((world.workspace / "sub").iterdir()) == []
    assert (world.workspace / "out").is_symlink()
    assert not (world.workspace / ".git" / "hooks").exists()
    assert not mark.exists()


async def test_a_bundle(world: World, project: Path, tmp_path: Path) -> None:
    git(project, "bundle", "create", "--quiet", str(tmp_path / "x.bundle"), "--all")
    parcel = await world.stored_files.keep(CID, (tmp_path / "x.bundle").read_bytes())
    opened = await world.open(UploadedSource(name="x.bundle", format="bundle", parcel=parcel, ref="side"))
    assert (world.workspace / "README").read_text() == "one\n"
    assert opened.commit == git(project, "rev-parse", "side")
    assert str(tmp_path) not in (world.workspace / ".git" / "config").read_text()
    option = UploadedSource(name="--delete", format="bundle", parcel=parcel)
    await world.stored_files.keep("an-option", (tmp_path / "x.bundle").read_bytes())
    await world.open(option, cid="an-option")
    assert "url = --delete" in (world.root / "an-option" / "workspace" / ".git" / "config").read_text()
    for content in (b"# v2 git bundle\nnonsense", (tmp_path / "x.bundle").read_bytes()[:-30], b"nonsense"):
        broken = await world.stored_files.keep("another", content)
        with pytest.raises(SourceUnusable, match=r"x\.bundle cannot be cloned"):
            await world.open(UploadedSource(name="x.bundle", format="bundle", parcel=broken), cid="another")


def tarball(content: bytes, name: str = "notes.txt", mode: Literal["w", "w:gz"] = "w") -> bytes:
    """Return an archive of one file; nothing of it is compressed unless the mode says so."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        header = tarfile.TarInfo(name)
        header.size = len(content)
        archive.addfile(header, io.BytesIO(content))
    return target.getvalue()


async def test_an_archive(world: World) -> None:
    content = tarball(b"pass\n", "src/main.py", "w:gz")
    parcel = await world.stored_files.keep(CID, content)
    opened = await world.open(UploadedSource(name="x.tgz", format="tar", parcel=parcel))
    assert (world.workspace / "src" / "main.py").read_text() == "pass\n"
    assert (opened.files, opened.size_bytes, opened.commit) == (2, 5, "")
    damaged = await world.stored_files.keep("another", content[:-20])
    with pytest.raises(FileUnfit, match="damaged"):
        await world.open(UploadedSource(name="x.tgz", format="tar", parcel=damaged), cid="another")
    assert list((world.root / "another").iterdir()) == []


async def test_archives_are_readable_nowhere_in_the_store(tmp_path: Path) -> None:
    canary = os.urandom(16).hex().encode()
    content = tarball(canary * 20_000)
    (tmp_path / "x.tar").write_bytes(content)
    source = UploadedSource(name="x.tar", format="tar", parcel=make_content_name(content))
    valkey = EmbeddedValkey(tmp_path / "valkey", append_fsync="always")
    await valkey.start()
    store = await open_store(valkey.url)
    files = StoredFiles(store, lambda: KEY)
    try:
        await files.keep(CID, content)
        await files.put_chunks("laid-by", source.parcel, tmp_path / "x.tar", ttl_seconds=60)
        await files.copy_to(CID, "lent", source)
        assert [await files.fetch(cid, source.parcel) for cid in (CID, "laid-by", "lent")] == [content] * 3
    finally:
        await store.aclose()
        await valkey.stop()
    kept = [path.read_bytes() for path in (tmp_path / "valkey").rglob("*") if path.is_file()]
    assert any(source.parcel.encode() in each for each in kept)
    assert not any(canary in each for each in kept)


async def test_an_archive_opens_only_with_the_key_of_its_sender(world: World, memory_store: Store) -> None:
    source = UploadedSource(name="x.tar", format="tar", parcel=make_content_name(tarball(b"text")))
    await world.stored_files.keep(CID, tarball(b"text"))
    for key in (b"other" + KEY[5:], None):
        world.stored_files = StoredFiles(memory_store, lambda key=key: key)
        with pytest.raises(SecretsLocked, match="the same DECKHANDS_SECRET_KEY"):
            await world.open(source)
    world.stored_files = StoredFiles(memory_store, lambda: KEY)
    await world.open(source)
    assert (world.workspace / "notes.txt").read_text() == "text"


async def test_an_archive_of_an_older_version_is_read_and_lent(world: World, memory_store: Store) -> None:
    """An older version has not sealed it; none of this needs a key."""
    content = tarball(os.urandom(PIECE_BYTES + 5))
    source = UploadedSource(name="x.tar", format="tar", parcel=make_content_name(content))
    await world.stored_files.put(CID, source.parcel, content)
    world.stored_files = StoredFiles(memory_store, lambda: None)
    await world.stored_files.copy_to(CID, "another", source)
    for cid in (CID, "another"):
        assert await world.stored_files.keep(cid, content) == source.parcel  # by a client that asks again
        assert await world.stored_files.fetch(cid, source.parcel) == content
        await world.open(source, cid=cid)


@pytest.mark.parametrize(
    "url",
    ["ext::sh -c id", "ssh://host/x", "git@host:x.git", "file:relative", "https://u:p@host/x", "https://host/a b"],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        GitSource(url=url)


@pytest.mark.parametrize(
    "text", ["ssh://git@host/x.git", "git@host:x/y.git", "git+ssh://host/x", "https://host/x.git", "git://host/x"]
)
def test_unsupported_clone_addresses_name_the_supported_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"Write git\+https://.* Nothing is cloned over ssh: use https with a token"):
        parse_git_source(text)


@pytest.mark.parametrize("text", ["shop", "./git@host:x", "/srv/shop", "shop.tar.gz", "C:/x"])
def test_directories_and_files_are_no_addresses(text: str) -> None:
    assert parse_git_source(text) is None


@pytest.mark.parametrize("ref", ["--upload-pack=touch x", "-b", "a b", "a;b"])
def test_refs_that_are_refused(ref: str) -> None:
    with pytest.raises(ValueError, match="ref"):
        GitSource(url="https://example.org/x.git", ref=ref)
