"""Files of a workspace: upload, download, and the patch of all changes; and uploads for new conversations.

Holds: no file is in memory as a whole; its content passes through a directory that exists for one request. The tool
worker, which has the files, checks names again. An upload for a new conversation belongs to one idempotency key of one
tenant.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask
from starlette.responses import Response

from broker.log import check_admission
from deckhands.client import to_conversation_id
from deckhands.server.auth.uploads import KEPT_SECONDS
from deckhands.server.conversations import ReadableId, WritableId
from deckhands.server.dependencies import GatewayOf, Reader, Writer, scoped_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.models import DirectoryEntry, StoredUpload, Uploaded
from deckhands.server.problems import Problem

routes = APIRouter(prefix="/conversations/{conversation_id}", tags=["files"])
uploads = APIRouter(prefix="/uploads", tags=["files"])
MAX_PATH_BYTES = 4_096
MAX_NAME_BYTES = 255
BYTES: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
FOUND: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": BYTES, "application/x-tar": BYTES}},
    409: {"description": "the conversation has no workspace yet"},
}


async def parse_path(path: str) -> str:
    """Return the path of a file, relative to the workspace. An empty one names the workspace: URLs cannot end in `.`.

    Raises:
        Problem: the path is not relative.
    """
    path = path or "."
    parts = path.rstrip("/").split("/")
    is_long = len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES
    is_long = is_long or any(len(part.encode("utf-8", "replace")) > MAX_NAME_BYTES for part in parts)
    is_wild = path != "." and any(part in ("", ".", "..") for part in parts)
    if is_long or is_wild or "\\" in path or not path.isprintable():
        raise Problem(
            400,
            "bad_path",
            "The path leads out of the workspace, or is invalid.",
            remedy="Write it relative to the workspace, without `..`.",
        )
    return path


FilePath = Annotated[str, Depends(parse_path)]
AtEvent = Annotated[
    int | None,
    Query(ge=1, lt=10**12, description="the files of the last checkpoint at or before this event; omitted: as now"),
]


@asynccontextmanager
async def hold_folder(gateway: Gateway, principal: Principal) -> AsyncGenerator[Path]:
    """Yield a new directory for a file in transfer; it is removed if the block fails.

    Raises:
        Problem: the tenant has its share of transfers, or all are in use.
    """
    with gateway.transfers.holding(principal.tenant):
        async with _make_folder() as folder:
            yield folder


@asynccontextmanager
async def _make_folder() -> AsyncGenerator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="deckhands-files-"))
    try:
        yield folder
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


@routes.get("/files", summary="List files")
async def listing(
    gateway: GatewayOf,
    _principal: Reader,
    conversation_id: ReadableId,
    path: Annotated[str, Query(max_length=MAX_PATH_BYTES, description="a directory of the workspace")] = ".",
    at: AtEvent = None,
) -> list[DirectoryEntry]:
    """List a directory of the workspace by name; at most 5,000 entries."""
    found = await gateway.client.files.list(conversation_id, await parse_path(path), at=at)
    return [DirectoryEntry(name=entry.name, kind=entry.kind, size_bytes=entry.size_bytes) for entry in found]


@routes.put(
    "/files/{path:path}",
    status_code=201,
    openapi_extra={"requestBody": {"content": {"application/octet-stream": BYTES}}},
)
async def upload(
    gateway: GatewayOf, principal: Writer, conversation_id: WritableId, request: Request, path: FilePath
) -> Uploaded:
    """Write a file into the workspace, completely or not at all. The request body is its content."""
    if path == ".":
        raise Problem(400, "bad_path", "The workspace itself is not a file.", remedy="Name a file in it.")
    async with hold_folder(gateway, principal) as folder:
        source = folder / path.rstrip("/").rpartition("/")[2]
        await _receive_body(request, source)
        await gateway.record(principal, "upload", f"{conversation_id}/{path}", "")
        files, size = await gateway.client.files.upload(conversation_id, source, path)
        await asyncio.to_thread(shutil.rmtree, folder)
    return Uploaded(files=files, size_bytes=size)


@routes.get("/files/{path:path}", response_class=Response, responses=FOUND)
async def download(
    gateway: GatewayOf, principal: Reader, conversation_id: ReadableId, path: FilePath, at: AtEvent = None
) -> Response:
    """Download a file from the workspace; a directory is sent as a tar file."""
    async with hold_folder(gateway, principal) as folder:
        target = folder / "out"
        target.mkdir()
        await gateway.client.files.download(conversation_id, path, target, at=at)
        (found,) = target.iterdir()
        name = found.name
        kind = "application/octet-stream"
        if found.is_symlink() or not found.is_file():
            name = f"{found.name}.tar"
            kind = "application/x-tar"
            packed = folder / "tar"
            await asyncio.to_thread(_pack_directory, found, packed)
            found = packed
        removing = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
        shown = f"attachment; filename*=UTF-8''{quote(name)}"
        return FileResponse(found, media_type=kind, headers={"Content-Disposition": shown}, background=removing)


@routes.get(
    "/checkpoints",
    summary="List the checkpoints of a workspace",
    responses={200: {"content": {"application/json": {"example": [12, 31]}}}, 409: FOUND[409]},
)
async def checkpoints(gateway: GatewayOf, _principal: Reader, conversation_id: ReadableId) -> list[int]:
    """List the events after which the files of the workspace were saved, in order; see `at` of the files."""
    return [*await gateway.client.files.checkpoints(conversation_id)]


@routes.get("/patch", response_class=Response, responses={200: {"content": {"text/x-diff": {}}}, 409: FOUND[409]})
async def patch(gateway: GatewayOf, _principal: Reader, conversation_id: ReadableId) -> Response:
    """Show all changes of the workspace since the conversation started, as a patch for `git apply`.

    The header `Deckhands-Left-Out` is the number of changed files that did not fit.
    """
    changes = await gateway.client.files.changes(conversation_id)
    return Response(
        changes.patch, headers={"Deckhands-Left-Out": str(changes.left_out_count)}, media_type="text/x-diff"
    )


@uploads.put(
    "/{sha256}",
    status_code=201,
    summary="Upload the files of a new workspace",
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": BYTES}}},
)
async def store_upload(
    gateway: GatewayOf,
    principal: Writer,
    request: Request,
    sha256: Annotated[str, InPath(pattern="^[0-9a-f]{64}$", description="the SHA-256 of the body")],
    key: Annotated[str, Header(alias="Idempotency-Key", description="the key of the conversation to create")],
) -> StoredUpload:
    """Upload an archive or a Git bundle of up to 64 MiB for a new conversation under the same idempotency key.

    Its `workspace.source` is then `{"kind": "upload", "name": …, "format": …, "parcel": SHA256}`. An upload that no
    conversation uses within an hour is dropped.
    """
    own = scoped_key(principal, key)
    assert own is not None
    conversation_id = to_conversation_id(None, own)
    tenant = "" if principal.is_for_all_tenants else principal.tenant
    await check_admission(gateway.store, conversation_id, tenant)
    async with hold_folder(gateway, principal) as folder:
        source = folder / "upload"
        size, digest = await _receive_body(request, source)
        if digest != sha256:
            raise Problem(422, "wrong_content", f"The body has the SHA-256 {digest}.", remedy="Send it again.")
        if not size:
            raise Problem(422, "wrong_content", "The body is empty.", remedy="Send an archive or a bundle.")
        await gateway.record(principal, "upload", f"uploads/{sha256}", "")
        await gateway.uploads.add(principal.tenant, conversation_id, sha256, source)
        await asyncio.to_thread(shutil.rmtree, folder)
    return StoredUpload(parcel=sha256, size_bytes=size, kept_seconds=KEPT_SECONDS)


async def _receive_body(request: Request, target: Path) -> tuple[int, str]:
    """Write the body of a request into a file, and return its size and its SHA-256."""
    size = 0
    digest = hashlib.sha256()
    with target.open("wb") as file:
        async for part in request.stream():
            await asyncio.to_thread(file.write, part)
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _pack_directory(source: Path, target: Path) -> None:
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=source.name)
