"""Workspaces by the routes of OpenHands' agent server: commands, files, and changes in Git.

Each route exists twice: for the workspace of a conversation, and for that of the caller's API key.

Holds: everything runs in the sandbox of a tool worker; a file passes through a directory of the server that exists for
one request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import shlex
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from fastapi import Path as InPath
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from broker.contract import MAX_COMMAND_CHARS, MAX_TIMEOUT_SECONDS, TRUNCATION_MARKER, Event, decode_any
from broker.log import Conversations
from deckhands.client import CommandResult
from deckhands.server.dependencies import GatewayOf, Reader
from deckhands.server.files import hold_folder
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.openhands.bash_commands import (
    find_bash_event,
    load_bash_events,
    match_kind,
    stop,
    to_bash_event,
    wrap,
)
from deckhands.server.openhands.caller_workspaces import CallerWorkspace, CallerWorkspaces, find_own, find_scoped
from deckhands.server.openhands.conversation_ids import find_conversation
from deckhands.server.openhands.requests import refuse
from deckhands.server.problems import Problem
from deckhands.server.streams import reserve_stream

MAX_PAGE = 100
MAX_EVENTS_SORTED = 10_000
MAX_PATH_CHARS = 4_096
SCRIPT_SECONDS = 60.0
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
NO_REPOSITORY = 3
"""The exit code of a script that finds no Git repository."""
DEFAULT_EXCLUDES = (
    *("node_modules", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox"),
    *("dist", "build", "target", ".next", ".cache"),
)
STATUSES = {"A": "ADDED", "M": "UPDATED", "T": "UPDATED", "D": "DELETED", "R": "MOVED", "C": "ADDED"}
FOUND: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


class BashRequest(JsonBody):
    """A command for bash."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"command": "ls", "timeout": 30}]})

    command: str = Field(min_length=1, max_length=MAX_COMMAND_CHARS, examples=["ls"])
    cwd: str | None = Field(default=None, max_length=MAX_PATH_CHARS, description="the directory; null: the workspace")
    timeout: int = Field(default=300, ge=1, le=int(MAX_TIMEOUT_SECONDS), description="seconds until it is killed")


class BashPage(BaseModel):
    """Events of commands."""

    items: list[dict[str, Any]]
    next_page_id: str | None = None


class Success(BaseModel):
    """The request was carried out."""

    success: bool = Field(default=True, examples=[True])


class UploadResult(Success):
    """A file was written."""

    file_size: int = Field(examples=[12])


class GitChange(BaseModel):
    """A file that differs."""

    status: str = Field(examples=["UPDATED"])
    path: str = Field(examples=["src/main.py"])


class GitDiff(BaseModel):
    """A file before and after; null where it does not exist."""

    modified: str | None = None
    original: str | None = None


FORM: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {"file": {"type": "string", "format": "binary"}},
            }
        }
    },
}
PathQuery = Annotated[str, Query(min_length=1, max_length=MAX_PATH_CHARS, description="a path in the workspace")]
Ref = Annotated[str | None, Query(max_length=200, pattern=r"^[^-\s][^\s]*$", description="the Git ref to compare with")]
TrajectoryId = Annotated[str, InPath(max_length=64, description="the UUID of a conversation, or its id")]
Sha = Annotated[str | None, Query(pattern=r"^[0-9a-fA-F]{4,64}$", description="show what this commit changed")]


async def start_bash_command(spaces: CallerWorkspaces, asked: BashRequest) -> JSONResponse:
    """Start a command, and return it. Search its output by the command's id."""
    workspace = await spaces.find(asked.cwd or "")
    event_id = await _start(spaces, workspace, asked)
    return JSONResponse(await _show(spaces, workspace, event_id))


async def execute_bash_command(spaces: CallerWorkspaces, asked: BashRequest) -> JSONResponse:
    """Run a command, and return its output when it has ended."""
    reserve_stream(spaces.gateway, spaces.principal)
    workspace = await spaces.find(asked.cwd or "")
    event_id = await _start(spaces, workspace, asked)
    events = spaces.gateway.follower.tail(
        workspace.conversation_id, after=event_id, is_whole=True, is_lenient=True, is_endless=True
    )
    with contextlib.suppress(TimeoutError):
        async with contextlib.aclosing(events), asyncio.timeout(asked.timeout + 60):
            async for event in events:
                fields = to_bash_event(workspace.conversation_id, event)
                if event.cause == event_id and fields is not None:
                    return JSONResponse(fields)
    raise Problem(504, "no_answer", "No tool worker has answered the command.", remedy="Search for its output.")


