"""Packages that an agent installs without a network, in real sandboxes: the shell and the kernel see each other's."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from broker.contract.session_events import IPythonRunCellAction, IPythonRunCellObservation
from tests.integration.workspace_hosts import Output, opened, output
from tool_worker.tools.ipython import RunCell
from tool_worker.workspace.launch.session_programs import find_session_programs
from tool_worker.workspace.open_workspace import OpenWorkspace

LIMIT_SECONDS = 300.0


def wheel(folder: Path, name: str, version: str) -> None:
    """Make a package with one module, which holds its version, and one command, which prints it."""
    info = f"{name}-{version}.dist-info"
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = '{version}'\ndef main():\n    print('{name}', VERSION)\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        file.writestr(f"{info}/RECORD", "")


class Agent:
    """Commands and cells in one workspace."""

    def __init__(self, workspace: OpenWorkspace) -> None:
        self._workspace = workspace
        self._ids = itertools.count(1)

    async def bash(self, command: str) -> Output:
        arguments = {"command": command, "timeout": LIMIT_SECONDS, "blocking": True}
        return output(dict((await self._workspace.run(next(self._ids), "bash", arguments)).value))

    async def cell(self, code: str) -> str:
        action = IPythonRunCellAction(code=code, include_extra=False, timeout=LIMIT_SECONDS)
        request = RunCell().request(action)
        result = await self._workspace.run(next(self._ids), request.tool, request.arguments)
        observation = RunCell().observe(action, result.value)
        assert isinstance(observation, IPythonRunCellObservation), observation
        return observation.content


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    async with opened(tmp_path, sandbox="bwrap", programs=find_session_programs(["ipython"])) as workspaces:
        workspace = await workspaces.open("conversation")
        folder = tmp_path / "conversation" / "workspace"
        for name, version in (("fromshell", "1.0"), ("fromcell", "1.0"), ("fromcell", "2.0")):
            wheel(folder, name, version)
        yield Agent(workspace)


async def test_shell_installs_are_importable_in_shell_and_running_kernel(
    agent: Agent,
) -> None:
    assert await agent.cell("import importlib.util; importlib.util.find_spec('fromshell')") == ""
    done = await agent.bash("pip install ./fromshell-1.0-py3-none-any.whl --no-index")
    assert done.exit_code == 0, done.content
    assert (await agent.bash("fromshell; python3 -c 'import fromshell; fromshell.main()'")).content == (
        "fromshell 1.0\nfromshell 1.0"
    )
    assert await agent.cell("import fromshell; fromshell.VERSION") == "'1.0'"


async def test_cell_installs_are_importable_in_kernel_and_shell(agent: Agent) -> None:
    installed = await agent.cell("%pip install ./fromcell-1.0-py3-none-any.whl --no-index")
    assert "Successfully installed fromcell-1.0" in installed
    assert await agent.cell("import fromcell; fromcell.VERSION") == "'1.0'"
    assert (await agent.bash("fromcell; python3 -c 'import fromcell; fromcell.main()'")).content == (
        "fromcell 1.0\nfromcell 1.0"
    )
    upgraded = await agent.cell("!pip install ./fromcell-2.0-py3-none-any.whl --no-index")
    assert "Successfully installed fromcell-2.0" in upgraded
    assert await agent.cell("import importlib; importlib.reload(fromcell).VERSION") == "'2.0'"


async def test_editable_project_installs_are_importable(agent: Agent) -> None:
    assert await agent.cell("1") == "1"
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    await agent.bash("mkdir -p project && echo \"VALUE = 'edited'\" > project/editable.py")
    # What `pip install -e` leaves; pip itself would need a build backend from the network.
    assert (await agent.bash(f"mkdir -p {site}; echo $PWD/project > {site}/editable.pth")).exit_code == 0
    assert await agent.cell("import editable; editable.VALUE") == "'edited'"


async def test_a_virtual_environment_of_the_agent_gets_its_own_packages(agent: Agent) -> None:
    made = await agent.bash("python3 -m venv --without-pip environment")
    assert made.exit_code == 0, made.content
    installed = await agent.bash(
        "pip --python environment/bin/python install ./fromshell-1.0-py3-none-any.whl --no-index"
    )
    assert installed.exit_code == 0, installed.content
    assert (await agent.bash("environment/bin/fromshell; fromshell")).content.startswith("fromshell 1.0\n")
    assert (await agent.bash("command -v fromshell")).exit_code == 1


async def test_names_of_the_kernel_are_the_agents_alone(agent: Agent) -> None:
    names = "[name for name in globals() if not name.startswith('_')]"
    assert await agent.cell(names) == "['In', 'Out', 'get_ipython', 'exit', 'quit', 'open']"
    assert await agent.cell("In") == f"['', \"{names}\", 'In']"
