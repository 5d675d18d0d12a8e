"""Sends raw requests to the proxy of its workspace: `python -I -S egress_client.py requests.json`.

The file holds an object of name to request, in base64. On standard output: one JSON object of name to the first line
of the answer.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
from pathlib import Path

PROXY = ("127.0.0.1", 3128)


def first_line(request: bytes) -> str:
    with socket.create_connection(PROXY, timeout=20) as connection:
        connection.sendall(request)
        connection.settimeout(20)
        answer = b""
        try:
            while b"\n" not in answer and (chunk := connection.recv(4096)):
                answer += chunk
            if answer.startswith(b"HTTP/1.1 200 Connection"):
                connection.sendall(b"GET /tunnelled HTTP/1.1\r\nHost: x\r\n\r\n")
                connection.recv(4096)
        except OSError as error:
            return f"{type(error).__name__}"
    return answer.split(b"\r\n")[0].decode("latin-1")


def main() -> None:
    requests = json.loads(Path(sys.argv[1]).read_text())
    answers = {name: first_line(base64.b64decode(text)) for name, text in requests.items()}
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