async def search_bash_events(
    spaces: CallerWorkspaces,
    *,
    kind__eq: Literal["BashCommand", "BashOutput"] | None = None,
    command_id__eq: UUID | None = None,
    timestamp__gte: datetime | None = None,
    timestamp__lt: datetime | None = None,
    order__gt: int | None = None,
    sort_order: Literal["TIMESTAMP", "TIMESTAMP_DESC"] = "TIMESTAMP",
    page_id: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(gt=0, le=MAX_PAGE)] = MAX_PAGE,
) -> BashPage:
    """List the commands that were run in the workspace, and their outputs."""
    workspaces = await spaces.list_existing()
    after = 0
    if command_id__eq is not None:
        workspace, event_id = find_bash_event(workspaces, command_id__eq)
        workspaces, after = [workspace], event_id - 1
    found: list[tuple[CallerWorkspace, Event, dict[str, Any]]] = []
    for workspace in workspaces:
        async for event, fields in load_bash_events(spaces.gateway.client, workspace.conversation_id, after):
            is_own = command_id__eq is None or str(command_id__eq) in (fields["id"], fields.get("command_id"))
            moment = event.timestamp
            is_in_time = moment is None or (
                (timestamp__gte is None or moment >= _to_utc(timestamp__gte))
                and (timestamp__lt is None or moment < _to_utc(timestamp__lt))
            )
            is_later = order__gt is None or fields.get("order", order__gt + 1) > order__gt
            if is_own and is_in_time and is_later and match_kind(fields, kind__eq):
                found.append((workspace, event, fields))
                if len(found) > MAX_EVENTS_SORTED:
                    raise Problem(413, "too_many", "There are too many events.", remedy="Search by a command's id.")
            if command_id__eq is not None and fields.get("command_id") == str(command_id__eq):
                break
    if len(workspaces) > 1:
        found.sort(key=lambda one: one[2]["timestamp"])
    if sort_order == "TIMESTAMP_DESC":
        found.reverse()
    start = _find_page([fields["id"] for _, _, fields in found], page_id)
    page = [await _restore(spaces, workspace, event) for workspace, event, _ in found[start : start + limit]]
    rest = found[start + limit :]
    return BashPage(
        items=[fields for fields in page if fields is not None], next_page_id=rest[0][2]["id"] if rest else None
    )


def _find_page(ids: Sequence[str], page_id: str | None) -> int:
    """Return the position of the first event of a page.

    Raises:
        Problem: the page id names no event.
    """
    if page_id is None:
        return 0
    if page_id not in ids:
        raise Problem(400, "unknown_page", "page_id: there is no such page.", remedy="Start without page_id.")
    return ids.index(page_id)


async def _restore(spaces: CallerWorkspaces, workspace: CallerWorkspace, event: Event) -> dict[str, Any] | None:
    """Return an event of a command with its long texts."""
    name = workspace.conversation_id
    return to_bash_event(name, await spaces.gateway.client.log.blobs.restore_event(name, event))


async def get_bash_event(spaces: CallerWorkspaces, event_id: UUID) -> JSONResponse:
    """Show a command or its output."""
    return JSONResponse(await _show(spaces, *find_bash_event(await spaces.list_existing(), event_id)))


async def batch_bash_events(
    spaces: CallerWorkspaces, event_ids: Annotated[list[UUID], Query(max_length=MAX_PAGE)]
) -> JSONResponse:
    """Show commands and outputs by their ids; null for an unknown id."""
    workspaces = await spaces.list_existing()
    found: list[dict[str, Any] | None] = []
    for name in event_ids:
        try:
            found.append(await _show(spaces, *find_bash_event(workspaces, name)))
        except Problem:
            found.append(None)
    return JSONResponse(found)


async def clear_bash_events(spaces: CallerWorkspaces) -> Success:  # noqa: ARG001  (for its scope)
    """Refuse to remove the commands of a workspace."""
    raise refuse("A log keeps its commands. Deleting the conversation removes them.")


