"""How a host gets its descriptors where none can be inherited: `python3 -I -S arrival.py ENTRANCE MAIN [ARGUMENT…]`.

It takes them from the socket at ENTRANCE, puts each in its place, and becomes the host, without an environment.
"""

from __future__ import annotations

import _socket as socket
import fcntl
import os
import struct
import sys

_OUT_OF_THE_WAY = 64
_MOST = 16


def main() -> None:
    """Arrive."""
    entrance, *host = sys.argv[1:]
    giver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    giver.connect(entrance)
    numbers, rights, _, _ = giver.recvmsg(_MOST, socket.CMSG_SPACE(_MOST * 4))
    received = struct.unpack(f"{len(numbers)}i", rights[0][2])
    # Out of the way of the targets first, or one would overwrite another's source.
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in received]
    giver.send(b".")
    giver.close()
    for descriptor, target in zip(given, numbers, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.execve(sys.executable, [sys.executable, "-I", "-S", *host], {})  # noqa: S606  (the host's own module)


if __name__ == "__main__":
    main()
