"""Private sources of skills: the operator's password opens them for its tenant, and reaches nothing and nobody else."""

from __future__ import annotations

import os
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.recall import RecallObservation
from broker.contract.skill_sources import SkillSourceRule
from broker.runtime import UsageError
from tests.faults.harness import FaultCluster
from tests.security.test_clones import ALLOWED, FORBIDDEN, service
from tests.security.test_task_skills import CID, GATE, SKILLS, commit, pack, pin
from tests.turns import finish
from tool_worker.errors import SkillsUnavailable
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.settings import load_tool_settings
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.opening.skill_credentials import SkillCredential, read_skill_credentials
from tool_worker.workspace.opening.skill_installer import SkillInstaller

PASSWORD = "canary-of-the-password-7Gq"
LOGIN = b64encode(f"deploy:{PASSWORD}".encode()).decode()


@dataclass
class Forge:
    """A server of Git's smart protocol and of files, which asks for a password.

    Attributes:
        logins: the header of each request.
        shown: the processes whose arguments had the password during a request.
    """

    root: Path
    host: str = ""
    redirects_to: str = ""
    logins: list[str] = field(default_factory=list)
    shown: list[bytes] = field(default_factory=list)

    def note(self, login: str) -> bool:
        """Note a request, and return whether it may be answered."""
        self.logins.append(login)
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = process.read_bytes()
            except OSError:
                continue
            if PASSWORD.encode() in line or LOGIN.encode() in line:
                self.shown.append(line)
        return login == f"Basic {LOGIN}"


