"""Every block of every page, as a reader who follows the page runs it: offline, on one cluster, with scripted models.

Each page, or part of one, has its directory, with the files of `prepare` and the named files of the page. Its blocks run in their order;
`ID` is a conversation. `# … exit code 3` after a command is its expected exit code, all others succeed.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.contract.policies import LoopPolicy
from deckhands import AgentSpec, Client, ConfirmationPolicy
from tests.forked_commands import forked_commands
from tests.integration.command_line import cluster, environment, read_until, run_command
from tests.model_server.running_server import RunningModelServer
from tests.page_blocks import RUN_ELSEWHERE, SHELL, Block, blocks_of, pages
from tests.source_code import ROOT
from tests.turns import call, finish, script

LIMIT_SECONDS = 120.0
BLOCKS = [block for page in pages() for block in blocks_of(page) if block.part not in RUN_ELSEWHERE]
PARTS = list(
    dict.fromkeys(block.part for block in BLOCKS if block.language in (*SHELL, "python") and not block.not_run)
)
WRITING = run_command("mkdir -p src web build; echo 1 > src/a.py; echo old > notes.txt")
ASKED = [run_command(f"echo {number} > asked.txt") for number in range(9)]
COUNTED = finish("Done.", output={"packages": {"shop": 3}})
PLANNED = call("propose_plan", plan="Read less.")
PYTEST = run_command("mkdir -p ~/.local/bin && ln -sf /bin/true ~/.local/bin/pytest")
MODELS: Mapping[str, list[dict[str, Any]]] = {
    "default": [WRITING, run_command("ls"), *[COUNTED] * 9],
    "asking": ASKED,
    "looping": [*[run_command("ls")] * 4, finish("Done.")],
    "long": [finish("Done.")] * 9,
    "planner": [PLANNED],
    "pusher": [run_command("git push --force"), finish("Done.")],
    "spare": [finish("Done.")] * 9,
    "tester": [PYTEST, finish("Done.")],
}
"""The profiles by which the pages' models are played; the first one where a block names none."""
NAMED_MODELS = ("anthropic/claude-sonnet-4-5", "anthropic/claude-opus-4-1", "anthropic/claude-opus-4-5", "acme/small")
"""Models that commands of the pages name, played by a server."""
AGENTS = {
    "finished": AgentSpec(),
    "asking": AgentSpec(confirmation=ConfirmationPolicy(mode="always")),
    "looping": AgentSpec(loop_policy=LoopPolicy()),
}
"""What `ID` may stand for; each command about one that is not over gets another one."""
PROVIDER = '{"turns": [{"text": "ACCEPTED", "tool_calls": [{"name": "finish", "arguments": {"message": "Done."}}]}]}'
LATEST_NOTE = """$(deckhands notes engine --json | tail -1 | sed 's/.*"id": *"\\([^"]*\\)".*/\\1/')"""
RUN_AND_NOTE = """set -u
cd "$1"
trap 'echo "$LINENO:$?" >> "$2"' ERR
"""