async def stop_bash_command(spaces: CallerWorkspaces, command_id: Annotated[UUID, InPath()]) -> Success:
    """Stop a command and the programs that it has started. No effect if it has ended."""
    found = find_bash_event(await spaces.list_existing(), command_id)
    client = spaces.gateway.client_for(spaces.principal, "execute", "stop")
    await stop(client, spaces.principal.author, *found)
    return Success()


async def upload_file(spaces: CallerWorkspaces, path: PathQuery, request: Request) -> UploadResult:
    """Write a file into the workspace, completely or not at all. The form contains the file as `file`."""
    workspace = await spaces.find(path)
    place = workspace.to_relative(path)
    if place == ".":
        raise Problem(422, "bad_path", "The workspace itself is not a file.", remedy="Name a file in it.")
    async with hold_folder(spaces.gateway, spaces.principal) as folder:
        source = folder / PurePosixPath(place).name
        async with request.form(max_files=1, max_fields=0) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise Problem(422, "no_file", "The form has no file.", remedy="Send one part with the name `file`.")
            with source.open("wb") as target:
                await asyncio.to_thread(shutil.copyfileobj, file.file, target)
        await spaces.gateway.record(spaces.principal, "upload", f"{workspace.conversation_id}/{place}", "")
        await _open(spaces, workspace)
        _, size = await spaces.gateway.client.files.upload(workspace.conversation_id, source, place)
        await asyncio.to_thread(shutil.rmtree, folder)
    return UploadResult(file_size=size)


async def download_file(spaces: CallerWorkspaces, path: PathQuery) -> Response:
    """Download a file of the workspace."""
    workspace = await spaces.find(path, is_needed=False)
    place = workspace.to_relative(path)
    async with hold_folder(spaces.gateway, spaces.principal) as folder:
        found = await _fetch(spaces, workspace, place, folder)
        if found.is_symlink() or not found.is_file():
            raise Problem(400, "not_a_file", "The path is a directory.", remedy="Ask for its archive.")
        return _send(found, folder, PurePosixPath(place).name)


async def serve_file(spaces: CallerWorkspaces, path: Annotated[str, InPath(max_length=MAX_PATH_CHARS)]) -> Response:
    """Download a file of the workspace by its path."""
    return await download_file(spaces, path)


async def serve_index(spaces: CallerWorkspaces) -> Response:
    """Download `index.html` from the workspace."""
    return await download_file(spaces, "index.html")


async def create_directory(spaces: CallerWorkspaces, path: PathQuery) -> Success:
    """Create a directory and its parents; an existing one does not change."""
    workspace = await spaces.find(path)
    done = await _run(spaces, workspace, f"mkdir -p -- {shlex.quote(workspace.to_relative(path))}")
    if done.exit_code != 0:
        raise Problem(400, "not_created", f"The directory cannot be created: {done.output.strip()[:300]}")
    return Success()


async def archive_directory(
    spaces: CallerWorkspaces,
    path: PathQuery,
    archive_format: Annotated[Literal["git-delta", "tar.gz"], Query(alias="format")] = "git-delta",
    *,
    base_ref: Ref = None,
    use_default_excludes: bool = True,
    exclude: Annotated[list[str], Query(max_length=100)] = [],  # noqa: B006
) -> Response:
    """Download a directory as `tar.gz`, or the changes since the workspace's start as a patch (`git-delta`)."""
    workspace = await spaces.find(path, is_needed=False)
    place = workspace.to_relative(path)
    if archive_format == "git-delta":
        if base_ref is not None:
            raise refuse("A patch is against the start of the workspace.", "Leave base_ref out, or run `git diff`.")
        if place != ".":
            raise refuse("A patch is of the whole workspace.", "Ask for the path `.`, or for the format tar.gz.")
        patch = await spaces.gateway.client.files.diff(workspace.conversation_id)
        return Response(patch, media_type="text/x-diff", headers=_attach("changes.patch"))
    patterns = [*(DEFAULT_EXCLUDES if use_default_excludes else ()), *exclude]
    async with hold_folder(spaces.gateway, spaces.principal) as folder:
        found = await _fetch(spaces, workspace, place, folder)
        if not found.is_dir() or found.is_symlink():
            raise Problem(400, "not_a_directory", "The path is not a directory.", remedy="Download it.")
        packed = folder / "archive.tar.gz"
        await asyncio.to_thread(_pack, found, packed, patterns)
        name = PurePosixPath(place).name or "workspace"
        return _send(packed, folder, f"{name}.tar.gz", media_type="application/gzip")


