"""The page on Python: its blocks run one after the other, on a cluster; and the client's refusals."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import deckhands
from broker.store.embedded import EmbeddedValkey
from deckhands import AgentSpec, Client, DeckhandsError, NoCluster, NotSettled, UsageError
from deckhands.client.reader import Reader
from deckhands.client.steering import Steering
from deckhands.client.transfers.files import WorkspaceFiles
from tests.integration.command_line import cluster, run_command
from tests.page_blocks import blocks_of, pages
from tests.source_code import ROOT
from tests.turns import finish, script

PAGE = ROOT / "docs" / "python.md"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("home")
    with cluster(path, "--sandbox", "none", "--workspace-root", str(tmp_path_factory.getbasetemp())):
        yield path


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    server = EmbeddedValkey(tmp_path / "store")
    await server.start()
    async with await Client.connect(server.url) as found:
        yield found
    await server.stop()


async def test_every_block_of_the_page_runs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DECKHANDS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DECKHANDS_HOME", str(home))
    directory, results = tmp_path / "work", tmp_path / "results"
    directory.mkdir()
    results.mkdir()
    writing = run_command("echo an old pond > haiku.txt")
    writing_pond = run_command("echo an old pond > haiku.txt")
    pond = finish("Done.", output={"lines": ["an old pond"]})
    monkeypatch.setenv("DECKHANDS_SANDBOX", "none")
    names: dict[str, Any] = {
        "url": (home / "cluster" / "url").read_text().strip(),
        "talk_model": script(tmp_path / "talk.json", finish("Done.")),
        "haiku_model": script(tmp_path / "haiku.json", writing_pond, pond),
        "directory": str(directory),
        "results": str(results),
        "model": script(tmp_path / "model.json", writing, finish("Done."), finish("Done again.")),
        "looping_model": script(tmp_path / "looping.json", *[run_command("ls")] * 4, finish("Done.")),
        "slow_model": script(tmp_path / "slow.json", finish("Done."), latency_seconds=60.0),
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    for block in blocks:
        code = compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        found = eval(code, names)
        if inspect.iscoroutine(found):
            await found
    assert names["commands"] == ["echo an old pond > haiku.txt"]
    assert (results / "haiku.txt").read_text() == "an old pond\n"
    assert (directory / "copy.txt").read_text() == "an old pond\n"
    async with await Client.connect() as client:
        await client.cancel(names["waiting"])
        assert (await client.wait_until_settled(names["stuck"], timeout_seconds=60)).state == "finished"


def test_every_public_name_is_in_an_example() -> None:
    used = set()
    for block in (block for page in pages() for block in blocks_of(page) if block.language == "python"):
        tree = compile(block.text, block.place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            used |= {getattr(node, "id", ""), getattr(node, "attr", "")}
            used |= {one.name for one in node.names} if isinstance(node, ast.ImportFrom) else set()
    methods = {
        name
        for owner in (Client, Steering, Reader, WorkspaceFiles)
        for name, value in vars(owner).items()
        if not name.startswith("_") and not isinstance(value, cached_property)
    }
    assert sorted((set(deckhands.__all__) | methods) - used) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": 5}, "The argument task is 5. Pass a string."),
        ({"agent": 5}, "The argument agent is 5. Pass the name of an agent"),
        ({"model": ["a"]}, "The argument model is ['a']. Pass the name of a model"),
        ({"model": ""}, "The argument model is empty."),
        ({"workspace": 5}, "The argument workspace is 5. Pass a path"),
        ({"workspace": ""}, "The name of the workspace is empty."),
        ({"workspace": "git+nowhere"}, "'git+nowhere' is not the address of a repository."),
        ({"workspace": "/no/such.tar"}, "The file /no/such.tar cannot be read: No such file or directory."),
        ({"limits": {"max_iterations": 5}}, "The argument limits is {'max_iterations': 5}. Pass Limits("),
        ({"tools": "weather"}, "The argument tools is 'weather'. Pass a list of strings."),
        ({"tools": 5}, "The argument tools is 5. Pass a list of strings."),
        ({"output": int}, "The argument output is <class 'int'>. Pass a Pydantic model or a JSON Schema."),
        (
            {"secrets": ["TOKEN"]},
            "The argument secrets is not a mapping of names to strings or SecretReference objects.",
        ),
        (
            {"secrets": {"TOKEN": 5}},
            "The argument secrets is not a mapping of names to strings or SecretReference objects. Pass {'NAME",
        ),
        ({"tenancy": "shop"}, "The argument tenancy is 'shop'. Pass Tenancy("),
        ({"title": 5}, "The argument title is 5."),
        ({"conversation_id": 5}, "The argument conversation_id is 5."),
        ({"idempotency_key": 5}, "The argument idempotency_key is 5."),
    ],
)
async def test_invalid_arguments_are_named(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        await client.submit(**{"task": "Fix it.", **arguments})
    assert str(raised.value).startswith(message)
    assert await client.recent() == []


async def test_names_and_paths_are_enough(client: Client, tmp_path: Path) -> None:
    archive = tmp_path / "project.tar"
    archive.write_bytes(b"content")
    agent = AgentSpec(enable_think=False)
    by_path = await client.submit("x", agent=agent, model="acme/large", workspace=tmp_path)
    created = (await client.events(by_path))[0]
    assert (created.agent.llm.model, created.agent.enable_think) == ("acme/large", False)
    assert created.workspace.path == str(tmp_path)
    by_archive = await client.submit("x", agent="DummyAgent", workspace=str(archive))
    created = (await client.events(by_archive))[0]
    assert (created.agent.name, created.workspace.source.name) == ("DummyAgent", "project.tar")
    cloned = await client.submit("x", workspace="git+https://example.com/a/b#main")
    assert (await client.events(cloned))[0].workspace.source.ref == "main"


async def test_waiting_that_takes_too_long_is_an_error_of_ours(client: Client) -> None:
    cid = await client.submit("x")
    with pytest.raises(NotSettled, match=rf"The conversation {cid} has not settled within 0\.01 s\.") as raised:
        await client.wait_until_settled(cid, timeout_seconds=0.01)
    assert isinstance(raised.value, DeckhandsError | TimeoutError)


async def test_without_a_cluster_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECKHANDS_URL", raising=False)
    monkeypatch.setenv("DECKHANDS_HOME", str(tmp_path))
    with pytest.raises(NoCluster, match="deckhands up"):
        await Client.connect()


def test_the_module_shows_what_there_is() -> None:
    program = "import deckhands; print(*[n for n in dir(deckhands) if n[0] != '_']); print(deckhands.__version__)"
    shown = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert set(shown[0].split()) == set(deckhands.__all__) >= {"Client", "Summary", "AgentSpec", "UsageError"}
    assert re.fullmatch(r"\d+\.\d+.*", shown[1])
    assert all(getattr(deckhands, name).__name__ == name for name in deckhands.__all__)


def test_help_shows_real_signatures() -> None:
    """No public call hides its arguments behind `*args` or `**kwargs`."""
    hidden = []
    for name in deckhands.__all__:
        found = getattr(deckhands, name)
        methods = {f".{one}": call for one, call in inspect.getmembers(found, inspect.isfunction) if one[0] != "_"}
        for suffix, call in {"": found, **(methods if inspect.isclass(found) else {})}.items():
            parameters = inspect.signature(call).parameters.values()
            kinds = {one.kind for one in parameters if one.name in ("args", "kwargs", "arguments", "options")}
            if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                hidden.append(f"{name}{suffix}{inspect.signature(call)}")
    assert hidden == []
