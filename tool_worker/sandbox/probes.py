"""Probes that try to escape from a sandbox, run inside it.

Usage: `python -I -S probes.py '{"canary": …, "outside": …, "addresses": …}'`. Each probe returns the thing it reached,
or None. Standard output is a JSON object of these results by probe name.

Holds: a successful probe only reads a file, or opens it for writing without writing. The machine stays unchanged.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def read_password_hashes(_: dict[str, str]) -> str | None:
    """Read the machine's password file."""
    return _can_open("/etc/shadow", os.O_RDONLY)


def read_environments(settings: dict[str, str]) -> str | None:
    """Find the environment of an outside process by its unique value."""
    canary = settings["canary"].encode()
    return next((str(path) for path, content in _in_proc("environ") if canary in content), None)


def read_first_environment(_: dict[str, str]) -> str | None:
    """Read the environment of the first process, which may contain the tool worker's."""
    return next((content.decode("utf-8", "replace") for content in _contents(Path("/proc/1/environ"))), None)


def see_processes(settings: dict[str, str]) -> str | None:
    """Find an outside process by its unique argument."""
    argument = settings["argument"].encode()
    return next((str(path) for path, content in _in_proc("cmdline") if argument in content.split(b"\0")), None)


def write_outside(settings: dict[str, str]) -> str | None:
    """Open a file outside the workspace for writing."""
    return _can_open(settings["outside"], os.O_WRONLY)


def write_system(_: dict[str, str]) -> str | None:
    """Open a file for writing in a system directory."""
    return next((path for path in ("/usr", "/etc", "/usr/bin") if os.access(path, os.W_OK)), None)


def change_kernel(_: dict[str, str]) -> str | None:
    """Open a kernel setting for writing that could start a program outside."""
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger")
    return next((path for path in paths if _can_open(path, os.O_WRONLY)), None)


def connect_to_machine(settings: dict[str, str]) -> str | None:
    """Connect to a port on the machine's loopback interface, or to another address that serves every program."""
    for address in settings["addresses"].split():
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=2).close()
            return address
    return None


def gain_capability(_: dict[str, str]) -> str | None:
    """Find a capability, or the permission to gain one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    held = [name for name in ("CapEff", "CapPrm", "CapBnd") if int(status[name], 16)]
    return ", ".join(held) or (None if status["NoNewPrivs"] == "1" else "new privileges")


PROBES: tuple[Callable[[dict[str, str]], str | None], ...] = (
    read_password_hashes,
    read_environments,
    read_first_environment,
    see_processes,
    write_outside,
    write_system,
    change_kernel,
    connect_to_machine,
    gain_capability,
)


def _in_proc(name: str) -> Iterator[tuple[Path, bytes]]:
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        yield from ((path, content) for content in _contents(path))


def _contents(path: Path) -> Iterator[bytes]:
    """Yield the content of a file that is readable and not empty."""
    with suppress(OSError):
        if content := path.read_bytes():
            yield content


def _can_open(path: str, flags: int) -> str | None:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return None
    return path


def main() -> None:
    """Run all probes."""
    settings = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps({probe.__name__: probe(settings) for probe in PROBES}))


if __name__ == "__main__":
    main()