async def _run_git(spaces: CallerWorkspaces, workspace: CallerWorkspace, directory: str, script: str) -> str | None:
    """Run a script of Git commands in a directory, and return its output; None if there is no repository."""
    enter = f"cd -- {shlex.quote(directory)} && git rev-parse --git-dir >/dev/null 2>&1 || exit {NO_REPOSITORY}\n"
    done = await _run(spaces, workspace, enter + script)
    return None if done.exit_code == NO_REPOSITORY else _take_output(done)


async def git_changes(spaces: CallerWorkspaces, path: PathQuery, ref: Ref = None) -> list[GitChange]:
    """List the files that differ from a commit: by default, from the branch that the work started from."""
    workspace = await spaces.find(path, is_needed=False)
    base = shlex.quote(ref) if ref is not None else _BASE
    script = (
        f'b={base}\nset -o pipefail; git diff --name-status -z --find-renames "$b" -- . | base64 -w0 || exit 4; echo\n'
        "git ls-files --others --exclude-standard -z | base64 -w0"
    )
    output = await _run_git(spaces, workspace, workspace.to_relative(path), script)
    if output is None:
        return []
    tracked, _, untracked = output.partition("\n")
    return _parse_changes(_decode(tracked)) + [
        GitChange(status="ADDED", path=name) for name in _decode(untracked).split("\0")[:-1]
    ]


def _parse_changes(output: str) -> list[GitChange]:
    """Return the changes listed by Git; a moved file has its new name."""
    fields = iter(output.split("\0")[:-1])
    found = []
    for status in fields:
        name = next(fields, "")
        if status[:1] in ("R", "C"):
            name = next(fields, "")
        found.append(GitChange(status=STATUSES.get(status[:1], "UPDATED"), path=name))
    return found


async def git_commit_changes(
    spaces: CallerWorkspaces, sha: Annotated[str, InPath(pattern=r"^[0-9a-fA-F]{4,64}$")], path: PathQuery
) -> list[GitChange]:
    """List the files that a commit changed."""
    workspace = await spaces.find(path, is_needed=False)
    script = (
        f"set -o pipefail; git diff-tree --root --no-commit-id -r --name-status -z --find-renames {sha} | base64 -w0"
    )
    output = await _run_git(spaces, workspace, workspace.to_relative(path), script)
    return [] if output is None else _parse_changes(_decode(output))


async def git_diff(spaces: CallerWorkspaces, path: PathQuery, ref: Ref = None, commit: Sha = None) -> GitDiff:
    """Show a file before and after the changes listed by `git/changes`, or the changes of a commit."""
    if ref is not None and commit is not None:
        raise Problem(400, "bad_request", "Give ref or commit, not both.")
    workspace = await spaces.find(path, is_needed=False)
    file = PurePosixPath(workspace.to_relative(path))
    base = shlex.quote(ref) if ref is not None else _BASE
    base = f"{commit}^" if commit is not None else base
    name = shlex.quote(f"./{file.name}")
    after = f"git show {commit}:{name}" if commit is not None else f"cat -- {name}"
    script = (
        f'b={base}\nshow() {{ t=$("$@" 2>/dev/null | base64 -w0; exit ${{PIPESTATUS[0]}}) && echo "=$t" || echo; }}\n'
        f'show git show "$b":{name}; show {after}'
    )
    output = await _run_git(spaces, workspace, str(file.parent), script)
    if output is None:
        return GitDiff()
    original, _, modified = output.partition("\n")
    before, now = (_decode(text[1:]) if text.startswith("=") else None for text in (original, modified.strip()))
    return GitDiff(original=before, modified=now)


