"""Skills that a task names: what a tenant must not reach by them, and what a hostile source must not do."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from broker.contract.skill_sources import SkillSourceRule
from broker.runtime.failpoints import arm
from broker.runtime.settings import BrokerSettings
from tests.polling import until
from tests.security.test_clones import ALLOWED, FORBIDDEN, REPLY, service
from tests.trees import write_files
from tool_worker.errors import SkillsUnavailable
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.opening.skill_installer import CACHE, MAX_ARCHIVE_BYTES, MAX_CACHED, SkillInstaller

CID = "conversation"
PDF = "---\nname: pdf\ndescription: Reads PDFs.\n---\nRun it."
SKILLS = {
    "skills/pdf/SKILL.md": PDF,
    "skills/pdf/references/pages.md": "Pages are numbered.",
    "skills/csv/SKILL.md": PDF.replace("pdf", "csv"),
    "README.md": "Ours.",
}
GATE = EgressGate(private=(ALLOWED,))


@dataclass
class Node:
    root: Path
    rules: tuple[str, ...] = ()
    gate: EgressGate = GATE
    is_confined: bool = True
    notices: list[str] = field(default_factory=list)

    @property
    def workspace(self) -> Path:
        return self.root / CID / "workspace"

    @property
    def installed(self) -> dict[str, str]:
        """The files of the installed skills."""
        top = self.workspace / ".agents" / "skills"
        return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}

    async def install(self, *sources: str, tenant: str = "") -> None:
        async def sandbox() -> Sandbox:
            return BubblewrapSandbox(self.root / ".sandbox") if self.is_confined else NoSandbox()

        rules = tuple(map(SkillSourceRule.parse, self.rules))
        bindings = Bindings(self.root, NamedDirectories())
        installer = SkillInstaller(self.root, sandbox, rules, bindings, gate=self.gate)
        self.notices += await installer.install(CID, sources, tenant)

    async def refusal(self, source: str, *, tenant: str = "") -> str:
        """Return why skills are refused, and check that nothing is installed or left."""
        with pytest.raises(SkillsUnavailable) as raised:
            await self.install(source, tenant=tenant)
        assert not (self.workspace / ".agents").exists() or (self.workspace / ".agents").is_symlink()
        assert list((self.root / CACHE).glob("*")) == []
        return str(raised.value)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "node" / CID / "workspace").mkdir(parents=True)
    return Node(tmp_path / "node")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder at an address that the node may reach."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((ALLOWED, 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{ALLOWED}:{server.server_port}"
        server.shutdown()
        thread.join()


def pack(files: dict[str, str], *links: tuple[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return packed.getvalue()


def pin(address: str, content: bytes) -> str:
    return f"http://{address}#sha256={sha256(content).hexdigest()}"


def git(place: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *who, *words], cwd=place, check=True, capture_output=True, text=True).stdout


def commit(place: Path, files: dict[str, str]) -> str:
    """Commit files, for a server that knows nothing of Git, and return the commit."""
    write_files(place, files)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["update-server-info"]):
        git(place, *words)
    return git(place, "rev-parse", "HEAD").strip()


async def test_archive_is_fetched_once_and_installed_hidden_from_git(node: Node, tmp_path: Path) -> None:
    content = pack(SKILLS)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "skills.tar.gz").write_bytes(content)
    with served(tmp_path / "web") as host:
        node.rules = (host,)
        source = pin(f"{host}/skills.tar.gz", content)
        await node.install(source)
    expected = {"pdf/SKILL.md", "pdf/references/pages.md", "pdf/.gitignore", "csv/SKILL.md", "csv/.gitignore"}
    assert node.installed.keys() == expected
    subprocess.run(["git", "init", "-q"], cwd=node.workspace, check=True)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=node.workspace, check=True, capture_output=True)
    assert status.stdout == b""
    (node.workspace / ".agents" / "skills" / "csv" / "SKILL.md").unlink()
    (node.workspace / ".agents" / "skills" / "csv" / ".gitignore").unlink()
    (node.workspace / ".agents" / "skills" / "csv").rmdir()
    await node.install(source)  # the server is gone, and the cache has it
    assert node.installed.keys() == expected
    assert node.notices == []


@pytest.mark.parametrize("is_confined", [True, False], ids=["bwrap", "none"])
async def test_repository_is_fetched_at_its_commit(node: Node, tmp_path: Path, is_confined: bool) -> None:
    node.is_confined = is_confined
    earlier = commit(tmp_path / "web" / "team", SKILLS)
    commit(tmp_path / "web" / "team", {"skills/pdf/SKILL.md": PDF.replace("Run it", "Run away")})
    with served(tmp_path / "web") as host:
        node.rules = (f"acme={host}/team",)
        source = f"git+http://{host}/team/.git#{earlier}"
        await node.install(source, tenant="acme")
        assert node.installed["pdf/SKILL.md"] == PDF
        assert not any(name.startswith(".git/") for name in node.installed)
        other = f"git+http://{host}/team/.git#{'1' * 40}"
        with pytest.raises(SkillsUnavailable, match="cannot be cloned"):
            await node.install(other, tenant="acme")


@pytest.mark.parametrize(("ref", "is_taken"), [("refs/tags/v1", True), ("refs/pull/1/head", False)])
async def test_pinned_commit_is_on_a_branch_or_tag(node: Node, tmp_path: Path, ref: str, is_taken: bool) -> None:
    place = tmp_path / "web" / "team"
    first = commit(place, {"README.md": "Ours."})
    theirs = commit(place, SKILLS)
    for words in (["update-ref", ref, theirs], ["reset", "-q", "--hard", first], ["update-server-info"]):
        git(place, *words)
    with served(tmp_path / "web") as host:
        node.rules = (f"{host}/team",)
        source = f"git+http://{host}/team/.git#{theirs}"
        if is_taken:
            await node.install(source)
        else:
            assert "cannot be cloned" in await node.refusal(source)


async def test_damaged_cache_is_fetched_again(node: Node, tmp_path: Path) -> None:
    content = pack(SKILLS)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "skills.tar.gz").write_bytes(content)
    with served(tmp_path / "web") as host:
        node.rules = (host,)
        source = pin(f"{host}/skills.tar.gz", content)
        await node.install(source)
        (cached,) = (node.root / CACHE).glob("*.tar")
        whole, before = cached.read_bytes(), node.installed
        for damaged in (b"", whole[:700], whole[:1100], bytes(len(whole))):
            cached.write_bytes(damaged)
            shutil.rmtree(node.workspace / ".agents")
            await node.install(source)
            assert (node.installed, cached.read_bytes()) == (before, whole)


async def test_folder_of_the_operator_is_installed(node: Node, tmp_path: Path) -> None:
    write_files(tmp_path / "srv", SKILLS)
    (tmp_path / "linked").symlink_to(tmp_path / "srv")
    node.rules = (f"{tmp_path}/linked",)
    await node.install(f"{tmp_path}/linked/skills/pdf", f"{tmp_path}/linked")
    assert node.installed.keys() == {
        *("pdf/SKILL.md", "pdf/references/pages.md", "pdf/.gitignore", "csv/SKILL.md", "csv/.gitignore")
    }


async def test_tenant_reaches_no_place_that_the_operator_has_not_named(node: Node, tmp_path: Path) -> None:
    write_files(tmp_path / "srv" / "theirs", SKILLS)
    (tmp_path / "srv" / "ours").mkdir()
    (tmp_path / "srv" / "ours" / "out").symlink_to(tmp_path / "srv" / "theirs")
    with service(ALLOWED) as asked:
        places = [
            *(f"{tmp_path}/srv/theirs", f"{tmp_path}/srv/nowhere", "/etc", f"{node.root}/{CID}/workspace"),
            pin(f"{ALLOWED}:{asked.port}/a.tar.gz", b""),
            f"git+http://{ALLOWED}:{asked.port}/team#{'1' * 40}",
        ]
        node.rules = (f"{tmp_path}/srv/ours", f"acme={tmp_path}/srv/theirs", f"acme={ALLOWED}:{asked.port}")
        for place in places:
            for tenant in ("", "other", "acme=", "*"):
                said = await node.refusal(place, tenant=tenant)
                assert "may not name skills from" in said  # whether or not it exists
                assert "DECKHANDS_SKILL_SOURCES" in said
        assert asked.asked == []
    assert "Too many levels of symbolic links" in await node.refusal(f"{tmp_path}/srv/ours/out")


@pytest.mark.parametrize("form", ["git+http://{}/x#" + "1" * 40, "http://{}/x.tar.gz#sha256=" + "1" * 64])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"])
async def test_internal_address_is_not_reached_though_a_rule_names_it(node: Node, host: str, form: str) -> None:
    node.gate = EgressGate()
    with service("0.0.0.0") as asked:
        place = f"{host}:{asked.port}"
        node.rules = (place,)
        said = await node.refusal(form.format(place))
        assert asked.asked == []
        assert REPLY not in said


async def test_egress_list_of_the_node_holds_for_skills_too(node: Node) -> None:
    node.gate = EgressGate(ceiling=(), private=(ALLOWED,))
    with service(ALLOWED) as asked:
        node.rules = (f"{ALLOWED}:{asked.port}",)
        said = await node.refusal(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", b""))
        assert "DECKHANDS_EGRESS" in said
        assert asked.asked == []


async def test_redirect_of_an_archive_leads_nowhere(node: Node) -> None:
    with service(FORBIDDEN) as forbidden, service(ALLOWED) as allowed:
        allowed.status = 302
        allowed.headers = {"Location": f"http://{FORBIDDEN}:{forbidden.port}/a.tar.gz"}
        node.rules = (f"{ALLOWED}:{allowed.port}",)
        said = await node.refusal(pin(f"{ALLOWED}:{allowed.port}/a.tar.gz", b""))
        assert "redirects are not followed" in said
        assert forbidden.asked == []


async def test_other_content_than_pinned_is_refused(node: Node) -> None:
    with service(ALLOWED) as asked:
        asked.status, asked.body = 200, pack(SKILLS)
        node.rules = (f"{ALLOWED}:{asked.port}",)
        said = await node.refusal(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", b"something else"))
        assert "has the SHA-256 digest" in said


def bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pdf/SKILL.md", PDF)
        archive.writestr("pdf/big", b"\0" * 2**25)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: pack({"../pdf/SKILL.md": PDF}), "leads out"),
        (lambda: pack({"/etc/pdf/SKILL.md": PDF}), "leads out"),
        (lambda: pack({"README.md": "Ours."}), "no folder with a SKILL.md"),
        (lambda: pack({"pdf/SKILL.md": PDF.replace("name: pdf", "name: other")}), "both must be the same"),
        (lambda: pack({"P D F/SKILL.md": PDF}), "no name of an AgentSkill"),
        (lambda: pack({"a/pdf/SKILL.md": PDF, "b/pdf/SKILL.md": PDF}), "two of its folders"),
        (lambda: pack({"pdf/SKILL.md": PDF} | {f"pdf/{n}": "" for n in range(501)}), "502 files"),
        (lambda: pack({}, ("pdf/SKILL.md", "/etc/passwd")), "no folder with a SKILL.md"),
        (bomb, "16,777,216 are allowed"),
        (lambda: b"no archive", "damaged"),
    ],
)
async def test_hostile_archive_is_refused(node: Node, content: Callable[[], bytes], words: str) -> None:
    with service(ALLOWED) as asked:
        asked.status, asked.body = 200, content()
        node.rules = (f"{ALLOWED}:{asked.port}",)
        assert words in await node.refusal(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", asked.body))


async def test_download_of_a_large_archive_is_cut(node: Node) -> None:
    with service(ALLOWED) as asked:
        asked.status, asked.body = 200, bytes(MAX_ARCHIVE_BYTES + 1)
        node.rules = (f"{ALLOWED}:{asked.port}",)
        said = await node.refusal(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", asked.body))
        assert "more than 67,108,864 bytes" in said


async def test_links_of_an_archive_are_left_out(node: Node) -> None:
    with service(ALLOWED) as asked:
        asked.status, asked.body = 200, pack({"pdf/SKILL.md": PDF}, ("pdf/passwords", "/etc/passwd"))
        node.rules = (f"{ALLOWED}:{asked.port}",)
        await node.install(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", asked.body))
    assert node.installed.keys() == {"pdf/SKILL.md", "pdf/.gitignore"}


@pytest.mark.parametrize("link", [".agents", ".agents/skills"])
async def test_nothing_is_written_through_a_link_of_the_workspace(node: Node, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (node.workspace / link).parent.mkdir(exist_ok=True)
    (node.workspace / link).symlink_to(outside)
    write_files(tmp_path / "srv", SKILLS)
    node.rules = (f"{tmp_path}/srv",)
    with pytest.raises(SkillsUnavailable, match="symbolic links"):
        await node.install(f"{tmp_path}/srv")
    assert list(outside.iterdir()) == []


async def test_own_skill_of_the_workspace_is_kept_and_named(node: Node, tmp_path: Path) -> None:
    write_files(tmp_path / "srv", SKILLS)
    write_files(node.workspace, {".agents/skills/pdf/SKILL.md": PDF.replace("Run it", "Ours")})
    (node.workspace / ".agents" / "skills" / "csv").symlink_to("/etc")
    node.rules = (f"{tmp_path}/srv",)
    await node.install(f"{tmp_path}/srv")
    assert node.installed == {"pdf/SKILL.md": PDF.replace("Run it", "Ours")}
    assert [notice.split(" ")[2] for notice in node.notices] == ["csv", "pdf"]


async def pause_drafted(node: Node, source: str, gate: Path) -> tuple[asyncio.Task[None], Path]:
    """Start an installation that waits before its renames until the gate is removed; return it and its draft."""
    arm(BrokerSettings(failpoints=f"tool.skills_drafted:pause:{gate}"))
    installing = asyncio.create_task(node.install(source))
    await until(gate.exists)
    (draft,) = (node.workspace / ".agents" / "skills").glob(".new-*")
    return installing, draft


async def test_draft_of_a_killed_worker_is_completed(node: Node, tmp_path: Path) -> None:
    write_files(tmp_path / "srv", SKILLS)
    node.rules = (f"{tmp_path}/srv",)
    installing, found = await pause_drafted(node, f"{tmp_path}/srv", tmp_path / "gate")
    draft = found.name
    (tmp_path / "gate").unlink()
    await installing
    whole = node.installed
    top = node.workspace / ".agents" / "skills"
    (top / draft).mkdir()  # as after the last rename
    await node.install(f"{tmp_path}/srv")
    assert sorted(path.name for path in top.iterdir()) == ["csv", "pdf"]
    (top / draft).mkdir()
    (top / "pdf").rename(top / draft / "pdf")
    await node.install(f"{tmp_path}/srv")
    assert node.installed == whole
    assert sorted(path.name for path in top.iterdir()) == ["csv", "pdf"]


async def test_draft_that_is_replaced_by_a_link_moves_nothing(node: Node, tmp_path: Path) -> None:
    write_files(tmp_path / "srv", SKILLS)
    write_files(tmp_path / "other", {"pdf/SKILL.md": "Another workspace's."})
    node.rules = (f"{tmp_path}/srv",)
    installing, draft = await pause_drafted(node, f"{tmp_path}/srv", tmp_path / "gate")
    draft.rename(draft.with_name("moved"))  # by a program of the workspace, at the worst moment
    draft.symlink_to(tmp_path / "other")
    (tmp_path / "gate").unlink()
    with pytest.raises(SkillsUnavailable, match=r"Not a directory|symbolic links"):
        await installing
    assert (tmp_path / "other" / "pdf" / "SKILL.md").read_text() == "Another workspace's."


async def test_cache_keeps_what_was_used_last(node: Node) -> None:
    with service(ALLOWED) as asked:
        asked.status = 200
        node.rules = (f"{ALLOWED}:{asked.port}",)
        for number in range(MAX_CACHED + 2):
            asked.body = pack({"pdf/SKILL.md": f"{PDF} {number}"})
            await node.install(pin(f"{ALLOWED}:{asked.port}/a.tar.gz", asked.body))
        assert len(list((node.root / CACHE).glob("*"))) == MAX_CACHED
