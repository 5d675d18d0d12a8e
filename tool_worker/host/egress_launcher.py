"""Connects a program without a workspace host to its egress proxy, then becomes the program.

    python -I -S egress_launcher.py PORT SOCKET PROGRAM [ARGUMENT…]

Inside the sandbox it listens on the loopback at PORT and sends the listening socket to the tool worker, which listens
at SOCKET. When the tool worker has confirmed it, the program starts. See `egress` for why no forwarder is needed.
"""

from __future__ import annotations

import _socket as socket
import array
import os
import sys


def main() -> None:
    """Send the listening socket, then become the program."""
    port, path, *program = sys.argv[1:]
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(port)))
    listener.listen(128)
    taker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Connect through a short path: a socket address holds at most 108 bytes, and folders may be nested deeper.
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    taker.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.close(folder)
    taker.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))])
    if not taker.recv(1):
        sys.exit("the egress proxy did not start; see the log of the tool worker")
    listener.close()
    taker.close()
    os.execvp(program[0], program)  # noqa: S606  (what the operator's entry names)


if __name__ == "__main__":
    main()