async def git_commits(
    spaces: CallerWorkspaces, path: PathQuery, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> JSONResponse:
    """List the latest commits, the newest first."""
    workspace = await spaces.find(path, is_needed=False)
    script = (
        f"cd -- {shlex.quote(workspace.to_relative(path))} && git rev-parse HEAD >/dev/null 2>&1 || exit 3\n"
        f"git log -n {limit + 1} --format=%H%x1f%h%x1f%s%x1f%an%x1f%aI | base64 -w0"
    )
    done = await _run(spaces, workspace, script)
    lines = [] if done.exit_code else _decode(_take_output(done)).split("\n")[:-1]
    names = ("sha", "short_sha", "subject", "author", "timestamp")
    found = [dict(zip(names, line.split("\x1f"), strict=False)) for line in lines[:limit]]
    return JSONResponse({"commits": found, "has_more": len(lines) > limit})


_BASE = (
    "$(git merge-base HEAD @{upstream} 2>/dev/null || git merge-base HEAD origin/HEAD 2>/dev/null "
    f"|| git rev-parse --verify -q HEAD || echo {EMPTY_TREE})"
)
"""Where the work started: the upstream branch, the default branch of the origin, HEAD, or nothing at all."""


def _add(router: APIRouter) -> None:
    """Add the routes of workspaces, each with the dependency that finds the workspace."""
    finding: Callable[..., Any] = find_scoped if "{conversation_id}" in router.prefix else find_own
    table: tuple[tuple[str, str, Callable[..., Any], dict[str, Any]], ...] = (
        ("POST", "/bash/start_bash_command", start_bash_command, {"response_class": JSONResponse}),
        ("POST", "/bash/execute_bash_command", execute_bash_command, {"response_class": JSONResponse}),
        ("GET", "/bash/bash_events/search", search_bash_events, {}),
        ("GET", "/bash/bash_events/", batch_bash_events, {"response_class": JSONResponse}),
        ("GET", "/bash/bash_events/{event_id}", get_bash_event, {"response_class": JSONResponse}),
        ("DELETE", "/bash/bash_events", clear_bash_events, {"responses": {501: {"description": "a log keeps them"}}}),
        ("POST", "/bash/bash_commands/{command_id}/stop", stop_bash_command, {}),
        ("POST", "/file/upload", upload_file, {"openapi_extra": {"requestBody": FORM}}),
        ("GET", "/file/download", download_file, {"response_class": Response, "responses": FOUND}),
        ("POST", "/file/create_directory", create_directory, {}),
        ("GET", "/file/archive", archive_directory, {"response_class": Response, "responses": FOUND}),
        ("GET", "/git/changes", git_changes, {}),
        ("GET", "/git/diff", git_diff, {}),
        ("GET", "/git/commits", git_commits, {"response_class": JSONResponse}),
        ("GET", "/git/commits/{sha}/changes", git_commit_changes, {}),
    )
    for method, path, function, options in table:
        router.add_api_route(path, _with_workspace(function, finding), methods=[method], **options)


def _with_workspace(function: Callable[..., Any], finding: Callable[..., Any]) -> Callable[..., Any]:
    """Return a route's function with its workspace as a dependency."""
    signature = inspect.signature(function, eval_str=True)
    first, *others = signature.parameters.values()
    found = first.replace(annotation=Annotated[CallerWorkspaces, Depends(finding)])

    @functools.wraps(function)
    async def route(**given: Any) -> Any:
        return await function(**given)

    route.__signature__ = signature.replace(parameters=[found, *others])  # type: ignore[attr-defined]
    return route


own_routes = APIRouter(prefix="/api", tags=["openhands-workspaces"])
routes = APIRouter(prefix="/api/conversations/{conversation_id}", tags=["openhands-workspace"])
for _router in (own_routes, routes):
    _add(_router)


for _path, _function in (("/workspace", serve_index), ("/workspace/{path:path}", serve_file)):
    routes.add_api_route(
        _path,
        _with_workspace(_function, find_scoped),
        methods=["GET"],
        response_class=Response,
        responses=FOUND,
    )


@routes.get("/file/download-trajectory/{trajectory_id}", response_class=Response, responses=FOUND)
async def download_scoped_trajectory(
    gateway: GatewayOf,
    principal: Reader,
    conversation_id: TrajectoryId,  # noqa: ARG001  (a part of the path)
    trajectory_id: TrajectoryId,
) -> Response:
    """Download a conversation, as `/api/file/download-trajectory` does."""
    return await download_trajectory(gateway, principal, trajectory_id)


@own_routes.get("/file/download-trajectory/{conversation_id}", response_class=Response, responses=FOUND)
async def download_trajectory(gateway: GatewayOf, principal: Reader, conversation_id: TrajectoryId) -> Response:
    """Download a conversation as a directory that OpenHands' SDK opens, in a ZIP file."""
    from deckhands.interop import to_sdk_directory_name, to_sdk_files

    found = await find_conversation(gateway, principal, conversation_id)
    events = await gateway.client.events(found, is_whole=True)
    name = to_sdk_directory_name(found)
    async with hold_folder(gateway, principal) as folder:
        packed = folder / "trajectory.zip"

        def pack() -> None:
            files, _ = to_sdk_files(found, events)
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                for path, text in files.items():
                    archive.writestr(f"{name}/{path}", text)

        await asyncio.to_thread(pack)
        return _send(packed, folder, f"{name}.zip", media_type="application/zip")


async def _start(spaces: CallerWorkspaces, workspace: CallerWorkspace, asked: BashRequest) -> int:
    place = workspace.to_relative(asked.cwd or ".")
    return await spaces.gateway.client_for(spaces.principal, "execute", "").start_command(
        workspace.conversation_id,
        wrap(asked.command, place),
        timeout_seconds=float(asked.timeout),
        by=spaces.principal.author,
        may_open=workspace.may_open,
    )


async def _show(spaces: CallerWorkspaces, workspace: CallerWorkspace, event_id: int) -> dict[str, Any]:
    events = await spaces.gateway.client.log.read(
        workspace.conversation_id, after=event_id - 1, until=event_id, decode=decode_any
    )
    fields = await _restore(spaces, workspace, events[0]) if events else None
    if fields is None:
        raise Problem(404, "unknown_command", "There is no such command in the workspace.")
    return fields


async def _run(spaces: CallerWorkspaces, workspace: CallerWorkspace, script: str) -> CommandResult:
    """Run one of our scripts in a workspace."""
    await _open(spaces, workspace)
    return await spaces.gateway.client.execute(
        workspace.conversation_id, script, timeout_seconds=SCRIPT_SECONDS, by=spaces.principal.author
    )


async def _open(spaces: CallerWorkspaces, workspace: CallerWorkspace) -> None:
    """Open the caller's own workspace, if no command has."""
    if not workspace.may_open:
        return
    row = await Conversations(spaces.gateway.store).load_row(workspace.conversation_id)
    if not row.node:
        client = spaces.gateway.client
        event_id = await client.start_command(
            workspace.conversation_id, ":", timeout_seconds=SCRIPT_SECONDS, may_open=True
        )
        events = spaces.gateway.follower.tail(
            workspace.conversation_id, after=event_id, is_lenient=True, is_endless=True
        )
        async with contextlib.aclosing(events), asyncio.timeout(SCRIPT_SECONDS):
            async for event in events:
                if event.cause == event_id:
                    return


async def _fetch(spaces: CallerWorkspaces, workspace: CallerWorkspace, place: str, folder: Path) -> Path:
    """Copy a file or a directory of a workspace, and return the copy."""
    target = folder / "out"
    target.mkdir()
    await spaces.gateway.client.files.download(workspace.conversation_id, place, target)
    (found,) = target.iterdir()
    return found


def _send(file: Path, folder: Path, name: str, *, media_type: str = "application/octet-stream") -> Response:
    """Return a file as an answer; its folder is removed once it is sent."""
    removing = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    return FileResponse(file, media_type=media_type, headers=_attach(name), background=removing)


def _attach(name: str) -> dict[str, str]:
    return {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"}


def _pack(source: Path, target: Path, patterns: list[str]) -> None:
    def choose(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = PurePosixPath(info.name).parts
        is_left_out = any(fnmatch(part, pattern.rstrip("/")) for part in parts[1:] for pattern in patterns)
        return None if is_left_out else info

    with tarfile.open(target, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname=source.name, filter=choose)


def _take_output(done: CommandResult) -> str:
    """Return the whole output of a script.

    Raises:
        Problem: the script failed, or its output was cut.
    """
    if TRUNCATION_MARKER in done.output:
        raise Problem(413, "too_large", "The changes are too large to show.", remedy="Download the files.")
    if done.exit_code != 0:
        raise Problem(400, "git_failed", f"Git has failed: {done.output.strip()[:300]}", remedy="Check path and ref.")
    return str(done.output)


def _decode(text: str) -> str:
    try:
        return base64.b64decode("".join(text.split()), validate=True).decode(errors="replace")
    except ValueError as error:
        raise Problem(502, "git_failed", "The tool worker's answer cannot be read.") from error


def _to_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