@contextmanager
def forge(root: Path) -> Iterator[Forge]:
    served = Forge(root)

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            login = self.headers.get("Authorization", "")
            if not served.note(login):
                # What a careless server says of a login, the tenant must not read.
                refusal = {"WWW-Authenticate": 'Basic realm="private"', "Content-Type": "text/plain"}
                self.answer(401, refusal, f"{login} is wrong".encode())
            elif served.redirects_to:
                self.answer(302, {"Location": served.redirects_to + self.path})
            elif ".git/" in self.path:
                self.answer(*run_git(self, root, body))
            else:
                file = root / self.path.lstrip("/")
                self.answer(200 if file.exists() else 404, {}, file.read_bytes() if file.exists() else login.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((ALLOWED, 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        served.host = f"{ALLOWED}:{server.server_port}"
        yield served
        server.shutdown()
        thread.join()


def run_git(request: BaseHTTPRequestHandler, root: Path, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Answer by Git's own server, a CGI program."""
    parts = urlsplit(request.path)
    variables = {
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": parts.path,
        "QUERY_STRING": parts.query,
        "REQUEST_METHOD": request.command,
        "CONTENT_TYPE": request.headers.get("Content-Type", ""),
        "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
        "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
        "PATH": os.environ["PATH"],
    }
    ran = subprocess.run(["git", "http-backend"], input=body, env=variables, check=True, capture_output=True)
    head, _, content = ran.stdout.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
    return int(headers.pop("Status", "200 OK").split()[0]), headers, content


@dataclass
class Node:
    root: Path
    table: Path
    rules: tuple[str, ...] = ()
    is_confined: bool = True

    @property
    def installed(self) -> list[str]:
        return sorted(path.name for path in (self.root / CID / "workspace" / ".agents" / "skills").glob("*"))

    def credentials(self, rules: tuple[SkillSourceRule, ...]) -> tuple[SkillCredential, ...]:
        return read_skill_credentials(self.table, rules, {"FORGE_PASSWORD": PASSWORD})

    async def install(self, source: str, *, tenant: str = "") -> None:
        async def sandbox() -> Sandbox:
            return BubblewrapSandbox(self.root / ".sandbox") if self.is_confined else NoSandbox()

        rules = tuple(map(SkillSourceRule.parse, self.rules))
        bindings = Bindings(self.root, NamedDirectories())
        installer = SkillInstaller(self.root, sandbox, rules, bindings, gate=GATE, credentials=self.credentials(rules))
        await installer.install(CID, [source], tenant)

    async def refusal(self, source: str, *, tenant: str = "") -> str:
        """Return why skills are refused; the text has no password."""
        with pytest.raises(SkillsUnavailable) as raised:
            await self.install(source, tenant=tenant)
        said = f"{raised.value!r} {raised.value} {raised.value.__cause__!r}"
        assert PASSWORD not in said
        assert LOGIN not in said
        return said


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "node" / CID / "workspace").mkdir(parents=True)
    return Node(tmp_path / "node", tmp_path / "credentials.toml")


def write_table(node: Node, rule: str, fields: str = 'password = "${FORGE_PASSWORD}"') -> None:
    node.rules = (*node.rules, rule)
    known = node.table.read_text() if node.table.exists() else ""
    node.table.write_text(f'{known}["{rule}"]\nuser = "deploy"\nallows_http = true\n{fields}\n')


def private_repository(root: Path) -> str:
    return commit(root / "acme", SKILLS)


def find_password(root: Path) -> list[Path]:
    """Return the files below a directory that contain the password."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(one.encode() in path.read_bytes() for one in (PASSWORD, LOGIN))]


@pytest.mark.parametrize("is_confined", [True, False], ids=["bwrap", "none"])
async def test_private_repository_is_fetched_with_the_password_of_its_place(
    node: Node, tmp_path: Path, is_confined: bool
) -> None:
    node.is_confined = is_confined
    with forge(tmp_path / "web") as server:
        source = f"git+http://{server.host}/acme/.git#{private_repository(server.root)}"
        write_table(node, f"acme={server.host}/acme")
        await node.install(source, tenant="acme")
        assert node.installed == ["csv", "pdf"]
        assert f"Basic {LOGIN}" in server.logins
        assert server.shown == []
    assert find_password(node.root) == []


@pytest.mark.parametrize("kind", ["variable", "file"])
async def test_private_archive_is_fetched_with_the_password_of_its_place(node: Node, tmp_path: Path, kind: str) -> None:
    content = pack(SKILLS)
    with forge(tmp_path / "web") as server:
        server.root.mkdir()
        (server.root / "skills.tar.gz").write_bytes(content)
        secret = tmp_path / "secret"
        if kind == "file":
            secret.write_text("an older one\n")
            write_table(node, server.host, f'password_file = "{secret}"')
            assert "the server answers 401" in await node.refusal(pin(f"{server.host}/skills.tar.gz", content))
            secret.write_text(f"{PASSWORD}\n")  # a rotated password needs no restart
        else:
            write_table(node, server.host)
        await node.install(pin(f"{server.host}/skills.tar.gz", content))
        assert node.installed == ["csv", "pdf"]
        assert server.shown == []
    assert find_password(node.root) == []


@pytest.mark.parametrize("form", ["git", "archive"])
async def test_redirect_takes_the_password_nowhere(node: Node, tmp_path: Path, form: str) -> None:
    content = pack(SKILLS)
    with forge(tmp_path / "web") as server, service(FORBIDDEN) as elsewhere:
        source = pin(f"{server.host}/skills.tar.gz", content)
        if form == "git":
            source = f"git+http://{server.host}/acme/.git#{private_repository(server.root)}"
        server.redirects_to = f"http://{FORBIDDEN}:{elsewhere.port}"
        write_table(node, server.host)
        said = await node.refusal(source)
        assert f"Basic {LOGIN}" in server.logins, "it was asked with the password, and then redirected"
        assert elsewhere.asked == []
        assert str(elsewhere.port) not in said


@pytest.mark.parametrize("form", ["git", "archive"])
async def test_error_of_a_careless_server_has_no_password(node: Node, tmp_path: Path, form: str) -> None:
    with forge(tmp_path / "web") as server:
        server.root.mkdir()
        write_table(node, server.host)
        source = pin(f"{server.host}/nowhere.tar.gz", b"")
        if form == "git":
            source = f"git+http://{server.host}/nowhere.git/x#{'1' * 40}"
        assert server.host in await node.refusal(source)
        assert f"Basic {LOGIN}" in server.logins


async def test_other_tenants_get_neither_the_password_nor_what_it_opened(node: Node, tmp_path: Path) -> None:
    with forge(tmp_path / "web") as server:
        source = f"git+http://{server.host}/acme/.git#{private_repository(server.root)}"
        write_table(node, f"acme={server.host}/acme")
        assert "may not name skills from" in await node.refusal(source, tenant="other")
        assert server.logins == []
        await node.install(source, tenant="acme")
        # Even where the rest of the host is for everybody, and the pin is known, the node's cache tells nothing.
        node.rules = (*node.rules, server.host)
        del server.logins[:]
        for tenant in ("", "other", "*", "acme="):
            assert "cannot be cloned" in await node.refusal(source, tenant=tenant)
        assert set(server.logins) == {""}, "it was asked without the password"
        (node.root / CID / "workspace" / ".agents").rename(tmp_path / "moved")
        await node.install(source, tenant="acme")  # its own are in the cache
        assert set(server.logins) == {""}


async def test_password_of_one_place_is_not_sent_to_another(node: Node, tmp_path: Path) -> None:
    with forge(tmp_path / "web") as server, forge(tmp_path / "web") as other:
        source = f"git+http://{{}}/acme/.git#{private_repository(server.root)}"
        write_table(node, f"{server.host}/acme")
        node.rules = (*node.rules, server.host, other.host)
        await node.refusal(source.format(other.host))
        await node.refusal(f"git+http://{server.host}/acme2/.git#{'1' * 40}")
        await node.refusal(pin(f"{server.host}/acme.tar.gz", b""))
        assert set(server.logins) | set(other.logins) == {""}


async def test_longest_place_decides_and_a_tenants_own_password_comes_first(node: Node, tmp_path: Path) -> None:
    with forge(tmp_path / "web") as server:
        source = f"git+http://{server.host}/acme/.git#{private_repository(server.root)}"
        for rule in (server.host, f"{server.host}/acme", f"other={server.host}/acme/.git"):
            write_table(node, rule, 'password = "wrong"')
        write_table(node, f"acme={server.host}/acme")
        assert "cannot be cloned" in await node.refusal(source, tenant="team")
        await node.install(source, tenant="acme")
        assert node.installed == ["csv", "pdf"]


async def test_password_is_not_sent_unencrypted_unless_the_operator_allows_it(node: Node, tmp_path: Path) -> None:
    with forge(tmp_path / "web") as server:
        write_table(node, server.host)
        node.table.write_text(node.table.read_text().replace("allows_http = true", ""))
        for source in (f"git+http://{server.host}/x#{'1' * 40}", pin(f"{server.host}/x.tar.gz", b"")):
            assert "not sent unencrypted" in await node.refusal(source)
        assert server.logins == []


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff", b"\0", b"x" * 20_000])
async def test_unfit_password_file_is_named_to_the_operator_alone(
    node: Node, tmp_path: Path, content: bytes | None
) -> None:
    secret = tmp_path / "place-of-the-secret"
    if content is None:
        os.mkfifo(secret)
    else:
        secret.write_bytes(content)
    with forge(tmp_path / "web") as server:
        write_table(node, server.host, f'password_file = "{secret}"')
        said = await node.refusal(pin(f"{server.host}/x.tar.gz", b""))
        assert "cannot read its password" in said
        assert "place-of-the-secret" not in said
        assert server.logins == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('["git.example.com/other"]\npassword = "{}"', "no such place"),
        ('["*=git.example.com/team"]\npassword = "{}"\nuser = "a:b"', "user: "),
        ('["git.example.com/team"]\npassword = "{}"\npassword_file = "/x"', "exactly one"),
        ('["git.example.com/team"]', "exactly one"),
        ('["git.example.com/team"]\npassword_file = "x"', "absolute"),
        ('["git.example.com/team"]\npassword = "{}\\nhost=evil"', "control character"),
        ('["git.example.com/team"]\npasword = "{}"', "pasword"),
        ('["git.example.com/team"]\npassword = ["{}"]', "password"),
        ('["/srv/skills"]\npassword = "{}"', "folder"),
        ('["https://git.example.com/team"]\npassword = "{}"', "cannot be used"),
        ('team = "{}"', "cannot be used"),
        ("[", "is not a table"),
        ('["git.example.com/team"]\npassword = "${{NOWHERE}}"', "NOWHERE"),
    ],
)
def test_unusable_entry_is_named_without_its_password(tmp_path: Path, entry: str, words: str) -> None:
    table = tmp_path / "credentials.toml"
    table.write_text(entry.format(PASSWORD))
    rules = "git.example.com/team,/srv/skills,team"
    with pytest.raises(UsageError) as raised:
        load_tool_settings({"DECKHANDS_SKILL_SOURCES": rules, "DECKHANDS_SKILL_CREDENTIALS": str(table)})
    said = f"{raised.value!r} {raised.value} {raised.value.remedy} {raised.value.__cause__!r}"
    assert words in said
    assert PASSWORD not in said


def test_settings_show_no_password(tmp_path: Path) -> None:
    table = tmp_path / "credentials.toml"
    table.write_text(f'["git.example.com/team"]\npassword = "${{CODE}}"\n["a.example"]\npassword_file = "{tmp_path}/p"')
    settings = load_tool_settings(
        {
            "DECKHANDS_SKILL_SOURCES": "git.example.com/team,a.example",
            "DECKHANDS_SKILL_CREDENTIALS": str(table),
            "CODE": PASSWORD,
        }
    )
    assert [one.password for one in settings.skill_credentials] == [PASSWORD, ""]
    assert PASSWORD not in repr(settings)
    assert tmp_path / "p" in settings.named.closed, "no workspace may be made of its directory"


async def test_worker_leaves_no_trace_of_a_password(cluster: FaultCluster, tmp_path: Path) -> None:
    with forge(tmp_path / "web") as server:
        source = f"git+http://{server.host}/acme/.git#{private_repository(server.root)}"
        table = tmp_path / "credentials.toml"
        rule = f"acme={server.host}/acme"
        table.write_text(f'["{rule}"]\nuser = "deploy"\npassword = "${{ACME_CODE}}"\nallows_http = true\n')
        cluster.start(
            DECKHANDS_SKILL_SOURCES=rule,
            DECKHANDS_SKILL_CREDENTIALS=str(table),
            DECKHANDS_EGRESS_PRIVATE=ALLOWED,
            ACME_CODE=PASSWORD,
        )
        theirs, others = [
            (
                await cluster.submit(
                    [finish()], task={"skills": [source], "tenant": tenant}, enable_workspace_skills=True
                )
            )[0]
            for tenant in ("acme", "other")
        ]
        await cluster.settle([theirs, others])
        assert f"Basic {LOGIN}" in server.logins
        assert server.shown == []
    events = await cluster.client.events(theirs)
    (recall,) = [event for event in events if isinstance(event, RecallObservation)]
    assert sorted(skill.name for skill in recall.available_skills or ()) == ["csv", "pdf"]
    summary = await cluster.client.summary(others)
    assert (summary.state, summary.error_code) == (AgentState.ERROR, "skills_unavailable")
    assert find_password(cluster.root) == [], "neither in the store's files, the logs, the workspaces nor the cache"
