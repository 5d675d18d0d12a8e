"""Starts a pod, and runs a program in one: what `docker run` is to an engine.

    python -I -m tool_worker.sandbox.kubernetes host PLAN PROGRAM…    starts a pod that runs the program, and returns
    python -I -m tool_worker.sandbox.kubernetes run PLAN PROGRAM…     runs the program until it ends, with our standard
                                                                      streams and its exit code

PLAN is the JSON text of `KubernetesSandbox.options`.

Holds: a pod that does not start is removed, and the reason is on standard error. The pod of a program is removed with
it. If this process is killed, the next one on the volume removes the pod, because its lock is free.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.runtime import SYSTEM_CLOCK
from tool_worker.errors import SandboxUnavailable
from tool_worker.sandbox.containers import ClusterAccess
from tool_worker.sandbox.kubernetes.api import Api, ApiRefusal, Manifest, pause, to_plain
from tool_worker.sandbox.kubernetes.pods import CONTAINER, POD_PROGRAM, POLL_SECONDS, remove_pods, sweep

if TYPE_CHECKING:
    import aiohttp

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
MESSAGE_LIMIT_BYTES = 4 * 2**20
PART_BYTES = 2**15
CREATE_ATTEMPTS = 5
HEARTBEAT_SECONDS = 30.0
REMOVAL_PATIENCE_SECONDS = 5.0
EXIT_NOT_STARTED = 125
"""As that of `docker run`."""
HOPELESS = frozenset(("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"))
"""Reasons for which the kubelet waits with a container, and that do not pass by themselves."""


def main() -> None:
    """Do what the arguments say."""
    kind, plan, *program = sys.argv[1:]
    described = json.loads(plan)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_NOT_STARTED))
    try:
        with Api(ClusterAccess(**described["access"]), described["pending_seconds"]) as api:
            if kind == "host":
                start(api, described, program, Entrance(Path(described["entrance"])))
                code = 0
            else:
                code = run(api, described, program)
    except SandboxUnavailable as error:
        sys.stderr.write(f"{error} {error.remedy}".strip() + "\n")
        code = EXIT_NOT_STARTED
    sys.stderr.flush()
    os._exit(code)  # a thread may still read standard input


class Entrance:
    """The socket through which a tool worker gives a host its descriptors.

    The tool worker removes it after the host took them, and ends us first if it gives the host up. Another one has its
    name when a later start waits there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = self._read_identity()

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left for us to start."""
        return self._identity is None or self._read_identity() != self._identity

    def _read_identity(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns


def start(api: Api, plan: Mapping[str, Any], command: Sequence[str], entrance: Entrance | None = None) -> Manifest:
    """Start a pod that runs a command, and return it when its container runs.

    Args:
        entrance: Of a host, which then has taken its descriptors.

    Raises:
        SandboxUnavailable: it does not start.
    """
    manifest = plan["pod"]
    manifest["spec"]["containers"][0]["command"] = list(command)
    sweep(api, plan["claim"], Path(plan["locks"]))
    pod = _create(api, manifest, entrance)
    try:
        _wait_until_running(api, pod, plan["pending_seconds"], entrance)
    except BaseException:
        if entrance is not None and entrance.is_gone:  # the host has started, and only our look at it has failed
            return pod
        with suppress(SandboxUnavailable):
            api.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])
        raise
    return pod


def run(api: Api, plan: Mapping[str, Any], program: Sequence[str]) -> int:
    """Run a program in a separate pod, and return its exit code."""
    names = plan["environment_names"]
    given = {
        "program": list(program),
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "directory": plan["pod"]["spec"]["containers"][0]["workingDir"],
    }
    name = plan["pod"]["metadata"]["name"]
    with _lock(Path(plan["locks"]), name):
        pod = start(api, plan, ["python3", "-I", "-S", POD_PROGRAM, "start"])
        try:
            return asyncio.run(_Stream(api, name, json.dumps(given).encode()).serve())
        finally:
            api.patience_seconds = REMOVAL_PATIENCE_SECONDS
            with suppress(SandboxUnavailable):  # it hides no exit code; the next start on the volume removes the pod
                api.delete_pod(name, pod["metadata"]["uid"])


class _Stream:
    """The standard streams of one program, on a WebSocket: the first byte of each message is the channel's number."""

    def __init__(self, api: Api, name: str, head: bytes, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._api = api
        self._address = api.find_exec_address(name, CONTAINER, ["python3", "-I", "-S", POD_PROGRAM, "run"])
        self._head = b"%d\n" % len(head) + head
        self._heartbeat_seconds = heartbeat_seconds
        self._code: int | None = None

    async def serve(self) -> int:
        """Copy the streams until the program ends.

        Raises:
            SandboxUnavailable: the program cannot be started, or the connection broke before it ended.
        """
        import aiohttp  # late: the start of a host needs no WebSocket

        try:
            async with (
                aiohttp.ClientSession(headers=self._api.headers, trust_env=False) as session,
                session.ws_connect(
                    self._address,
                    protocols=PROTOCOLS,
                    ssl=self._api.tls,
                    max_msg_size=MESSAGE_LIMIT_BYTES,
                    heartbeat=self._heartbeat_seconds,
                ) as connection,
            ):
                await self._send(connection, self._head)
                threading.Thread(
                    target=self._read_input, args=(connection, asyncio.get_running_loop()), daemon=True
                ).start()
                async for message in connection:
                    if message.type is aiohttp.WSMsgType.BINARY and message.data:
                        await self._take(message.data[0], message.data[1:])
                broken = connection.exception()
        except aiohttp.WSServerHandshakeError as error:
            raise SandboxUnavailable(
                f"Kubernetes runs no program in the pod: status {error.status}.",
                remedy="The service account needs the rights `get` and `create` on pods/exec.",
            ) from error
        except aiohttp.ClientError as error:
            raise SandboxUnavailable(f"The connection to the program broke: {to_plain(error)}") from error
        if self._code is None:
            why = "the API server stopped answering" if isinstance(broken, TimeoutError) else to_plain(broken or "")
            raise SandboxUnavailable(f"The connection to the program broke before it ended: {why}".removesuffix(": "))
        return self._code

    async def _take(self, channel: int, part: bytes) -> None:
        if channel in (STDOUT, STDERR):
            with suppress(BrokenPipeError):  # who reads has seen enough
                await asyncio.to_thread(_write, channel, part)
        elif channel == STATUS:
            self._code = _read_code(part)

    async def _send(self, connection: aiohttp.ClientWebSocketResponse, content: bytes) -> None:
        for start_at in range(0, len(content), PART_BYTES):
            await connection.send_bytes(bytes([STDIN]) + content[start_at : start_at + PART_BYTES])

    def _read_input(self, connection: aiohttp.ClientWebSocketResponse, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError, RuntimeError):  # the program has ended, and the connection with it
            while part := os.read(0, PART_BYTES):
                asyncio.run_coroutine_threadsafe(self._send(connection, part), loop).result()
            if connection.protocol == PROTOCOLS[0]:  # the older protocol has no end of the input
                asyncio.run_coroutine_threadsafe(connection.send_bytes(bytes([CLOSE, STDIN])), loop).result()


def _write(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _read_code(part: bytes) -> int:
    """Return the exit code in the status of a program."""
    try:
        status = json.loads(part)
        if status["status"] == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
        message = status.get("message")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SandboxUnavailable(f"The status of the program cannot be read: {to_plain(error)}") from error
    if not codes:
        raise SandboxUnavailable(f"Kubernetes runs no program in the pod: {to_plain(message)}")
    return codes[0]


@contextmanager
def _lock(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a pod: the kernel releases it however this process ends."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / name
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)  # an earlier holder has removed this file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _create(api: Api, manifest: Manifest, entrance: Entrance | None) -> Manifest:
    """Create a pod. An earlier one of the same host is removed first: the caller knows that the host has ended."""
    for _ in range(CREATE_ATTEMPTS):
        if entrance is not None and entrance.is_gone:
            raise SandboxUnavailable(f"The start of the pod {manifest['metadata']['name']} was given up.")
        try:
            return api.create_pod(manifest)
        except ApiRefusal as refusal:
            if refusal.reason != "AlreadyExists":
                raise
            if entrance is not None and entrance.is_gone:  # the pod may be that of the next start
                continue
            if earlier := api.get_pod(manifest["metadata"]["name"]):
                remove_pods(api, [earlier])
    raise SandboxUnavailable(f"The pod {manifest['metadata']['name']} is created again and again by another program.")


def _wait_until_running(api: Api, pod: Manifest, limit_seconds: float, entrance: Entrance | None) -> None:
    """Wait for the container, and for a host, too."""
    ends = SYSTEM_CLOCK.monotonic() + limit_seconds
    while entrance is None or not entrance.is_gone:
        status = _check(api, pod)
        if status is None and entrance is None:
            return
        if status is not None and SYSTEM_CLOCK.monotonic() > ends:
            raise SandboxUnavailable(
                f"The pod {pod['metadata']['name']} did not start within {limit_seconds:g} s: {_explain(status)}",
                remedy="Free resources on its machine, check the image and the secrets of its registry, or raise "
                "DECKHANDS_KUBERNETES_PENDING_SECONDS.",
            )
        pause(POLL_SECONDS)


def _check(api: Api, pod: Manifest) -> Manifest | None:
    """Return the status of a pod that does not run yet; None if it runs.

    Raises:
        SandboxUnavailable: it has ended, or will not start.
    """
    name = pod["metadata"]["name"]
    found = api.get_pod(name)
    if found is None or found["metadata"]["uid"] != pod["metadata"]["uid"]:
        raise SandboxUnavailable(f"The pod {name} was removed before it ran.")
    status: Manifest = found.get("status") or {}
    state = _find_state(status)
    if "running" in state:
        return None
    if status.get("phase") in ("Failed", "Succeeded") or "terminated" in state:
        # Not the container's own message: programs write it.
        code = (state.get("terminated") or {}).get("exitCode")
        reason = f"its container ended with exit code {code}" if code is not None else _explain(status)
        raise SandboxUnavailable(f"The pod {name} failed: {reason}")
    waiting = state.get("waiting") or {}
    if waiting.get("reason") in HOPELESS:
        raise SandboxUnavailable(
            f"The pod {name} cannot start: {waiting['reason']}: {to_plain(waiting.get('message', ''))}",
            remedy="Check the image's name, its registry, and the secrets for it.",
        )
    return status


def _find_state(status: Manifest) -> Manifest:
    """Return the state of the container, which may be unknown yet."""
    found: Manifest = next(iter(status.get("containerStatuses") or [{}])).get("state") or {}
    return found


def _explain(status: Manifest) -> str:
    """Return why a pod does not run, in the words of the scheduler or the kubelet."""
    state = _find_state(status)
    refused = [each for each in status.get("conditions") or () if each.get("status") == "False" and each.get("message")]
    for found in (state.get("waiting") or {}, *refused, status):
        if found.get("reason") or found.get("message"):
            return to_plain(f"{found.get('reason', '')}: {found.get('message', '')}".strip(": "))
    return "no reason is known"


if __name__ == "__main__":
    main()