@dataclass
class Reader:
    """A reader who follows a page.

    Attributes:
        directory: where; below the root that the shared cluster serves.
        env: leads to the shared cluster, until a block starts one for this page.
        names: of the page's Python blocks.
    """

    directory: Path
    env: dict[str, str]
    private: ExitStack
    names: dict[str, Any] = field(default_factory=dict)
    _finished: str = ""

    async def follow(self, block: Block) -> None:
        """Run a block, or write the file that it is."""
        if block.file:
            path = self.directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.not_run or block.how.is_later or (block.file and block.language != "python"):
            return
        if block.language == "python":
            await self._execute(block)
        elif block.language in SHELL and re.search(r"deckhands (up|tools)\b(?!.*--list)", block.commands):
            await asyncio.to_thread(self._start, block)
        elif block.language in SHELL:
            await self._call(block)

    async def _execute(self, block: Block) -> None:
        with pytest.MonkeyPatch.context() as patch, chdir(self.directory):
            for name in [name for name in os.environ if name.startswith(("DECKHANDS_", "LLM_"))]:
                patch.delenv(name)
            patch.setenv("DECKHANDS_HOME", self.env["DECKHANDS_HOME"])
            text = "\n" * block.line + block.text
            code = compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(code, self.names)
            if inspect.iscoroutine(found):
                await asyncio.wait_for(found, LIMIT_SECONDS)

    def _start(self, block: Block) -> None:
        """Start the page's cluster; later commands find it as a reader's commands do."""
        self.env |= {"DECKHANDS_HOME": str(self.directory / "home")}
        command = ["bash", "-c", block.commands]
        running = subprocess.Popen(
            command, cwd=self.directory, env=self.env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.private.callback(_stop, running)
        read_until(running, "Ctrl-C stops it")
        self._finished = ""

    async def _call(self, block: Block) -> None:
        """Run the commands in one shell, and compare their exit codes with those that the block names."""
        env = self.env | ({"LLM_MODEL": block.how.model} if block.how.model else {})
        if block.how.is_private:
            env |= {"DECKHANDS_HOME": str(self.directory / "home")}
        lines = [await self._named(line, block) for line in block.commands.splitlines()]
        wanted = {number: int(code) for number, code in _codes(lines)}
        failures = self.directory / "failures"
        failures.unlink(missing_ok=True)
        before = len(RUN_AND_NOTE.splitlines())
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", RUN_AND_NOTE + "\n".join(lines), "bash", str(self.directory), str(failures)],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        noted = failures.read_text().split() if failures.exists() else []
        codes = {int(number) - before: int(code) for number, code in (note.split(":") for note in noted)}
        shown = f"{block.place}\n{done.stdout}\n{done.stderr}"
        assert codes == wanted, f"{codes} where the page says {wanted}: {shown}"
        assert block.how.shows in done.stdout, shown
        assert set(block.shown) <= set(done.stdout.splitlines()), shown

    @property
    def _url(self) -> str:
        return (Path(self.env["DECKHANDS_HOME"]) / "cluster" / "url").read_text().strip()

    async def _named(self, line: str, block: Block) -> str:
        """Return a command with a conversation for `ID`, and a note for `NOTE`."""
        command, mark, comment = line.partition("  #")
        command = re.sub(r"\bNOTE\b", lambda _: LATEST_NOTE, command)
        if re.search(r"\bID\b", command):
            command = re.sub(r"\bID\b", await self._conversation(block.how.id_of), command)
        if not block.how.is_private:  # `run` would start workers for itself
            command = re.sub(r"(\S*deckhands run )", f"DECKHANDS_URL={self._url} \\1", command)
        return command + mark + comment

    async def _conversation(self, kind: str) -> str:
        if kind == "finished" and self._finished:
            return self._finished
        model = None if kind == "finished" else kind
        async with await Client.connect(self._url) as client:
            conversation_id = await client.submit("Do it.", agent=AGENTS[kind], model=model)
            await client.wait_until_settled(conversation_id, timeout_seconds=LIMIT_SECONDS)
        if kind == "finished":
            self._finished = conversation_id
        return conversation_id

    async def see_that_all_went_well(self) -> None:
        """Wait for every conversation; none may have failed."""
        async with await Client.connect(self._url) as client:
            for row in await client.recent(limit=1_000):
                summary = await client.wait_until_settled(row.conversation_id, timeout_seconds=LIMIT_SECONDS)
                assert summary.state != "error", (summary.title, summary.last_error)


def _codes(lines: list[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        if named := re.search(r"  # .*\bexit code (\d+)", line):
            yield number, named[1]


def _stop(running: subprocess.Popen[str]) -> None:
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=LIMIT_SECONDS)


def prepare(directory: Path) -> None:
    for name in ("path/of/project", "copy/of/project", "assets", "path/of/conversations"):
        (directory / name).mkdir(parents=True)
    (directory / "path/of/project/README.md").write_text("A project.\n")
    (directory / "counts.json").write_text(
        '{"type": "object", "properties": {"packages": {"type": "object"}}, "required": ["packages"]}'
    )
    (directory / "password.txt").write_text("a password of nobody\n")
    (directory / "fix.patch").write_text("")
    shutil.copytree(
        ROOT / "tests/unit/deckhands/interop/openhands/sdk_conversation", directory / "path/of/conversations/b65e5576…"
    )
    with tarfile.open(directory / "shop.tar.gz", "w:gz") as archive:
        archive.add(directory / "path/of/project", "shop")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    project = directory / "path/of/project"
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *arguments], cwd=project, check=True)
    bundle = [*git, "bundle", "create", "-q", str(directory / "shop.bundle"), "main"]
    subprocess.run(bundle, cwd=project, check=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields the directory that the shared cluster serves, and the environment that leads to that cluster."""
    base = tmp_path_factory.mktemp("pages")
    served, home, path, site = base / "served", base / "home", base / "bin", base / "site"
    for directory in (served, home, path, site):
        directory.mkdir()
    install_poets(site)
    (base / "provider.json").write_text(PROVIDER)
    with ExitStack() as stack:
        provider = RunningModelServer(["--script", str(base / "provider.json")])
        stack.callback(provider.stop)
        tables = [
            f'[{"llm" if name == "default" else f"llm.{name}"}]\nmodel = "{script(base / f"{name}.json", *turns)}"\n'
            for name, turns in MODELS.items()
        ]
        tables[0] += f'base_url = "{provider.url}"\napi_key = "none"\n'  # for the models that the pages name
        tables += [f'[llm.named-{number}]\nmodel = "{model}"\n' for number, model in enumerate(NAMED_MODELS)]
        (base / "models.toml").write_text("".join(tables))
        variables = {"LLM_CONFIG": str(base / "models.toml")}
        stack.enter_context(cluster(home, "--workspace-root", str(served), PYTHONPATH=str(site), **variables))
        stack.enter_context(forked_commands(path))
        search = f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield served, environment(home, PATH=search, **variables)


def install_poets(site: Path) -> None:
    """Install the package of docs/agents.md as an installer would."""
    files = {block.file: block.text for block in blocks_of("docs/agents.md") if block.file}
    (site / "poets.py").write_text(files["poets.py"])
    described = site / "poets-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: poets\nVersion: 1\n")
    points = re.findall(r'^\[project\.entry-points\."(.+)"\]\n((?:\w.*\n)+)', files["pyproject.toml"], re.MULTILINE)
    (described / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{text.replace(chr(34), '')}" for group, text in points)
    )


@pytest.mark.parametrize("part", PARTS)
async def test_every_block_of_the_page_runs(world: tuple[Path, dict[str, str]], part: str) -> None:
    served, env = world
    directory = served / re.sub("[/#]", "-", part)
    prepare(directory)
    (directory / ".venv" / "bin").mkdir(parents=True)
    (directory / ".venv" / "bin" / "deckhands").symlink_to(served.parent / "bin" / "deckhands")
    with ExitStack() as private:
        reader = Reader(directory, dict(env), private)
        for block in BLOCKS:
            if block.part == part:
                await reader.follow(block)
        await reader.see_that_all_went_well()
