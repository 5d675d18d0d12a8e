"""The session program of IPython: a real kernel, its cells, its pictures (OpenHands 10.5).

Holds: variables persist from cell to cell. They are lost only with the kernel; the model is then notified. A cell that
exceeds its time limit is interrupted; its kernel is killed only if the interrupt has no effect.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # started by its path, as a separate program
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tool_worker.host.sessions.session_wire import Result, serve
from tool_worker.host.shell.output_buffer import OutputBuffer

if TYPE_CHECKING:
    from jupyter_client.asynchronous.client import AsyncKernelClient

READY_LIMIT_SECONDS = 60.0
INTERRUPT_LIMIT_SECONDS = 2.0
DEFAULT_TIMEOUT_SECONDS = 120.0
MAX_TEXT_BYTES = 1_000_000
MAX_IMAGES = 10
MAX_IMAGE_CHARS = 5 * 2**20
MAX_IMAGES_CHARS = 8 * 2**20
"""Bound of all images of one cell; they must fit into one event together with its text."""
RESTART = "%restart"
LONGER = "A cell that needs longer takes a `timeout`."
SHOW_PAGES = "--InteractiveShell.display_page=True"
"""Prints the help of `name?` as output; a notebook would show it in a pager."""
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
SOURCES = ("text/markdown", "text/latex", "application/json", "text/html", "image/svg+xml")
"""Rich output in text form, the most readable first."""

PREPARATION = (
    f"__import__('runpy').run_path({str(Path(__file__).with_name('kernel_packages.py'))!r})['prepare'](get_ipython())"
)
_NO_TEXT = re.compile(r"<IPython\.core\.display\.\w+ object>|")


class KernelDied(Exception):
    """The kernel process has ended."""


class Kernel:
    """One kernel process and the connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, client: AsyncKernelClient, folder: str) -> None:
        self._process = process
        self._folder = folder
        self._client = client

    @classmethod
    async def start(cls, cwd: str) -> Kernel:
        """Start a kernel and wait until it answers."""
        from jupyter_client.asynchronous.client import AsyncKernelClient
        from jupyter_client.connect import write_connection_file

        folder = tempfile.mkdtemp(prefix="kernel-")
        ports = {f"{channel}_port": n for n, channel in enumerate(("shell", "iopub", "stdin", "hb", "control"), 1)}
        path, _ = write_connection_file(
            str(Path(folder, "connection.json")),
            transport="ipc",
            ip=str(Path(folder, "socket")),
            key=os.urandom(16).hex().encode(),
            **ports,  # type: ignore[arg-type]  # of ipc they are endings of file names
        )
        process = await asyncio.create_subprocess_exec(
            # -s: user packages could shadow the kernel's own; they are added after those have been imported.
            sys.executable,
            "-s",
            "-m",
            "ipykernel_launcher",
            "-f",
            path,
            SHOW_PAGES,
            cwd=cwd or None,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        client = AsyncKernelClient(connection_file=path)
        client.load_connection_file()
        # no heartbeat: it fails on a busy machine, and the process shows whether the kernel is alive
        client.start_channels(hb=False)
        kernel = cls(process, client, folder)
        try:
            async with asyncio.timeout(READY_LIMIT_SECONDS):
                await kernel._wait_until_ready()
        except BaseException:
            await kernel.end()
            raise
        return kernel

    @property
    def is_alive(self) -> bool:
        """Whether the kernel process is alive."""
        return self._process.returncode is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the process, as the OOM killer does."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def working_dir(self) -> str:
        """The kernel's working directory; empty if it has ended."""
        try:
            return str(Path(f"/proc/{self._process.pid}/cwd").readlink())
        except OSError:
            return ""

    def interrupt(self) -> None:
        """Send SIGINT, as a notebook does."""
        if self.is_alive:
            os.kill(self._process.pid, signal.SIGINT)
            # A cell that awaits is cancelled by its event loop, which the signal alone does not wake.
            self._client.kernel_info()

    async def _wait_until_ready(self) -> None:
        """Wait until both channels are connected, because earlier messages would be lost."""
        while self.is_alive:
            self._client.kernel_info()
            with suppress(Empty):
                await self._client.get_shell_msg(timeout=1)
                await self._client.get_iopub_msg(timeout=1)
                return
        raise KernelDied

    def kill(self) -> None:
        """Kill the kernel and the processes of its session, without waiting."""
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the kernel and wait until it has ended."""
        self._client.stop_channels()
        self.kill()
        await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, code: str, output: CellOutput, *, is_silent: bool = False) -> None:
        """Run a cell to its end and add its output to `output`.

        Args:
            is_silent: Whether to run it without counting it as a cell.

        Raises:
            KernelDied: the kernel ended during the cell.
        """
        request = self._client.execute(code, silent=is_silent, allow_stdin=False)
        ended = asyncio.create_task(self._process.wait())
        try:
            while True:
                message = asyncio.create_task(self._client.get_iopub_msg())
                await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    message.cancel()
                    raise KernelDied
                found = message.result()
                if found["parent_header"].get("msg_id") == request and output.add_message(found):
                    return
        finally:
            ended.cancel()


class CellOutput:
    """The output of a cell so far."""

    def __init__(self) -> None:
        self.images: list[str] = []
        self._texts = OutputBuffer(MAX_TEXT_BYTES)

    @property
    def text(self) -> str:
        """The text as a terminal would show it; long text is cut to its head and tail. Read this only once."""
        return self._texts.take(is_final=True)[0]

    def add_message(self, message: dict[str, Any]) -> bool:
        """Add a message; return whether it is the last one."""
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self._add(content["text"])
            case "execute_result" | "display_data":
                self._show(content["data"])
            case "error":
                self._add("\n".join(content["traceback"]))
            case "status":
                return bool(content["execution_state"] == "idle")
        return False

    def _show(self, shown: dict[str, Any]) -> None:
        for kind in IMAGE_TYPES:
            encoded = shown.get(kind)
            if not isinstance(encoded, str) or len(encoded) > MAX_IMAGE_CHARS or len(self.images) == MAX_IMAGES:
                continue
            if len(encoded) + sum(map(len, self.images)) <= MAX_IMAGES_CHARS:
                self.images.append(f"data:{kind};base64,{''.join(encoded.split())}")
        self._add(_readable(shown) + "\n")

    def _add(self, text: str) -> None:
        self._texts.add(text.encode("utf-8", "replace"))


def _readable(shown: dict[str, Any]) -> str:
    """Return an output as text. If the plain text only names a display object, return the object's source."""
    # Differs: OpenHands shows the name of the display object, which is useless to a model.
    plain = str(shown.get("text/plain", ""))
    sources = [shown[kind] for kind in SOURCES if kind in shown]
    if not sources or not _NO_TEXT.fullmatch(plain):
        return plain
    return sources[0] if isinstance(sources[0], str) else json.dumps(sources[0], ensure_ascii=False)


class IPythonSession:
    """The kernel of a conversation, started by the first cell."""

    def __init__(self) -> None:
        self._kernel: Kernel | None = None
        self._shell_dir = ""
        self._interrupted = False

    async def call(self, arguments: dict[str, Any]) -> Result:
        """Run a cell."""
        code = str(arguments["code"])
        shell_dir = str(arguments.get("cwd") or "")
        seconds = float(arguments.get("timeout") or DEFAULT_TIMEOUT_SECONDS)
        output = CellOutput()
        self._interrupted = False
        if code.strip() == RESTART:
            await self._end()
            return {"content": "[The kernel was restarted; its variables are lost.]", "image_urls": []}
        try:
            kernel = await self._get_kernel(shell_dir, arguments.get("kernel_init_code") or "")
            note = await self._run_within(kernel, code, output, seconds, arguments.get("variables"))
        except KernelDied:
            was_killed = self._kernel is not None and self._kernel.was_killed
            await self._end()
            note = "[The kernel died, and its variables are lost. The next cell starts a new one.]"
            memory = str(arguments.get("memory") or "")  # the explanation of the memory limit
            if was_killed and memory:
                note += f"\n{memory}"
        content = output.text.rstrip("\n") + (f"\n{note}" if note else "")
        if arguments.get("include_extra", True) and self._kernel is not None:
            content += f"\n[Jupyter current working directory: {self._kernel.working_dir}]"
            content += f"\n[Jupyter Python interpreter: {sys.executable}]"
        return {"content": content.lstrip("\n"), "image_urls": output.images}

    async def interrupt(self) -> None:
        """Interrupt the running cell."""
        self._interrupted = True
        if self._kernel is not None:
            self._kernel.interrupt()
            asyncio.get_running_loop().call_later(INTERRUPT_LIMIT_SECONDS, self._kill_if_still_running, self._kernel)

    def _kill_if_still_running(self, kernel: Kernel) -> None:
        if self._interrupted and self._kernel is kernel:
            kernel.kill()

    async def _get_kernel(self, shell_dir: str, init_code: str) -> Kernel:
        if self._kernel is None or not self._kernel.is_alive:
            self._kernel = await Kernel.start(shell_dir)
            self._shell_dir = shell_dir
            await self._kernel.run(PREPARATION, CellOutput(), is_silent=True)
            if init_code:
                await self._kernel.run(init_code, CellOutput())
        # the shell has changed its directory since the last cell; the kernel follows
        elif shell_dir != self._shell_dir:
            self._shell_dir = shell_dir
            await self._kernel.run(f"import os; os.chdir({shell_dir!r})", CellOutput())
        return self._kernel

    async def _run_within(
        self, kernel: Kernel, code: str, output: CellOutput, seconds: float, variables: dict[str, str] | None
    ) -> str:
        is_late = False

        async def run() -> None:
            if variables:
                setting = f"__import__('os').environ.update({variables!r})"
                await kernel.run(setting, CellOutput(), is_silent=True)
            if not is_late and not self._interrupted:
                await kernel.run(code, output)

        cell = asyncio.create_task(run())
        try:
            done, _ = await asyncio.wait({cell}, timeout=seconds)
            if not done:
                is_late = True
                kernel.interrupt()
                done, _ = await asyncio.wait({cell}, timeout=INTERRUPT_LIMIT_SECONDS)
                if not done:
                    await self._end()
                    return (
                        f"[Execution timed out ({seconds:g} seconds). The kernel was killed; its variables are lost. "
                        f"{LONGER}]"
                    )
                await cell
                return f"[Execution timed out ({seconds:g} seconds). Variables are kept. {LONGER}]"
            await cell
            return "[The cell was interrupted.]" if self._interrupted else ""
        finally:
            self._interrupted = False
            cell.cancel()

    async def _end(self) -> None:
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            await kernel.end()


def main() -> None:
    """Serve the workspace host that started this program."""
    os.putenv("JPY_PARENT_PID", str(os.getpid()))  # makes the kernel end together with this program
    session = IPythonSession()
    asyncio.run(serve(session.call, session.interrupt))


if __name__ == "__main__":
    main()
