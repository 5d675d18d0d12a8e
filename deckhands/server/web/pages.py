"""The files of the web page. They are public and contain no data; the page reads data with its reader's key.

Holds: only files of this folder, read once; scripts are loaded only from this server, and no text is inserted as
markup.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
START = "/"
FOLDER = "/web/"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@cache
def files() -> Mapping[str, tuple[bytes, bytes]]:
    """Return the files by path, each with its media type."""
    found = {}
    for file in resources.files("deckhands.server.web").joinpath("page").iterdir():
        name = file.name
        kind = TYPES.get(name[name.rfind(".") :])
        if kind is not None:
            path = START if name == "index.html" else f"{FOLDER}{name}"
            found[path] = (file.read_bytes(), f"{kind}; charset=utf-8".encode())
    return found


@dataclass(frozen=True)
class Pages:
    """An ASGI application that serves these files."""

    files: Mapping[str, tuple[bytes, bytes]] = field(default_factory=files)

    def has(self, scope: Scope) -> bool:
        """Return whether a request is for one of them."""
        return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in self.files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (ASGI's signature)
        """Send the file."""
        content, kind = self.files[scope["path"]]
        headers = [
            (b"content-type", kind),
            (b"content-length", str(len(content)).encode()),
            (b"content-security-policy", POLICY.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})
