"""Addresses by which a clone would reach what is not meant for it: this machine, its network, other workspaces."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.workspace_sources import GitSource
from broker.coordination.transfers import StoredFiles
from broker.log.event_log import EventLog
from broker.store.store import Store
from tool_worker.errors import SourceUnusable, WorkspaceError
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.opening.workspace_opener import WorkspaceOpener

CID = "conversation"
ALLOWED, FORBIDDEN = "127.0.0.2", "127.0.0.1"
REPLY = "the-reply-of-a-service"


@dataclass
class Service:
    """A server that notes what it is asked, and answers the same to everything."""

    port: int = 0
    status: int = 404
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain"})
    body: bytes = REPLY.encode()
    asked: list[str] = field(default_factory=list)


@contextmanager
def service(address: str = FORBIDDEN, port: int = 0) -> Iterator[Service]:
    served = Service()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            self.send_response(served.status)
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(served.body)))
            self.end_headers()
            self.wfile.write(served.body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((address, port), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        served.port = server.server_port
        yield served
        server.shutdown()
        thread.join()


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


@dataclass
class Node:
    log: EventLog
    store: Store
    root: Path

    async def refusal(self, url: str, *, ref: str = "", confined: bool = True, **options: object) -> str:
        """Return the error of a refused clone, and check that nothing of it is left."""

        async def sandbox() -> Sandbox:
            return BubblewrapSandbox(self.root / ".sandbox") if confined else NoSandbox()

        opener = WorkspaceOpener(self.log, self.root, StoredFiles(self.store), sandbox, TreeLimits(), **options)  # type: ignore[arg-type]
        with pytest.raises(WorkspaceError) as raised:
            await opener.open(CID, GitSource(url=url, ref=ref))
        assert isinstance(raised.value, SourceUnusable)
        assert raised.value.remedy
        assert list((self.root / CID).iterdir()) == []
        return raised.value.message


@pytest.fixture
def node(log: EventLog, memory_store: Store, tmp_path: Path) -> Node:
    return Node(log, memory_store, tmp_path / "node")


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "secret").write_text(REPLY)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("place", ["node/other/workspace", "elsewhere"])
async def test_no_repository_of_this_machine_unless_its_operator_names_it(
    node: Node, tmp_path: Path, place: str
) -> None:
    url = f"file://{repository(tmp_path / place)}"
    said = await node.refusal(url)
    assert said == f"{url} cannot be cloned: this node clones no repository from there."
    nowhere = f"file://{tmp_path}/nowhere"
    assert await node.refusal(nowhere) == said.replace(url, nowhere)  # it does not say what is there


@pytest.mark.parametrize(
    "end",
    [
        *("link", "folder/../../outside", "..", "", "%2e%2e/outside", "repo/%2e%2e/%2e%2e/outside", "link/.git"),
        *("fifo", "repo?x", "linked/inner"),
    ],
)
async def test_below_the_operators_roots_no_path_leads_out(node: Node, tmp_path: Path, end: str) -> None:
    from tool_worker.workspace.opening.repositories import RepositoryRoots

    outside, root = repository(tmp_path / "outside"), tmp_path / "root"
    repository(root / "repo")
    repository(outside / "inner")
    (root / "folder").mkdir()
    (root / "link").symlink_to(outside)
    (root / "linked").symlink_to(outside)
    subprocess.run(["mkfifo", root / "fifo"], check=True)
    said = await node.refusal(f"file://{root}/{end}", roots=RepositoryRoots((root,)))
    assert "cannot be cloned" in said or "is not the address" in said


async def test_the_nodes_own_directory_is_no_root(node: Node, tmp_path: Path) -> None:
    from tool_worker.workspace.opening.repositories import RepositoryRoots

    url = f"file://{repository(node.root / 'other' / 'workspace')}"
    assert "the workspaces of this node" in await node.refusal(url, roots=RepositoryRoots((tmp_path,)))


async def test_a_host_in_the_address_of_a_file_is_refused(node: Node, tmp_path: Path) -> None:
    from tool_worker.workspace.opening.repositories import RepositoryRoots

    path = repository(tmp_path / "root")
    said = await node.refusal(f"file://localhost{path}", roots=RepositoryRoots((tmp_path,)))
    assert "is not the address of a repository on this machine" in said


HOSTS = (
    *("127.0.0.1", "localhost", "LOCALHOST.", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "0.0.0.0"),
    *("127.0.0.7", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:0:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::127.0.0.1]", "ip6-localhost", "127.0.0.1%2f", "user@127.0.0.1"),
)


@pytest.mark.parametrize(
    "confined", [pytest.param(True, id="bwrap"), pytest.param(False, id="none", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("host", HOSTS)
async def test_no_service_of_this_machine(node: Node, host: str, confined: bool) -> None:
    with service("0.0.0.0") as asked:
        said = await node.refusal(f"http://{host}:{asked.port}/x.git", confined=confined)
        assert asked.asked == []
        assert REPLY not in said
        assert "cannot be cloned" in said


INSIDE = ["169.254.169.254", "metadata.google.internal", "10.0.0.1", "100.64.0.1", "[fe80::1]"]


@pytest.mark.parametrize("server", [*(f"http://{host}" for host in INSIDE), f"https://{INSIDE[0]}"])
async def test_no_service_of_its_network(node: Node, server: str) -> None:
    said = await node.refusal(f"{server}/x.git")
    assert "not of the public internet (DECKHANDS_EGRESS_PRIVATE)" in said or "cannot be looked up" in said


GATE = EgressGate(private=(ALLOWED,))


@pytest.mark.parametrize("confined", [True, False], ids=["bwrap", "none"])
async def test_a_redirect_leads_nowhere(node: Node, confined: bool) -> None:
    with service() as forbidden, service(ALLOWED) as allowed:
        allowed.status = 302
        allowed.headers = {"Location": f"http://{FORBIDDEN}:{forbidden.port}/x.git/info/refs"}
        said = await node.refusal(f"http://{ALLOWED}:{allowed.port}/x.git", confined=confined, gate=GATE)
        assert len(allowed.asked) > 0
        assert forbidden.asked == []
        assert str(forbidden.port) not in said


async def test_objects_declared_elsewhere_are_not_fetched(node: Node) -> None:
    with service() as forbidden, service(ALLOWED) as allowed:
        # A repository without its own program ("dumb"): its files are fetched one by one, also those of others.
        allowed.status, allowed.headers = 200, {"Content-Type": "text/plain"}
        allowed.body = f"http://{FORBIDDEN}:{forbidden.port}/x.git/objects\n".encode()
        await node.refusal(f"http://{ALLOWED}:{allowed.port}/x.git", ref="1" * 40, gate=GATE)
        assert forbidden.asked == []


@pytest.mark.parametrize("confined", [True, False], ids=["bwrap", "none"])
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (404, "text/plain", REPLY),
        (500, "text/plain; charset=utf-8", REPLY),
        (200, "application/x-git-upload-pack-advertisement", REPLY),
        (200, "application/x-git-upload-pack-advertisement", f"{len(REPLY) + 8:04x}ERR {REPLY}"),
        (200, "application/x-git-upload-pack-advertisement", f"001e# service=git-upload-pack\n0000{len(REPLY) + 8:04x}ERR {REPLY}"),
    ],
)  # fmt: skip
async def test_answers_of_a_server_are_not_repeated(
    node: Node, status: int, kind: str, body: str, confined: bool
) -> None:
    with service(ALLOWED) as allowed:
        allowed.status, allowed.headers, allowed.body = status, {"Content-Type": kind}, body.encode()
        said = await node.refusal(f"http://{ALLOWED}:{allowed.port}/x.git", confined=confined, gate=GATE)
        assert allowed.asked[0].startswith("/x.git/info/refs")
        for part in (REPLY, REPLY[:8], REPLY[-8:]):
            assert part not in said
