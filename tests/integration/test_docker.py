"""Containers as workspaces, by a real engine: their rights, their nodes, and their lifetimes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.membership import list_members
from broker.tools.mcp_config import McpServerSpec
from tests.docker_image import image
from tests.faults.harness import FaultCluster
from tests.integration.workspace_hosts import Gate, Terminal, answer, client, opened
from tests.polling import until
from tool_worker.errors import SandboxUnavailable, WorkspaceRefused, WorkspaceUnavailable
from tool_worker.sandbox.docker import ContainerSettings, DockerSandbox
from tool_worker.sandbox.sandbox import ResourceLimits
from tool_worker.sandbox.selftest import run_self_test
from tool_worker.settings import load_tool_settings
from tool_worker.tools.mcp.launch import SandboxedLaunch
from tool_worker.worker.examination import examine
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.session_programs import find_session_programs
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.workspaces import Workspaces

pytestmark = pytest.mark.docker
GATE = EgressGate(private=("127.0.0.2/32",))
LIMITS = ResourceLimits(processes=64, memory_bytes=256 * 2**20)


@pytest.fixture(scope="module")
def containers() -> ContainerSettings:
    return ContainerSettings((image(),), cpus=1.0)


@asynccontextmanager
async def docked(root: Path, containers: ContainerSettings, **settings: object) -> AsyncIterator[Workspaces]:
    async with opened(root, sandbox="docker", containers=containers, limits=LIMITS, **settings) as workspaces:
        yield workspaces
    # The engine removes what has ended a moment later.
    await until(lambda: not running(root))


def running(root: Path) -> list[str]:
    listed = ["docker", "ps", "--all", "--quiet", "--filter", f"label=deckhands.root={root}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()


def inspected(container: str, form: str) -> str:
    asked = ["docker", "inspect", "--format", form, container]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


async def test_a_container_is_closed(tmp_path: Path, containers: ContainerSettings) -> None:
    async with docked(tmp_path, containers) as workspaces:
        run = Terminal(await workspaces.open("closed"))
        found = await run(
            "id -u; grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status; touch /bin/x 2>&1 | grep -c Read-only; "
            "cat /proc/1/environ 2>&1; ls /var/run/docker.sock 2>&1; cat /proc/net/dev | grep -vc lo:"
        )
        user = os.getuid() or 1000
        zero = "0" * 16
        assert found.content.splitlines() == [
            str(user),
            f"CapEff:\t{zero}",
            f"CapBnd:\t{zero}",
            "NoNewPrivs:\t1",
            "1",
            "cat: /proc/1/environ: Permission denied",
            "/bin/ls: cannot access '/var/run/docker.sock': No such file or directory".removeprefix("/bin/"),
            "2",
        ]
        (container,) = running(tmp_path)
        form = "{{.HostConfig.NetworkMode}} {{.HostConfig.Memory}} {{.HostConfig.PidsLimit}} {{.HostConfig.NanoCpus}}"
        assert inspected(container, form) == f"none {LIMITS.memory_bytes} 64 1000000000"
        # None of the host's files is reachable: its journal and socket have no path, and the entrance is closed.
        knock = "import socket; socket.socket(socket.AF_UNIX).connect('/run/deckhands/entrance')"
        assert "ConnectionRefusedError" in (await run(f'python3 -c "{knock}"')).content
        assert (await run("cd / && touch /tmp/x ~/x /workspace/x && ls /workspace")).content == "x"


def test_the_self_test_and_the_doctor_know_it(containers: ContainerSettings) -> None:
    report = run_self_test(DockerSandbox(containers))
    assert (report.sandbox, report.escapes, len(report.results)) == ("docker", (), 9)
    found = {finding.name: finding for finding in examine("docker", containers)}["sandbox docker"]
    assert (found.is_good, found.is_needed) == (True, True)
    missing = {finding.name: finding for finding in examine("docker", ContainerSettings(("no/such:image",)))}[
        "sandbox docker"
    ]
    assert missing.detail == "the engine has no image no/such:image: docker pull no/such:image"
    silent = DockerSandbox(ContainerSettings(("x",), engine="unix:///nobody")).reason_unavailable()
    assert silent is not None
    assert silent.startswith("no docker engine answers: ")


async def test_a_command_goes_on_when_its_tool_worker_is_killed(tmp_path: Path, containers: ContainerSettings) -> None:
    async with docked(tmp_path, containers) as workspaces:
        await workspaces.open("survivor")
        started = Gate(tmp_path / "survivor" / "workspace", "started")
        held = Gate(tmp_path / "survivor" / "workspace", "held")
        for name in ("started", "held"):
            (tmp_path / "survivor" / "workspace" / name).chmod(0o666)
        command = "echo begun >> trace; echo x > started; read x < held; cat trace"
        worker = client(tmp_path, "docker", "survivor", 7, command, image=containers.images[0])
        await started.wait()
        before = running(tmp_path)
        os.killpg(worker.pid, signal.SIGKILL)
        await asyncio.to_thread(worker.communicate)
        held.open()
        again = client(tmp_path, "docker", "survivor", 7, "not run again", image=containers.images[0])
        collected = await answer(again)
        assert collected["content"] == "begun"
        assert running(tmp_path) == before


async def test_a_container_that_was_killed_leaves_an_unknown_outcome(
    tmp_path: Path, containers: ContainerSettings
) -> None:
    async with docked(tmp_path, containers) as workspaces:
        workspace = await workspaces.open("killed")
        started = Gate(tmp_path / "killed" / "workspace", "started")
        (tmp_path / "killed" / "workspace" / "started").chmod(0o666)
        running_on = asyncio.create_task(workspace.run(1, "bash", {"command": "echo x > started; sleep 1000"}))
        await started.wait()
        subprocess.run(["docker", "kill", *running(tmp_path)], capture_output=True, check=True)
        assert (await running_on).is_unknown
        assert (await workspace.run(2, "bash", {"command": "echo a new one"})).value["content"] == "a new one"


async def test_remains_of_a_dead_worker_are_removed(tmp_path: Path, containers: ContainerSettings) -> None:
    labels = ["--label", f"deckhands.root={tmp_path}", "--label", "deckhands.conversation=forgotten"]
    made = ["docker", "run", "--detach", *labels, image(), "sleep", "1000"]
    subprocess.run(made, capture_output=True, check=True)
    async with docked(tmp_path, containers) as workspaces:
        await workspaces.open("another")
        (left,) = running(tmp_path)
        assert inspected(left, '{{index .Config.Labels "deckhands.conversation"}}') == "another"


async def test_greedy_program_ends_and_its_workspace_does_not(tmp_path: Path, containers: ContainerSettings) -> None:
    async with docked(tmp_path, containers) as workspaces:
        run = Terminal(await workspaces.open("greedy"))
        assert (await run("python3 -c 'x = b\"x\" * (400 << 20)'", blocking=True, timeout=60)).exit_code == 137
        forks = "import os; [os.fork() or os.read(0, 1) for _ in range(100)]"
        assert (
            "temporarily unavailable"
            in (
                await run(f"python3 -c '{forks}' < /dev/null | cat; for i in $(echo {{1..99}}); do sleep 9 & done")
            ).content
        )
        await workspaces.close("greedy")
        run.workspace = await workspaces.open("greedy")
        assert (await run("echo well")).content == "well"


FETCH = "import urllib.request as web; print(web.urlopen('http://{}/').read().decode())"


@asynccontextmanager
async def site() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.2", 0) as server:
        yield f"127.0.0.2:{server.sockets[0].getsockname()[1]}"


async def test_some_hosts_of_the_network_are_reached_from_a_container(
    tmp_path: Path, containers: ContainerSettings
) -> None:
    async with site() as host, docked(tmp_path, containers, gate=GATE) as workspaces:
        run = Terminal(await workspaces.open("reaching", WorkspaceSpec(allow=(host,))))
        assert (await run(f'python3 -c "{FETCH.format(host)}"')).content == "hello"
        assert "403" in (await run(f'python3 -c "{FETCH.format("elsewhere.test")}"')).content


async def test_a_server_of_mcp_reaches_some_hosts_from_a_container(
    tmp_path: Path, containers: ContainerSettings
) -> None:
    async with site() as host:
        spec = McpServerSpec(name="reaching", command="python3", args=("-c", FETCH.format(host)), allow=(host,))
        started = SandboxedLaunch("docker", tmp_path, gate=GATE, containers=containers)(spec)
        async with started.proxy_for():
            program, *arguments = started.command
            running = await asyncio.create_subprocess_exec(
                program, *arguments, env=dict(started.environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            printed, _ = await running.communicate()
        assert printed == b"hello\n"


async def test_a_directory_of_the_users_stays_the_users(tmp_path: Path, containers: ContainerSettings) -> None:
    project = tmp_path / "project"
    project.mkdir()
    async with docked(tmp_path / "node", containers, named=NamedDirectories([project])) as workspaces:
        if os.getuid() == 0:
            with pytest.raises(WorkspaceRefused, match="belongs to root"):
                await workspaces.open("roots", WorkspaceSpec(path=str(project)))
            os.chown(project, 4321, 4321)
            tmp_path.chmod(0o755)
        run = Terminal(await workspaces.open("users", WorkspaceSpec(path=str(project))))
        assert (await run("touch here; pwd; id -u")).content.splitlines() == [str(project), str(project.stat().st_uid)]
        assert (project / "here").stat().st_uid == project.stat().st_uid


async def test_only_images_of_the_operators_are_run(tmp_path: Path) -> None:
    chosen = ContainerSettings((image(), "team/*"))
    async with docked(tmp_path, chosen) as workspaces:
        with pytest.raises(WorkspaceRefused, match="no container of the image 'other/image'"):
            await workspaces.open("other", WorkspaceSpec(sandbox="docker", image="other/image"))
        with pytest.raises(WorkspaceUnavailable, match=r"container was not started.*team/missing"):
            await workspaces.open("missing", WorkspaceSpec(sandbox="docker", image="team/missing"))
    settings = load_tool_settings({"DECKHANDS_DOCKER_IMAGES": "python:3.12, team/*", "DECKHANDS_DOCKER_CPUS": "2"})
    assert settings.containers == ContainerSettings(("python:3.12", "team/*"), cpus=2.0)


def test_a_server_of_mcp_gets_its_variables_in_a_container(tmp_path: Path, containers: ContainerSettings) -> None:
    launch = SandboxedLaunch("docker", tmp_path, containers=containers)
    spec = McpServerSpec(
        name="printer", command="sh", args=("-c", "read x; echo $x $KEY; id -u"), env={"KEY": "from its variable"}
    )
    started = launch(spec)
    assert "from its variable" not in " ".join(started.command)
    done = subprocess.run(started.command, env=started.environment, input=b"hello\n", capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[:2] == ["hello from its variable", str(os.getuid() or 1000)]


def test_an_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path, sandbox="docker", containers=ContainerSettings(("x",), engine="unix:///nobody"))
    with pytest.raises(SandboxUnavailable, match="no docker engine answers"):
        asyncio.run(workspaces.open("nobody"))


def test_the_first_image_has_to_be_a_name() -> None:
    reason = DockerSandbox(ContainerSettings(("team/*", "x"))).reason_unavailable()
    assert reason is not None
    assert "the first of DECKHANDS_DOCKER_IMAGES must be the name of an image; 'team/*' is not" in reason


async def test_cells_run_in_a_container_whose_image_has_a_kernel(tmp_path: Path) -> None:
    containers = ContainerSettings((image("ipykernel", "jupyter_client"),), cpus=1.0)
    sessions = find_session_programs(["ipython"], sandbox="docker")
    async with docked(tmp_path, containers, programs=sessions) as workspaces:
        workspace = await workspaces.open("cells")
        await workspace.run(1, "ipython", {"code": "import os, socket; kept = 41", "timeout": 60})
        code = "kept + 1, socket.gethostname(), os.getcwd()"
        shown = await workspace.run(2, "ipython", {"code": code, "include_extra": False})
        assert shown.value["content"] == "(42, 'workspace', '/workspace')"
        # A new tool worker finds the kernel as it was.
        await workspaces.aclose()
        async with opened(tmp_path, sandbox="docker", containers=containers) as later:
            again = await later.open("cells")
            kept = await again.run(3, "ipython", {"code": "kept", "include_extra": False})
            assert kept.value["content"] == "41"


async def test_missing_parts_of_an_image_are_reported(tmp_path: Path, containers: ContainerSettings) -> None:
    sessions = find_session_programs(["ipython", "browser"], sandbox="docker")
    async with docked(tmp_path, containers, programs=sessions) as workspaces:
        workspace = await workspaces.open("lacking")
        for number, (tool, lacking) in enumerate(
            [
                ("ipython", "the Python package ipykernel and the Python package jupyter_client"),
                ("browser", "the Python package playwright and the Python package PIL and a program chromium or"),
                ("ipython", "the Python package ipykernel"),
            ]
        ):
            said = await workspace.run(number, tool, {"code": "1", "actions": "noop(0)"})
            assert said.value["is_error"]
            assert f"{tool} cannot run in this container: its image lacks {lacking}" in said.value["content"]


SCRIPT = [
    {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo text > new; umask 077; echo x > closed"}}]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
]


async def test_attempts_run_on_the_node_with_the_engine(tmp_path: Path) -> None:
    cluster = FaultCluster(tmp_path)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": SCRIPT}))
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))
    async with cluster.running():
        for name in ("a", "b", "docks"):
            engine = {"DECKHANDS_DOCKER_IMAGES": image()} if name == "docks" else {}
            cluster.start_tool(name, **engine, DECKHANDS_NODE=name, DECKHANDS_NODE_DIR=str(tmp_path / name))
        cluster.start_controller()

        async def are_there() -> bool:
            return len(await list_members(cluster.client.store)) == 4

        await cluster.until(are_there, what="workers", limit=60.0)
        workspace = WorkspaceSpec(sandbox="docker")
        ids = [await cluster.client.submit("do it", agent=agent, workspace=workspace) for _ in range(4)]
        await cluster.settle(ids, limit=120.0)
        for conversation_id in ids:
            assert (await cluster.client.row(conversation_id)).node == "docks"
            events = await cluster.client.events(conversation_id)
            assert [event.exit_code for event in events if isinstance(event, CmdOutputObservation)] == [0]
            patch = await cluster.client.files.diff(conversation_id)
            assert b"+text" in patch
            assert b"b/closed" in patch
        workspaces = Workspaces(tmp_path / "docks", sandbox="docker", containers=ContainerSettings((image(),)))
        for conversation_id in ids:
            await workspaces.close(conversation_id)
            assert not HostFolder(tmp_path / "docks", conversation_id).is_alive
        await workspaces.aclose()
