"""IPython: a real kernel in a workspace; values live on, pictures come out, and nothing it does takes the host along.

Packages that an agent installs without a network are seen by its shell and its kernel."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psutil
import pytest
import pytest_asyncio

from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation
from broker.contract.session_events import IPythonRunCellAction, IPythonRunCellObservation
from tests.integration.workspace_hosts import LIMIT_SECONDS, Output, gone, main_pid, opened, output, processes
from tests.polling import until
from tests.programs import command_of
from tool_worker.sandbox.control_groups import ControlGroups
from tool_worker.sandbox.sandbox import ResourceLimits
from tool_worker.tools.ipython import RunCell
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.launch.session_programs import find_session_programs
from tool_worker.workspace.open_workspace import OpenWorkspace
from tool_worker.workspace.workspaces import Workspaces

PROGRAMS = find_session_programs(["ipython"])
SETTINGS: dict[str, Any] = {"programs": PROGRAMS}
CONVERSATION = "conversation-1"
INSTALL_SECONDS = 300.0
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"  # 1 x 1, black


class Notebook:
    """Runs cells in a workspace under ids of their own."""

    def __init__(self, workspace: OpenWorkspace, ids: itertools.count[int]) -> None:
        self.workspace = workspace
        self.ids = ids

    async def __call__(
        self, code: str, *, include_extra: bool = False, timeout: float | None = INSTALL_SECONDS
    ) -> Observation:
        action = IPythonRunCellAction(code=code, include_extra=include_extra, timeout=timeout)
        request = RunCell().request(action)
        result = await self.workspace.run(next(self.ids), request.tool, request.arguments)
        return RunCell().observe(action, result.value)

    async def text(self, code: str, **options: Any) -> str:
        observation = await self(code, **options)
        assert isinstance(observation, IPythonRunCellObservation), observation
        return observation.content

    async def shell(self, command: str) -> Output:
        arguments = {"command": command, "timeout": INSTALL_SECONDS, "blocking": True}
        return output(dict((await self.workspace.run(next(self.ids), "bash", arguments)).value))

    async def bash(self, command: str) -> str:
        return (await self.shell(command)).content


async def notebook_in(workspaces: Workspaces) -> Notebook:
    return Notebook(await workspaces.open(CONVERSATION), itertools.count(1))


def kill_program(node: Path) -> None:
    [program] = [found for found in processes(node, CONVERSATION) if "ipython_session" in " ".join(command_of(found))]
    program.kill()


@pytest.fixture
async def workspaces(tmp_path: Path) -> AsyncIterator[Workspaces]:
    async with opened(tmp_path / "node", **SETTINGS) as found:
        yield found


@pytest.fixture
async def run(workspaces: Workspaces) -> Notebook:
    return await notebook_in(workspaces)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Notebook]:
    """A notebook for all tests that may share one."""
    async with opened(tmp_path_factory.mktemp("node"), **SETTINGS) as workspaces:
        yield await notebook_in(workspaces)


with_one_kernel = pytest.mark.asyncio(loop_scope="module")


@with_one_kernel
async def test_a_cell_sees_its_key(kernel: Notebook) -> None:
    code = "import os; print(os.environ['DECKHANDS_IDEMPOTENCY_KEY'])"
    for key in ("c-1", "c-2"):
        arguments = {"code": code, "include_extra": False, "variables": {"DECKHANDS_IDEMPOTENCY_KEY": key}}
        result = await kernel.workspace.run(next(kernel.ids), "ipython", arguments)
        assert result.value["content"] == key


async def test_setting_the_key_has_the_limit_of_the_cell(run: Notebook) -> None:
    assert await run.text("import os, threading; os.environ.update = lambda given: threading.Event().wait()") == ""
    arguments = {"code": "print('ran')", "include_extra": False, "variables": {"A": "b"}, "timeout": 1}
    async with asyncio.timeout(60):
        result = await run.workspace.run(next(run.ids), "ipython", arguments)
    assert result.value["content"].startswith("[Execution timed out (1 seconds).")
    assert "ran" not in result.value["content"]


@with_one_kernel
async def test_values_live_from_cell_to_cell(kernel: Notebook) -> None:
    assert await kernel.text("a = 20") == ""
    assert await kernel.text("print('sum'); a + 1") == "sum\n21"
    assert await kernel.text("import sys; print('warned', file=sys.stderr)") == "warned"


async def test_cell_after_host_death_names_losses_and_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", **SETTINGS) as workspaces:
        run = await notebook_in(workspaces)
        assert await run.text("a = 20") == ""
        temporary = HostFolder(tmp_path, CONVERSATION).temporary
        [left] = temporary.glob(".ipython-*")
        os.kill(main_pid(tmp_path, CONVERSATION), signal.SIGKILL)
        assert await wait_until_dead(HostFolder(tmp_path, CONVERSATION), LIMIT_SECONDS)
        text = await run.text("'a' in globals()")
        told = "[This is a new ipython session. What an earlier one held, such as variables or open pages, is lost.]\n"
        assert text == told + "False"
        assert await run.text("1") == "1"
        await until(lambda: not left.exists(), what="removal of what the first kernel left")


@pytest.mark.skipif(isinstance(ControlGroups.find(), str), reason="no control groups here")
async def test_kernel_out_of_memory_names_its_limit(tmp_path: Path) -> None:
    limits = ResourceLimits(memory_bytes=200 << 20)
    async with opened(tmp_path, sandbox="bwrap", limits=limits, **SETTINGS) as workspaces:
        run = await notebook_in(workspaces)
        assert await run.text("1") == "1"
        observation = await run("b = bytearray(800 << 20)")
        assert "All programs of this workspace together may use 200 MiB" in observation.content


@with_one_kernel
async def test_an_error_is_read_without_colours(kernel: Notebook) -> None:
    text = await kernel.text("def f():\n    return 1 / 0\nf()")
    assert "ZeroDivisionError: division by zero" in text
    assert "\x1b" not in text


@with_one_kernel
async def test_of_long_output_the_beginning_and_the_end_are_kept(kernel: Notebook) -> None:
    text = await kernel.text("print('begun'); print('x' * 3_000_000); 1 / 0")
    assert text.startswith("begun\nxxx")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert text.count("[... Observation truncated due to length ...]") == 1
    assert 900_000 < len(text) < 1_010_000


@with_one_kernel
async def test_output_is_plain_text(kernel: Notebook) -> None:
    assert await kernel.text("for n in range(100): print(f'\\r{n} %', end='', flush=True)") == "99 %"
    assert await kernel.text("print('a\\0b\\x07c\\x1b[31mred\\x1b[0m')") == "abcred"
    assert await kernel.text("!echo hi") == "hi"
    assert "Return the number of items in a container." in await kernel.text("len?")


@with_one_kernel
async def test_pictures_come_out(kernel: Notebook) -> None:
    code = f"import base64\nfrom IPython.display import Image\nImage(data=base64.b64decode('{PIXEL}'))"
    observation = await kernel(code)
    assert isinstance(observation, IPythonRunCellObservation)
    assert observation.image_urls == (f"data:image/png;base64,{PIXEL}",)
    assert observation.content == "<IPython.core.display.Image object>"


@with_one_kernel
async def test_result_without_plain_text_is_shown_as_source(kernel: Notebook) -> None:
    shown = await kernel.text(
        "from IPython.display import HTML, JSON, Latex, Markdown\ndisplay(Markdown('# *One*'))\nHTML('<b>2</b>')"
    )
    assert shown == "# *One*\n<b>2</b>"
    assert await kernel.text("display(Latex('$x^2$'), JSON({'a': [1]}))") == '$x^2$\n{"a": [1]}'
    assert await kernel.text("display({'text/html': '<i>only</i>'}, raw=True)") == "<i>only</i>"
    table = "class T:\n    _repr_html_ = lambda self: '<table>'\n    __repr__ = lambda self: 'a b'\nT()"
    assert await kernel.text(table) == "a b"


async def test_where_the_kernel_is_and_which_python(run: Notebook, tmp_path: Path) -> None:
    text = await run.text("1", include_extra=True)
    first, place, interpreter = text.splitlines()
    assert first == "1"
    workspace = tmp_path / "node" / CONVERSATION
    assert place.startswith(f"[Jupyter current working directory: {workspace}")
    assert interpreter.startswith("[Jupyter Python interpreter: /")


async def test_kernel_uses_the_shells_directory_until_a_cell_changes_it(run: Notebook) -> None:
    await run.bash("mkdir -p one two && cd one")
    assert (await run.text("import os; os.path.basename(os.getcwd())")) == "'one'"
    await run.text("os.chdir('/')")
    assert (await run.text("os.getcwd()")) == "'/'"
    await run.bash("cd ../two")
    assert (await run.text("os.path.basename(os.getcwd())")) == "'two'"


@with_one_kernel
@pytest.mark.parametrize(
    ("wait", "error"),
    [
        ("import time; time.sleep(60)", "KeyboardInterrupt"),
        ("import asyncio; await asyncio.sleep(60)", "CancelledError"),
    ],
)
async def test_slow_cell_is_interrupted_and_variables_live(kernel: Notebook, wait: str, error: str) -> None:
    await kernel.text("kept = 7")
    late = await kernel.text(f"print('begun', flush=True); {wait}", timeout=1.0)
    assert late.startswith("begun\n")
    assert error in late
    ending = "[Execution timed out (1 seconds). Variables are kept. A cell that needs longer takes a `timeout`.]"
    assert late.endswith(ending)
    assert await kernel.text("kept") == "7"


async def test_a_cell_that_ignores_interrupts_loses_its_kernel(run: Notebook) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    late = await run.text(deaf, timeout=1.0)
    assert late == (
        "[Execution timed out (1 seconds). The kernel was killed; its variables are lost. "
        "A cell that needs longer takes a `timeout`.]"
    )
    assert await run.text("2") == "2"


async def test_a_cell_is_stopped_by_a_cancel(run: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    await run.text("kept = 8")
    running = asyncio.create_task(run(f"print('in'); open({str(gate)!r}).read()"))
    descriptor = await asyncio.to_thread(os.open, gate, os.O_WRONLY)  # returns when the cell has opened it
    assert await run.workspace.interrupt(2)
    async with asyncio.timeout(LIMIT_SECONDS):
        stopped = await running
    os.close(descriptor)
    assert stopped.content.endswith("[The cell was interrupted.]")
    assert await run.text("kept") == "8"


@with_one_kernel
async def test_a_kernel_that_dies_is_replaced_and_the_model_told(kernel: Notebook) -> None:
    await kernel.text("lost = 1")
    died = await kernel.text("import os; os._exit(3)")
    assert died == "[The kernel died, and its variables are lost. The next cell starts a new one.]"
    assert "NameError" in await kernel.text("lost")


@with_one_kernel
async def test_a_restart_is_asked_for(kernel: Notebook) -> None:
    await kernel.text("lost = 1")
    assert await kernel.text("%restart") == "[The kernel was restarted; its variables are lost.]"
    assert "NameError" in await kernel.text("lost")


async def test_the_session_program_may_be_killed(run: Notebook, tmp_path: Path) -> None:
    await run.text("lost = 1")
    kill_program(tmp_path / "node")
    answer = await run("2")
    if isinstance(answer, ErrorObservation):  # the call came before its death was noticed
        assert answer.content.startswith("ERROR: ipython ended.")
        answer = await run("2")
    assert answer.content.endswith("2")


async def test_the_kernel_outlives_the_tool_worker(workspaces: Workspaces, run: Notebook, tmp_path: Path) -> None:
    await run.text("kept = 9")
    await workspaces.aclose()
    async with opened(tmp_path / "node", **SETTINGS) as later:
        again = Notebook(await later.open(CONVERSATION), run.ids)
        assert await again.text("kept") == "9"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tool worker's directory of temporary files; short, because it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


async def test_what_a_killed_session_program_left_goes_with_it(tmp_path: Path, temporary: Path) -> None:
    async with opened(tmp_path / "node", **SETTINGS) as workspaces:
        run = await notebook_in(workspaces)
        pid = await run.text("import os, tempfile; tempfile.mkdtemp(); os.getpid()")
        assert len(list(temporary.rglob("kernel-*"))) == 1
        assert len(list(temporary.rglob("tmp*"))) == 1
        kill_program(tmp_path / "node")
        await until(lambda: not list(temporary.glob("*/.ipython-*")), what="end of its files")
        await until(lambda: not psutil.pid_exists(int(pid)), what="end of its kernel")


async def test_killed_hosts_leftovers_go_on_reopening_or_closing(tmp_path: Path, temporary: Path) -> None:
    async with opened(tmp_path / "node", **SETTINGS) as workspaces:
        run = await notebook_in(workspaces)
        for _ in range(2):
            await run.text("1")
            assert len(list(temporary.rglob("kernel-*"))) == 1
            pid = main_pid(tmp_path / "node", CONVERSATION)
            os.kill(pid, signal.SIGKILL)
            await gone(pid)
            run.workspace = await workspaces.open(CONVERSATION)
            assert not list(temporary.rglob("kernel-*"))
        await run.text("1")
        os.kill(main_pid(tmp_path / "node", CONVERSATION), signal.SIGKILL)
        await workspaces.close(CONVERSATION)
        assert not list(temporary.iterdir())


async def test_unsandboxed_shell_has_removable_temporary_files(tmp_path: Path, temporary: Path) -> None:
    async with opened(tmp_path / "node") as workspaces:
        run = await notebook_in(workspaces)
        made = Path(await run.bash("mktemp"))
        assert made.is_relative_to(temporary)
        assert made.exists()
        await workspaces.close(CONVERSATION)
        assert not list(temporary.iterdir())


async def test_nothing_of_it_is_left_when_the_workspace_is_closed(
    workspaces: Workspaces, run: Notebook, tmp_path: Path
) -> None:
    await run.text("import subprocess; child = subprocess.Popen(['sleep', '1000'])")
    found = processes(tmp_path / "node", CONVERSATION)
    assert [process for process in found if command_of(process) == ["sleep", "1000"]]
    await workspaces.close(CONVERSATION)
    await until(lambda: not any(process.is_running() for process in found), what="end of the processes")


async def test_it_runs_in_the_sandbox(tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox="bwrap", **SETTINGS) as workspaces:
        run = await notebook_in(workspaces)
        assert await run.text("import os; os.getcwd()") == "'/workspace'"
        await run.text("open('made', 'w').write('x')")
        assert await run.bash("cat made") == "x"
        assert await run.text(f"os.path.exists({str(tmp_path)!r})") == "False"


def wheel(folder: Path, name: str, version: str) -> None:
    """Make a package with one module, which holds its version, and one command, which prints it."""
    info = f"{name}-{version}.dist-info"
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = '{version}'\ndef main():\n    print('{name}', VERSION)\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Notebook]:
    async with opened(tmp_path, sandbox="bwrap", **SETTINGS) as workspaces:
        workspace = await workspaces.open("conversation")
        folder = tmp_path / "conversation" / "workspace"
        for name, version in (("fromshell", "1.0"), ("fromcell", "1.0"), ("fromcell", "2.0")):
            wheel(folder, name, version)
        yield Notebook(workspace, itertools.count(1))


async def test_shell_installs_are_importable_in_shell_and_running_kernel(agent: Notebook) -> None:
    assert await agent.text("import importlib.util; importlib.util.find_spec('fromshell')") == ""
    done = await agent.shell("pip install ./fromshell-1.0-py3-none-any.whl --no-index")
    assert done.exit_code == 0, done.content
    assert (await agent.shell("fromshell; python3 -c 'import fromshell; fromshell.main()'")).content == (
        "fromshell 1.0\nfromshell 1.0"
    )
    assert await agent.text("import fromshell; fromshell.VERSION") == "'1.0'"


async def test_cell_installs_are_importable_in_kernel_and_shell(agent: Notebook) -> None:
    installed = await agent.text("%pip install ./fromcell-1.0-py3-none-any.whl --no-index")
    assert "Successfully installed fromcell-1.0" in installed
    assert await agent.text("import fromcell; fromcell.VERSION") == "'1.0'"
    assert (await agent.shell("fromcell; python3 -c 'import fromcell; fromcell.main()'")).content == (
        "fromcell 1.0\nfromcell 1.0"
    )
    upgraded = await agent.text("!pip install ./fromcell-2.0-py3-none-any.whl --no-index")
    assert "Successfully installed fromcell-2.0" in upgraded
    assert await agent.text("import importlib; importlib.reload(fromcell).VERSION") == "'2.0'"


async def test_editable_project_installs_are_importable(agent: Notebook) -> None:
    assert await agent.text("1") == "1"
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    await agent.shell("mkdir -p project && echo \"VALUE = 'edited'\" > project/editable.py")
    # The files of `pip install -e`; pip itself would need a build backend from the network.
    assert (await agent.shell(f"mkdir -p {site}; echo $PWD/project > {site}/editable.pth")).exit_code == 0
    assert await agent.text("import editable; editable.VALUE") == "'edited'"


async def test_a_virtual_environment_of_the_agent_gets_its_own_packages(agent: Notebook) -> None:
    made = await agent.shell("python3 -m venv --without-pip environment")
    assert made.exit_code == 0, made.content
    installed = await agent.shell(
        "pip --python environment/bin/python install ./fromshell-1.0-py3-none-any.whl --no-index"
    )
    assert installed.exit_code == 0, installed.content
    assert (await agent.shell("environment/bin/fromshell; fromshell")).content.startswith("fromshell 1.0\n")
    assert (await agent.shell("command -v fromshell")).exit_code == 1


async def test_names_of_the_kernel_are_the_agents_alone(agent: Notebook) -> None:
    names = "[name for name in globals() if not name.startswith('_')]"
    assert await agent.text(names) == "['In', 'Out', 'get_ipython', 'exit', 'quit', 'open']"
    assert await agent.text("In") == f"['', \"{names}\", 'In']"
