"""The state that survives the death of a tool worker, of a host, and of everything in it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from broker.contract.specs import WorkspaceSpec
from tests.integration import workspace_hosts
from tests.integration.workspace_hosts import LIMIT_SECONDS, Gate, Terminal, alive, main_pid, opened, output, processes
from tool_worker.errors import (
    HostRefused,
    SandboxTooWeak,
    WorkspaceConflict,
    WorkspaceLost,
    WorkspaceRefused,
    WorkspaceUnavailable,
)
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.workspaces import Workspaces

CONVERSATION = "conversation"
in_each_sandbox = pytest.mark.parametrize("sandbox", ["bwrap", "none"], indirect=True)
"""For what the sandbox takes part in; the others are the same without one."""


def bash(action_id: int, command: str) -> tuple[int, str, dict[str, str]]:
    """Return the arguments that run a command."""
    return action_id, "bash", {"command": command}


@pytest.fixture
def sandbox(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "bwrap"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    # Deeper than the 108 bytes that the address of a unix socket can have.
    return tmp_path / ("long-name-" * 10) / "node"


@pytest.fixture
async def workspaces(root: Path, sandbox: str, tmp_path: Path) -> AsyncIterator[Workspaces]:
    async with opened(root, sandbox=sandbox, named=NamedDirectories([tmp_path / "project"])) as workspaces:
        yield workspaces


@pytest.fixture
def workspace(root: Path) -> Path:
    """The directory, made by hand, so that gates can be in it before a host is."""
    path = root / CONVERSATION / "workspace"
    path.mkdir(parents=True)
    return path


@in_each_sandbox
async def test_a_killed_tool_worker_loses_nothing_and_nothing_runs_twice(
    workspaces: Workspaces, root: Path, sandbox: str, workspace: Path
) -> None:
    begun, gate = Gate(workspace, "begun"), Gate(workspace, "gate")
    command = "echo effect >> effects; echo > begun; read x < gate; echo done"
    first = workspace_hosts.client(root, sandbox, CONVERSATION, 7, command)
    await begun.wait()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second, third = (workspace_hosts.client(root, sandbox, CONVERSATION, 7, command) for _ in range(2))
    host = (await workspaces.open(CONVERSATION)).connection
    assert (await host.status(7)).state == "running"
    waiting = asyncio.create_task(host.run(*bash(7, command)))
    gate.open()
    answers = [await workspace_hosts.answer(second), await workspace_hosts.answer(third)]
    assert [one["content"] for one in answers] == ["done", "done"]
    assert (await waiting).value["content"] == "done"
    again = await host.run(*bash(7, command))
    assert (again.is_replayed, again.value["content"]) == (True, "done")
    assert (workspace / "effects").read_text() == "effect\n"


async def test_the_shell_of_a_killed_tool_worker_goes_on(workspaces: Workspaces, root: Path, sandbox: str) -> None:
    ended = await workspace_hosts.answer(
        workspace_hosts.client(root, sandbox, CONVERSATION, 1, "cd /usr; A=1; sleep 1000 &")
    )
    assert ended["metadata"]["exit_code"] == 0
    result = await (await workspaces.open(CONVERSATION)).run(*bash(2, "pwd; echo $A; jobs | wc -l"))
    assert result.value["content"] == "/usr\n1\n1"


@in_each_sandbox
async def test_killed_host_leaves_an_unknown_outcome_repeated_only_by_permission(
    workspaces: Workspaces, root: Path, workspace: Path
) -> None:
    begun = Gate(workspace, "begun")
    host = await workspaces.open(CONVERSATION)
    await host.run(*bash(1, "echo recorded"))
    command = {"command": "echo effect >> effects; echo > begun; [ $(wc -l < effects) = 2 ] || sleep 1000"}
    running = asyncio.create_task(host.run(2, "bash", command))
    await begun.wait()
    victims = processes(root, CONVERSATION)
    os.kill(main_pid(root, CONVERSATION), signal.SIGKILL)
    result = await running
    assert (result.is_unknown, result.value) == (True, {})
    assert (await host.status(1)).result.value["content"] == "recorded"
    assert (await host.status(2)).state == "unknown"
    assert (await host.status(3)).state == "never_started"
    assert (await host.status(3)).is_certain
    assert alive(victims) == []
    repeated = await host.run(2, "bash", command, may_repeat=True)
    assert output(dict(repeated.value)).exit_code == 0
    assert (workspace / "effects").read_text() == "effect\neffect\n"


@in_each_sandbox
async def test_process_reusing_a_host_number_after_reboot_is_left_alone(
    workspaces: Workspaces, run: Terminal, root: Path
) -> None:
    await run("A=before")
    os.kill(main_pid(root, CONVERSATION), signal.SIGKILL)
    folder = HostFolder(root, CONVERSATION)
    assert await wait_until_dead(folder, LIMIT_SECONDS)
    journal = folder.journal.read_text()
    folder.journal.write_text("boot 11111111-2222-3333-4444-555555555555\n" + journal.partition("\n")[2])
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        folder.pid.write_text(f'{{"child-pid": {bystander.pid}}}')
        groups = Path(f"/proc/{bystander.pid}/cgroup").read_text()
        await workspaces.close(CONVERSATION)
        folder.pid.write_text(f'{{"child-pid": {bystander.pid}}}')
        assert (await run("echo $A")).content == ""
        assert main_pid(root, CONVERSATION) != bystander.pid
        assert not (await run.workspace.connection.status(1000)).is_certain
        assert bystander.poll() is None
        assert Path(f"/proc/{bystander.pid}/cgroup").read_text() == groups
    finally:
        bystander.kill()
        bystander.wait()


@in_each_sandbox
async def test_close_leaves_no_process(workspaces: Workspaces, run: Terminal, root: Path) -> None:
    await run("sleep 1000 & setsid sleep 1001 & (setsid sh -c 'trap \"\" HUP TERM INT; sleep 1002 & sleep 1003' &)")
    await run("env -i setsid sleep 1004 &")
    await run("trap '' TERM; while :; do :; done", no_change_timeout=0.1)
    async with asyncio.timeout(LIMIT_SECONDS):
        while workspace_hosts.sleeping(root, CONVERSATION) != ["1000", "1001", "1002", "1003", "1004"]:
            await asyncio.sleep(0)
    found = processes(root, CONVERSATION)
    await workspaces.close(CONVERSATION)
    assert alive(found) == []
    assert [state.is_alive for state in workspaces.list()] == [False]
    await workspaces.close(CONVERSATION)
    assert (await run.workspace.run(*bash(100, "echo again"))).value["content"] == "again"


async def test_host_survives_its_sandboxs_outer_process(root: Path) -> None:
    async with opened(root, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open(CONVERSATION))
        await run("A=1; sleep 1000 &")
        found = processes(root, CONVERSATION)
        outer = found[-1]
        assert outer.name() == "bwrap"
        outer.kill()
        await workspace_hosts.gone(outer.pid)
        assert (await run("echo $A")).content == "1"
        await workspaces.close(CONVERSATION)
        assert alive(found) == []


async def test_a_peer_that_talks_nonsense_is_let_go(run: Terminal, root: Path) -> None:
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"\0" * 1000 + b"\n", b'{"op": "run"}\n[1]\n'):
        with HostFolder(root, CONVERSATION).connect() as peer:
            peer.setblocking(True)
            peer.sendall(nonsense)
            peer.settimeout(LIMIT_SECONDS)
            while peer.recv(4096):
                pass
    assert (await run("echo fine")).content == "fine"


async def test_waiter_on_a_closed_workspace_starts_no_host(
    workspaces: Workspaces, root: Path, sandbox: str, workspace: Path
) -> None:
    begun = Gate(workspace, "begun")
    async with opened(root, sandbox=sandbox) as others:
        asked = {"command": "echo > begun; sleep 1000"}
        waiting = [
            asyncio.create_task((await one.open(CONVERSATION)).run(1, "bash", asked)) for one in (workspaces, others)
        ]
        await begun.wait()
        await workspaces.close(CONVERSATION)
        assert [(await one).is_unknown for one in waiting] == [True, True]
        assert not HostFolder(root, CONVERSATION).is_alive
        assert not await others.interrupt(CONVERSATION, 1)
        assert not HostFolder(root, CONVERSATION).is_alive


@in_each_sandbox
async def test_close_kills_a_host_that_does_not_answer(workspaces: Workspaces, run: Terminal, root: Path) -> None:
    await run("sleep 1000 &")
    found = processes(root, CONVERSATION)
    os.kill(main_pid(root, CONVERSATION), signal.SIGSTOP)
    await workspaces.close(CONVERSATION)
    assert alive(found) == []


@in_each_sandbox
@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("echo > begun; sleep 1001; echo never", 130),
        ("sleep 1001 & setsid sleep 1002 & echo > begun; sleep 1003", 130),
        ("echo > begun; while :; do :; done", 130),
        ("trap '' INT; sh -c 'trap \"\" INT; echo > begun; sleep 1002'; sleep 1003", 137),
    ],
)
async def test_cancelled_command_ends_and_spares_background_jobs(
    workspaces: Workspaces, root: Path, workspace: Path, command: str, exit_code: int
) -> None:
    begun = Gate(workspace, "begun")
    host = await workspaces.open(CONVERSATION)
    await host.run(*bash(1, "sleep 1000 &"))
    running = asyncio.create_task(host.run(*bash(2, command)))
    await begun.wait()
    began_at = asyncio.get_running_loop().time()
    assert await host.interrupt(2)
    cancelled = output(dict((await running).value))
    assert (cancelled.exit_code, cancelled.state) == (exit_code, "cancelled")
    assert not {"never", "Killed"} & set(cancelled.content.split())
    assert cancelled.suffix.endswith("\n[The command was cancelled.]")
    assert not await host.interrupt(2)
    while asyncio.get_running_loop().time() < began_at + LIMIT_SECONDS and workspace_hosts.sleeping(
        root, CONVERSATION
    ) != ["1000"]:
        await asyncio.sleep(0)
    assert workspace_hosts.sleeping(root, CONVERSATION) == ["1000"]


async def test_a_command_that_waits_for_its_turn_can_be_cancelled(workspaces: Workspaces, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    host = await workspaces.open(CONVERSATION)
    first = asyncio.create_task(host.run(*bash(1, "read x < gate")))
    second = asyncio.create_task(host.run(*bash(2, "touch never")))
    while (await host.connection.ping()).running != (1, 2):
        await asyncio.sleep(0)
    assert await host.interrupt(2)
    assert output(dict((await second).value)).state == "cancelled"
    assert await host.interrupt(None)
    assert output(dict((await first).value)).state == "cancelled"
    assert not (workspace / "never").exists()
    gate.open()


@in_each_sandbox
async def test_a_host_ends_when_nobody_needs_it(root: Path, sandbox: str, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    async with opened(root, sandbox=sandbox, ttl_seconds=0.3) as workspaces:
        host = await workspaces.open(CONVERSATION)
        await host.run(*bash(1, "sleep 1000 &"))
        running = asyncio.create_task(host.run(*bash(2, "read x < gate; echo $x")))
        while 2 not in (await host.connection.ping()).running:
            await asyncio.sleep(0)
        found = processes(root, CONVERSATION)
        await workspaces.aclose()
        with pytest.raises(WorkspaceUnavailable):
            await running
        gate.open()
        assert await wait_until_dead(HostFolder(root, CONVERSATION), LIMIT_SECONDS)
        assert alive(found) == []
    async with opened(root, sandbox=sandbox) as workspaces:
        again = await (await workspaces.open(CONVERSATION)).run(*bash(2, "never"))
        assert (again.is_replayed, again.value["content"]) == (True, "go")


async def test_many_hosts_at_once(root: Path, sandbox: str) -> None:
    async with opened(root, sandbox=sandbox) as workspaces:

        async def work(number: int) -> tuple[str, int]:
            host = await workspaces.open(f"conversation-{number}")
            result = await host.run(*bash(1, f"echo {number}"))
            return result.value["content"], main_pid(root, f"conversation-{number}")

        results = await asyncio.gather(*(work(number) for number in range(24)))
        assert [content for content, _ in results] == [str(number) for number in range(24)]
        assert len({pid for _, pid in results}) == 24
        assert max(psutil.Process(pid).memory_info().rss for _, pid in results) < 16 * 2**20
        await asyncio.gather(*(workspaces.close(f"conversation-{number}") for number in range(24)))
        assert not any(psutil.pid_exists(pid) for _, pid in results)


async def test_two_tool_workers_that_open_at_once_share_one_host(root: Path, sandbox: str) -> None:
    async with opened(root, sandbox=sandbox) as one, opened(root, sandbox=sandbox) as other:
        first, second, third = await asyncio.gather(
            one.open(CONVERSATION), other.open(CONVERSATION), other.open(CONVERSATION)
        )
        await first.run(*bash(1, "A=1"))
        assert (await second.run(*bash(2, "echo $A"))).value["content"] == "1"
        assert second.connection is third.connection


async def test_files_are_edited_in_the_host(workspaces: Workspaces, root: Path, workspace: Path) -> None:
    host = await workspaces.open(CONVERSATION)
    path = f"{(await host.connection.ping()).workspace}/a.txt"
    created = await host.run(1, "edit", {"command": "create", "path": path, "file_text": "one\n"})
    assert created.value["content"] == f"File created successfully at: {path}"
    changed = {"command": "str_replace", "path": path, "old_str": "one", "new_str": "two"}
    await host.run(2, "edit", changed)
    assert (await host.run(2, "edit", changed)).is_replayed
    assert (workspace / "a.txt").read_text() == "two\n"


async def test_invalid_request_is_refused_by_the_host(workspaces: Workspaces) -> None:
    host = (await workspaces.open(CONVERSATION)).connection
    for action_id, tool, code in [(1, "browser", "unknown_tool"), (-1, "bash", "bad_arguments")]:
        with pytest.raises(HostRefused) as refused:
            await host.run(action_id, tool, {"command": "true"})
        assert refused.value.code == code
    assert host.is_open


async def test_idle_connections_are_let_go_and_found_again(workspaces: Workspaces) -> None:
    host = await workspaces.open(CONVERSATION)
    await host.run(*bash(1, "A=1"))
    await workspaces.detach_idle(60)
    assert host.connection.is_open
    await workspaces.detach_idle(0)
    assert not host.connection.is_open
    assert (await host.run(*bash(2, "echo $A"))).value["content"] == "1"
    assert await workspaces.interrupt(CONVERSATION, None) is False
    assert await workspaces.interrupt("never-opened", None) is False


@in_each_sandbox
async def test_user_directory_keeps_its_path_and_binding(workspaces: Workspaces, tmp_path: Path, sandbox: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    spec = WorkspaceSpec(path=str(project), network=False)
    host = await workspaces.open(CONVERSATION, spec)
    await host.run(*bash(1, "pwd > where"))
    assert (project / "where").read_text() == f"{project}\n"
    other = "none" if sandbox == "bwrap" else "bwrap"
    for changed in ({"path": str(tmp_path)}, {"network": True}, {"sandbox": other}):
        with pytest.raises(WorkspaceConflict):
            await workspaces.open(CONVERSATION, spec.model_copy(update=changed))
    await workspaces.close(CONVERSATION)
    (project / "where").unlink()
    project.rmdir()
    with pytest.raises(WorkspaceLost):
        await workspaces.open(CONVERSATION)


async def test_directories_that_may_not_be_workspaces(workspaces: Workspaces, tmp_path: Path) -> None:
    for path in ("/", "/usr", "/etc/"):
        with pytest.raises(WorkspaceRefused):
            await workspaces.open(CONVERSATION, WorkspaceSpec(path=path))
    with pytest.raises(WorkspaceLost):
        await workspaces.open(CONVERSATION, WorkspaceSpec(path=str(tmp_path / "project" / "missing")))


async def test_a_node_with_a_sandbox_runs_nothing_without_one(root: Path) -> None:
    async with opened(root, sandbox="auto") as workspaces:
        with pytest.raises(SandboxTooWeak):
            await workspaces.open(CONVERSATION, WorkspaceSpec(sandbox="none"))
        host = await workspaces.open(CONVERSATION)
        assert (await host.connection.ping()).workspace == "/workspace"
        assert [state.sandbox for state in workspaces.list()] == ["bwrap"]


async def test_a_host_that_cannot_start_says_why(root: Path) -> None:
    folder = HostFolder(root, CONVERSATION)
    folder.create()
    folder.journal.mkdir()
    async with opened(root) as workspaces:
        with pytest.raises(WorkspaceUnavailable, match="Is a directory"):
            await workspaces.open(CONVERSATION)
        assert not folder.is_alive
        folder.journal.rmdir()
        up = await (await workspaces.open(CONVERSATION)).run(*bash(1, "echo up"))
        assert up.value["content"] == "up"
