"""Programs of MCP servers in virtual environments: they start by themselves, and open nothing that agents can write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from tests.distributions import needed_by
from tests.integration.test_mcp import PROGRAM, offering, text_of
from tool_worker.sandbox.sandbox import list_interpreter_prefixes
from tool_worker.tools.mcp.config import McpServerSpec
from tool_worker.tools.mcp.launch import SandboxedLaunch
from tool_worker.tools.mcp.program_files import ProgramFiles, find_program_files


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the SDK, and our example server as an installed program."""
    root = tmp_path_factory.mktemp("environments") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (packages,) = root.glob("lib/python3*/site-packages")
    # The second is an extra of one that the SDK needs.
    for distribution in needed_by("mcp", "cryptography").values():
        for file in distribution.files or ():
            source, target = Path(str(file.locate())), packages / file
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    server = root / "bin" / "example-server"
    server.write_text(f"#!{root}/bin/python\n{PROGRAM.read_text()}")
    server.chmod(0o755)
    return root


def spec(command: Path | str, **fields: object) -> McpServerSpec:
    return McpServerSpec.model_validate({"name": "example", "command": str(command), "timeout": 20, **fields})


async def test_a_program_of_an_environment_starts_and_sees_nothing_else(tmp_path: Path, environment: Path) -> None:
    (environment.parent / "beside").write_text("x")
    async with offering(spec(environment / "bin" / "example-server"), tmp_path, sandbox="bwrap") as example:
        assert text_of(await example.result("echo", text="inside")) == "inside"
        seen = await example.result("look", path=str(environment.parent))
        assert seen["structuredContent"]["result"] == [environment.name]
        outside = await example.result("look", path=str(tmp_path))
        assert outside["isError"] is True
        written = await example.result("count", trace=str(environment / "trace"))
        assert written["isError"] is True
        assert not (environment / "trace").exists()


async def test_a_link_to_a_program_of_an_environment_starts_it(tmp_path: Path, environment: Path) -> None:
    (link := tmp_path / "bin" / "tool").parent.mkdir()
    link.symlink_to(environment / "bin" / "example-server")
    async with offering(spec(link), tmp_path / "node", sandbox="bwrap") as example:
        assert text_of(await example.result("echo", text="linked")) == "linked"


def test_a_name_is_found_in_the_search_path(environment: Path) -> None:
    found = find_program_files("example-server", search_path=f"/nowhere:{environment / 'bin'}")
    assert found == ProgramFiles(str(environment / "bin" / "example-server"), (environment,))
    assert find_program_files("sh", search_path=str(environment / "bin")) == ProgramFiles("sh")
    assert find_program_files("nowhere-at-all", search_path=str(environment / "bin")) == ProgramFiles("nowhere-at-all")


@pytest.mark.parametrize(
    "head",
    [
        "#!{}/bin/python\n",
        "#!/bin/sh\n'''exec' {}/bin/python \"$0\" \"$@\"\n",
        "#!/bin/sh\n'''exec' \"{}/bin/python\"\n",
    ],
)
def test_script_needs_itself_and_its_interpreters_environment(head: str, tmp_path: Path, environment: Path) -> None:
    (script := tmp_path / "script").write_text(head.format(environment))
    assert find_program_files(str(script)).read_only == (environment, script)


def test_a_program_that_is_in_no_environment_opens_nothing(tmp_path: Path) -> None:
    (script := tmp_path / "script").write_bytes(b"#!/usr/bin/env python3\0\n")
    for command in (str(script), "/usr/bin/env", str(tmp_path / "missing"), "relative/program", str(tmp_path)):
        assert find_program_files(command) == ProgramFiles(command)


def copied(environment: Path, place: Path, home: Path) -> Path:
    """Make an environment whose Python is said to be below another directory, and return its program."""
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").write_text(f"home = {home}\n")
    (program := place / "bin" / "server").write_text(f"#!{place}/bin/python\n")
    shutil.copy(os.path.realpath(environment / "bin" / "python"), place / "bin" / "python")
    return program


def test_environment_python_is_opened_if_it_is_one(tmp_path: Path, environment: Path) -> None:
    (tmp_path / "secrets" / "bin").mkdir(parents=True)
    program = copied(environment, tmp_path / "a", tmp_path / "secrets" / "bin")
    assert find_program_files(str(program)).read_only == (tmp_path / "a",)
    (library := tmp_path / "python" / "lib" / "python3.99").mkdir(parents=True)
    (library / "os.py").touch()
    program = copied(environment, tmp_path / "b", tmp_path / "python" / "bin")
    assert find_program_files(str(program)).read_only == (tmp_path / "b", tmp_path / "python")
    for home in ("/bin", "/usr/bin", f"{list_interpreter_prefixes()[0]}/bin", "bin", ""):
        program = copied(environment, tmp_path / f"c{abs(hash(home))}", Path(home))
        assert len(find_program_files(str(program)).read_only) == 1


def refused(program: Path, closed: Sequence[Path], **more: object) -> str:
    with pytest.raises(UsageError) as error:
        find_program_files(str(program), closed=closed, **more)  # type: ignore[arg-type]
    return str(error.value)


def test_nothing_that_an_agent_can_write_is_opened(tmp_path: Path, environment: Path) -> None:
    workspace = tmp_path / "workspace"
    inside = copied(environment, workspace / ".venv", Path("/usr/bin"))
    assert "agents can write there" in refused(inside, [workspace])
    assert "agents can write there" in refused(inside, [workspace / ".venv" / "lib"])
    assert find_program_files(str(inside), closed=[workspace], shown=[workspace / ".venv"]).read_only == ()
    (link := workspace / "link").symlink_to(tmp_path / "outside")
    outside = copied(environment, tmp_path / "outside" / "venv", Path("/usr/bin"))
    assert "agents can write there" in refused(link / "venv" / "bin" / "server", [workspace])
    assert find_program_files(str(outside), closed=[workspace]).read_only == (tmp_path / "outside" / "venv",)
    (alias := tmp_path / "alias").symlink_to(workspace)
    assert "agents can write there" in refused(alias / ".venv" / "bin" / "server", [workspace])
    library = workspace / "python" / "lib" / "python3.99"
    library.mkdir(parents=True)
    (library / "os.py").touch()
    forged = copied(environment, tmp_path / "forged", workspace / "python" / "bin")
    assert "agents can write there" in refused(forged, [workspace])


def test_a_node_keeps_its_own_directory_closed(tmp_path: Path, environment: Path) -> None:
    program = copied(environment, tmp_path / "node" / "workspaces" / "w", Path("/usr/bin"))
    with pytest.raises(UsageError, match="agents can write there"):
        SandboxedLaunch("bwrap", tmp_path / "node")(spec(program))
