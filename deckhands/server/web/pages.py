"""The web page: its files, and the login with a one-time link.

The files are public and contain no data; the page reads data with its reader's key.

Holds: the page consists of files of this folder only, read once. Scripts are loaded only from this server, and no text
is inserted as markup.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from deckhands.server.auth.api_keys import AccessDenied
from deckhands.server.dependencies import GatewayOf

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
START = "/"
FOLDER = "/web/"
LATER = ("highlight", "uplot", "xterm")
"""Scripts that the page loads only when it needs them start with these."""
PRELOADS = b"<!-- modules -->"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@cache
def files() -> Mapping[str, tuple[bytes, bytes]]:
    """Return the files by path, each with its media type."""
    found: dict[str, tuple[bytes, bytes]] = {}
    page = resources.files("deckhands.server.web").joinpath("page")
    for folder, prefix in ((page, FOLDER), (page.joinpath("vendored"), f"{FOLDER}vendored/")):
        for file in folder.iterdir():
            name = file.name
            kind = TYPES.get(name[name.rfind(".") :])
            if kind is not None:
                path = START if name == "index.html" else f"{prefix}{name}"
                found[path] = (file.read_bytes(), f"{kind}; charset=utf-8".encode())
    index, media_type = found[START]
    found[START] = (index.replace(PRELOADS, _render_preloads(found)), media_type)
    return found


def _render_preloads(paths: Iterable[str]) -> bytes:
    """Return the links that let a browser fetch all modules at once instead of one level of imports after another."""
    modules = [path for path in paths if path.endswith(".js") and not path.rpartition("/")[2].startswith(LATER)]
    return "\n".join(f'<link rel="modulepreload" href="{path}">' for path in sorted(modules)).encode()


@dataclass(frozen=True)
class Pages:
    """An ASGI application that serves these files."""

    files: Mapping[str, tuple[bytes, bytes]] = field(default_factory=files)

    def has(self, scope: Scope) -> bool:
        """Return whether a request is for one of these files."""
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


routes = APIRouter(tags=["web"])


class PageTicket(BaseModel):
    """The ticket of a one-time link."""

    model_config = ConfigDict(extra="forbid")

    ticket: str = Field(pattern=r"^[\w-]{20,100}$", examples=["Yl3o0hQ2Xk5b9sVtq1cWmA7uZr8e4dGf6jTnPiLxOyE"])


class PageToken(BaseModel):
    """The key of a one-time link."""

    token: str = Field(examples=["dh_…"])


@routes.post("/entries", status_code=201, summary="Enter by a one-time link")
async def enter(gateway: GatewayOf, new: PageTicket) -> PageToken:
    """Exchange the ticket of `deckhands open --link` for its key, once. Needs no key."""
    token = await gateway.tickets.take_entry(new.ticket)
    if not token:
        raise AccessDenied(
            "unauthorized", "The link is no longer valid.", remedy="Make a new one: deckhands open --link."
        )
    return PageToken(token=token)
