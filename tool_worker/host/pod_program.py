"""What a pod runs for a program that has no workspace host: the first process, and the start of the program.

    python3 -I -S pod_program.py start
        The pod's first process, which drops its environment, because others in the pod could read it, and then waits.
    python3 -I -S pod_program.py wait
        Ends when no other process is left, so that an abandoned pod ends with its program.
    python3 -I -S pod_program.py run
        Reads a line with a number, and so many bytes of JSON, from standard input; then becomes the program with its
        environment. On the command line or in the pod's description, others could read the environment.

Does not: import our own modules; it runs as a file, before the import path is set up.
"""

from __future__ import annotations

import json
import os
import sys
import time

FIRST_LIMIT_SECONDS = 300.0
CHECK_SECONDS = 0.5
HEAD_LIMIT_BYTES = 20
EXIT_NOT_STARTED = 127


def main() -> None:
    """Do what the argument names."""
    if sys.argv[1] == "start":
        again = [sys.executable, "-I", "-S", sys.argv[0], "wait"]
        os.execve(sys.executable, again, {})  # noqa: S606  (this program again)
    elif sys.argv[1] == "wait":
        wait()
    else:
        run()


def wait() -> None:
    """Wait for the first program, and then until none is left."""
    ends = time.monotonic() + FIRST_LIMIT_SECONDS
    had_any = False
    while True:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        has_any = any(name.isdecimal() and name != str(os.getpid()) for name in os.listdir("/proc"))
        had_any = had_any or has_any
        if not has_any and (had_any or time.monotonic() > ends):
            return
        time.sleep(CHECK_SECONDS)


def run() -> None:
    """Become the program that standard input describes."""
    given = json.loads(_read(int(_read_line())))
    try:
        os.chdir(given["directory"])
        # Searched on the path of its environment.
        os.execvpe(given["program"][0], given["program"], given["environment"])  # noqa: S606  (the caller's program)
    except OSError as error:
        sys.stderr.write(f"{given['program'][0]}: {error.strerror}\n")
        sys.exit(EXIT_NOT_STARTED)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < HEAD_LIMIT_BYTES:
        line += _read(1)
    return line


def _read(size: int) -> bytes:
    """Read exactly so many bytes: all others belong to the program."""
    content = b""
    while len(content) < size:
        part = os.read(0, size - len(content))
        if not part:
            sys.exit("the connection ended before the program was named")
        content += part
    return content


if __name__ == "__main__":
    main()
