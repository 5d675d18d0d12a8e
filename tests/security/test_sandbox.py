"""Targets that a program in a workspace must not reach, tried by programs in real sandboxes.

Every attempt is made without a sandbox too, where it can be: one that fails everywhere would prove nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from tests.integration.workspace_hosts import Terminal, alive, opened, processes
from tests.trees import is_open_to_all, let_everybody_through
from tool_worker.errors import SandboxUnavailable, SandboxUnsafe
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.choice import find_best_sandbox, find_sandbox, make_sandboxes
from tool_worker.sandbox.none import NoSandbox
from tool_worker.sandbox.sandbox import Enclosure, ResourceLimits, find_interpreter
from tool_worker.sandbox.selftest import require_safe, run_self_test
from tool_worker.workspace.workspaces import Workspaces

IS_ROOT = os.getuid() == 0
PROBES = {
    *("read_password_hashes", "read_environments", "read_first_environment", "see_processes", "write_outside"),
    *("write_system", "change_kernel", "connect_to_machine", "gain_capability"),
}


class LeakySandbox(BubblewrapSandbox):
    """Bubblewrap with one mount too many."""

    def options(self, enclosure: Enclosure) -> list[str]:
        return [*super().options(enclosure)[:-4], "--bind", "/etc", "/etc", "--chdir", "/workspace"]


@pytest.fixture
def bwrap(tmp_path: Path) -> BubblewrapSandbox:
    return BubblewrapSandbox(tmp_path / "files")


@pytest.fixture
async def workspaces(tmp_path: Path) -> AsyncIterator[Workspaces]:
    limits = ResourceLimits(processes=100, open_files=64, file_bytes=1_000_000)
    async with opened(tmp_path / "node", sandbox="bwrap", environment={"GIVEN": "1"}, limits=limits) as workspaces:
        yield workspaces


@pytest.fixture
async def run(workspaces: Workspaces) -> Terminal:
    return Terminal(await workspaces.open("conversation", WorkspaceSpec(network=False)))


def test_the_best_sandbox_of_this_machine_holds(tmp_path: Path) -> None:
    no_image = "no image is named (DECKHANDS_DOCKER_IMAGES)"
    reasons = {name: sandbox.reason_unavailable() for name, sandbox in make_sandboxes(tmp_path).items()}
    assert reasons == {"bwrap": None, "docker": no_image, "kubernetes": no_image, "none": None}
    report = run_self_test(find_best_sandbox(tmp_path))
    assert report.sandbox == "bwrap"
    assert {result.name for result in report.results} == PROBES
    assert report.escapes == ()
    require_safe(report)


def test_where_none_works_nothing_runs_and_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "node").touch()
    with pytest.raises(SandboxUnavailable, match=r"bwrap does not work here: .*Not a directory") as raised:
        find_sandbox("auto", tmp_path / "node" / ".sandbox")
    assert "Install" not in str(raised.value)  # the obstacle is another one
    assert "DECKHANDS_SANDBOX=none" in str(raised.value)


def test_the_self_test_gets_out_where_nothing_confines_it() -> None:
    report = run_self_test(NoSandbox())
    reached = {result.name for result in report.escapes}
    assert {"read_environments", "see_processes", "write_outside", "connect_to_machine"} <= reached
    if IS_ROOT:
        assert {"read_password_hashes", "write_system", "change_kernel", "gain_capability"} <= reached
    with pytest.raises(SandboxUnsafe, match="The sandbox none failed its self-test: "):
        require_safe(report)


@pytest.mark.skipif(not IS_ROOT, reason="only root could open these files in any case")
def test_self_test_removes_a_killed_workers_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    old, young, others, elsewhere = (tmp_path / "tmp" / f"deckhands-selftest-{name}" for name in "abcd")
    for folder in (old, young, others, tmp_path / "kept"):
        (folder / "workspace").mkdir(parents=True)
    elsewhere.symlink_to(tmp_path / "kept")
    for folder in (old, others, tmp_path / "kept"):
        os.utime(folder, (0, time.time() - 601))
    if IS_ROOT:
        os.chown(others, 65534, 65534)
    run_self_test(NoSandbox())
    left = {path.name[-1] for path in (tmp_path / "tmp").iterdir()}
    assert left == ({"b", "c", "d"} if IS_ROOT else {"b", "d"})
    assert (tmp_path / "kept" / "workspace").is_dir()


@pytest.mark.skipif(not IS_ROOT, reason="only root goes through the hole")
def test_the_self_test_finds_a_single_hole(tmp_path: Path) -> None:
    report = run_self_test(LeakySandbox(tmp_path / "files"))
    assert {result.name for result in report.escapes} == {"read_password_hashes", "write_system"}


@pytest.mark.skipif(not IS_ROOT, reason="only root's user id opens kernel settings without a capability")
def test_kernel_settings_need_the_mounts_that_cover_them(tmp_path: Path, bwrap: BubblewrapSandbox) -> None:
    opens = "import os; os.close(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY))"
    program = [find_interpreter(), "-I", "-S", "-c", opens]
    options = list(bwrap.options(Enclosure(tmp_path, "/workspace")))
    covered = subprocess.run(bwrap.command(program, options), env={}, check=False, capture_output=True)
    assert b"Read-only file system" in covered.stderr
    at = options.index("/proc/sys")
    uncovered = options[: at - 1] + options[at + 2 :]
    assert subprocess.run(bwrap.command(program, uncovered), env={}, check=False).returncode == 0


def test_sandboxes_that_there_are_not(tmp_path: Path) -> None:
    assert [*make_sandboxes(tmp_path)] == ["bwrap", "docker", "kubernetes", "none"]
    with pytest.raises(SandboxUnavailable, match="There is no sandbox 'chroot'"):
        find_sandbox("chroot", tmp_path)
    with pytest.raises(SandboxUnavailable, match=r"docker does not work on this machine: no image is named"):
        find_sandbox("docker", tmp_path)
    assert find_sandbox("none", tmp_path).name == "none"


def test_a_sandbox_that_does_not_work_says_why(tmp_path: Path) -> None:
    class Broken(BubblewrapSandbox):
        def options(self, enclosure: Enclosure) -> list[str]:
            return ["--ro-bind", "/does/not/exist", "/x"]

    reason = Broken(tmp_path).reason_unavailable()
    assert (
        reason == "bwrap does not work here: bwrap: Can't find source path /does/not/exist: No such file or directory"
    )


async def test_the_environment_is_what_was_given(run: Terminal) -> None:
    names = (await run("env | cut -d= -f1 | sort | xargs")).content
    assert (
        names
        == "DECKHANDS_HOST_ID GIT_PAGER GIVEN HOME LANG MANPAGER PAGER PATH PIP_BREAK_SYSTEM_PACKAGES PWD SHELL SHLVL TERM USER _"
    )
    assert (await run("cat /proc/1/environ")).content.endswith("Permission denied")
    assert (await run("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c PYTEST")).content == "0"


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("cat /etc/shadow", "No such file or directory"),
        ("ls ~/.ssh ~root/.ssh", "No such file or directory"),
        ("touch /usr/x", "Read-only file system"),
        ("touch /etc/x", "Read-only file system"),
        ("touch /x", "Read-only file system"),
        ("touch /dev/x", "Read-only file system"),
        ("touch /run/deckhands/tool_worker/host/x", "Read-only file system"),
        ("echo x > /proc/sys/kernel/core_pattern", "Read-only file system"),
        ("ln -s /etc/shadow out; cat out", "No such file or directory"),
        ("ln /usr/bin/env out", "Invalid cross-device link"),
        ("mknod disk b 8 0; ls disk", "cannot access"),
        ("umount /proc/sys; unshare -m true", "unshare failed: Operation not permitted"),
        ("unshare -r true", "unshare failed: Operation not permitted"),
        ("hostname other", "you must be root to change the host name"),
        ("kill -9 1 && echo 'it lives'", "it lives"),
        ("ls -l /proc/1/fd /proc/1/cwd", "Permission denied"),
        ("cat /proc/1/mem", "Permission denied"),
        ("dd if=/dev/zero of=big bs=1M count=2", "File size limit exceeded"),
        ("dmesg", "Operation not permitted"),
    ],
)
async def test_it_is_refused(run: Terminal, command: str, refusal: str) -> None:
    answer = await run(command)
    assert refusal in answer.content
    assert (await run("echo next")).content == "next"


async def test_there_is_no_way_to_the_network_of_the_machine(run: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0deckhands-test-abstract")
        abstract.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.socket(socket.AF_UNIX) as control:
            control.connect("\0deckhands-test-abstract")
        reach = (
            "import socket\n"
            f"for family, address in [(2, ('127.0.0.1', {port})), (2, ('169.254.169.254', 80)), (10, ('::1', {port})),"
            " (1, '\\0deckhands-test-abstract')]:\n"
            "    try: socket.socket(family).connect(address); print('reached', address)\n"
            "    except OSError as error: print(type(error).__name__)\n"
        )
        answer = await run(f"python3 -c \"$(cat <<'X'\n{reach}X\n)\"")
    assert "reached" not in answer.content
    assert answer.content.splitlines() == [
        "ConnectionRefusedError",
        "OSError",
        "ConnectionRefusedError",
        "ConnectionRefusedError",
    ]


async def test_loopback_is_there_for_programs_of_the_workspace(run: Terminal) -> None:
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); print('ok')"
    assert (await run(f'python3 -c "{program}"')).content == "ok"


async def test_with_network_the_machine_is_reached_and_nothing_else_changes(workspaces: Workspaces) -> None:
    run = Terminal(await workspaces.open("networked", WorkspaceSpec(network=True)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert (await run(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached")).content == "reached"
    assert "No such file" in (await run("cat /etc/shadow")).content


async def test_only_processes_of_the_workspace_are_seen(run: Terminal) -> None:
    assert (await run("ps -e -o comm=")).content.split() == [Path(find_interpreter()).name, "bash", "ps"]
    assert (await run("hostname; id -un")).content == "workspace\nagent"


async def test_no_descriptor_leaks_into_the_shell(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        for sandbox in ("bwrap", "none"):
            async with opened(tmp_path / sandbox, sandbox=sandbox) as workspaces:
                run = Terminal(await workspaces.open("conversation"))
                assert (await run("ls /proc/self/fd | xargs")).content == "0 1 2 3"
    finally:
        os.close(read)
        os.close(write)


async def test_sandboxed_programs_cannot_trace_or_reach_the_host(run: Terminal) -> None:
    attach = (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0), os.strerror(ctypes.get_errno()))\n"
        "print(libc.syscall(438, os.pidfd_open(1), 3, 0), os.strerror(ctypes.get_errno()))"
    )
    answer = await run(f'python3 -c "{attach}"')
    assert answer.content == "-1 Operation not permitted\n-1 Operation not permitted"
    assert (
        await run("find / -xdev \\( -name socket -o -name journal -o -name '*.lock' \\) 2>/dev/null | grep host")
    ).content == ""


async def test_daemons_end_with_the_workspace(workspaces: Workspaces, run: Terminal, tmp_path: Path) -> None:
    await run("for i in $(seq 50); do (setsid sleep 1000 &) ; done")
    found = processes(tmp_path / "node", "conversation")
    assert len(found) > 50
    await workspaces.close("conversation")
    assert alive(found) == []


@pytest.mark.skipif(not IS_ROOT or shutil.which("setpriv") is None, reason="needs root to become somebody else")
def test_it_works_for_a_user_without_rights(tmp_path: Path) -> None:
    files, workspace = tmp_path / "files", tmp_path / "workspace"
    for path in (files, workspace):
        path.mkdir()
        os.chown(path, 65534, 65534)
    let_everybody_through(tmp_path)
    bwrap = BubblewrapSandbox(files)
    options = list(bwrap.options(Enclosure(workspace, "/workspace")))
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    for at in reversed([at for at, option in enumerate(options) if option == "--ro-bind"]):
        if not is_open_to_all(Path(options[at + 1])):  # an interpreter or a checkout that this program does not need
            del options[at : at + 3]
    command = bwrap.command(["/bin/sh", "-c", "touch made; id -u"], options)
    ended = subprocess.run([*as_nobody, *command], env={}, check=True, capture_output=True)
    assert ended.stdout == b"1000\n"
    assert (workspace / "made").stat().st_uid == 65534


def run_shell(bwrap: BubblewrapSandbox, enclosure: Enclosure, script: str) -> subprocess.CompletedProcess[bytes]:
    command = bwrap.command(["/bin/sh", "-c", script], bwrap.options(enclosure))
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False)


def test_a_file_of_etc_can_be_lent(bwrap: BubblewrapSandbox, tmp_path: Path) -> None:
    lent = Path("/etc/shells")
    show = f"grep agent: /etc/passwd; cat {lent}; echo x > {lent}"
    assert lent.read_bytes() not in run_shell(bwrap, Enclosure(tmp_path, "/workspace"), show).stdout
    ended = run_shell(bwrap, Enclosure(tmp_path, "/workspace", read_only=(lent,)), show)
    assert ended.stdout == b"agent:x:1000:1000:agent:/home/agent:/bin/bash\n" + lent.read_bytes()
    assert b"Read-only file system" in ended.stderr


def test_a_workspace_can_be_in_etc(bwrap: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    enclosure = Enclosure(tmp_path / "project", "/etc/project")
    ended = run_shell(
        bwrap, enclosure, "pwd; echo x > made; ls /etc/ssl/certs/ca-certificates.crt; echo x > /etc/hosts"
    )
    assert ended.stdout == b"/etc/project\n/etc/ssl/certs/ca-certificates.crt\n"
    assert b"Read-only file system" in ended.stderr
    assert (tmp_path / "project" / "made").exists()


def test_names_resolve_only_where_there_is_a_network(bwrap: BubblewrapSandbox, tmp_path: Path) -> None:
    machine = Path("/etc/resolv.conf").read_bytes()
    for has_network, shown in ((False, b""), (True, machine)):
        enclosure = Enclosure(tmp_path, "/workspace", has_network=has_network)
        assert run_shell(bwrap, enclosure, "cat /etc/resolv.conf").stdout == shown
