"""`deckhands cp`, `diff` and `checkpoint`: copy the files of a workspace, compare them, save them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from broker.runtime import UsageError, format_count
from deckhands.cli.authorship import author_options, recording, refuse_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import conversation_argument, find_full_id
from deckhands.cli.options import ConversationOptions, json_option
from deckhands.cli.progress import progress
from deckhands.client import ExitCode, WorkspaceFiles, note, on_conversation, print_json, print_patch, print_text

SECTION = "Files of a workspace"
SUMMARIES = {
    "cp": "Copy files into a workspace or out of it.",
    "diff": "Show the changes in a workspace, as a patch.",
    "checkpoint": "Save a workspace now.",
}


NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Options of `cp`; one of the two paths is `ID:PATH`."""

    source: str
    target: str
    at: int | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of `checkpoint`."""

    conversation_id: str
    is_listing: bool
    as_json: bool


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--at",
    type=click.IntRange(min=1),
    metavar="EVENT",
    help="Copy the files of the last checkpoint at or before this event.",
)
@json_option
@author_options
@with_options(CopyOptions)
def cp(options: CopyOptions) -> None:
    """Copy a file or directory into or out of a workspace: `cp ID:PATH LOCAL`, or `cp LOCAL ID:PATH`.

    PATH is relative to the workspace. If the target is an existing directory, the copy is put into it. The limits are 4
    GiB and 200,000 files. A copy that fails leaves nothing behind.
    """
    ends = _parse_place(options.source), _parse_place(options.target)
    if (ends[0] is None) == (ends[1] is None):
        raise UsageError(
            "One path must be in a workspace, and the other on this machine.",
            remedy="Write ID:PATH for the path in the workspace and ./PATH for the local one.",
        )
    if options.at is not None and ends[0] is None:
        raise UsageError("A checkpoint cannot be changed.", remedy="Leave out --at.")
    skipped: list[str] = []
    without_bits: list[str] = []
    with progress("Copied") as on_progress:
        watching: Any = {"on_progress": on_progress, "on_without_bits": without_bits.extend}
        if ends[0] is not None:
            refuse_author("a copy out of a workspace changes nothing")
            conversation_id, path = ends[0]
            files, size, skipped = on_conversation(
                conversation_id,
                lambda client: WorkspaceFiles(client.store).download(
                    conversation_id, path, Path(options.target), at=options.at, **watching
                ),
            )
        else:
            assert ends[1] is not None
            conversation_id, path = ends[1]
            files, size = on_conversation(
                conversation_id,
                recording(
                    lambda client: WorkspaceFiles(client.store).upload(
                        conversation_id, Path(options.source), path, **watching
                    ),
                    "upload",
                    f"{conversation_id}/{path}",
                ),
            )
    if without_bits:
        note(f"Copied without their set-user-id, set-group-id or sticky bits: {', '.join(without_bits)}.")
    if options.as_json:
        print_json({"files": files, "size_bytes": size, "skipped": skipped, "without_bits": without_bits})
        return
    for name in skipped:
        note(f"{name} points outside the directory and was skipped.")
    note(f"{format_count(files, 'file')}, {format_count(size, 'byte')}.")


@click.command()
@conversation_argument
@with_options(ConversationOptions)
def diff(options: ConversationOptions) -> None:
    """Print all changes in a workspace since the conversation started, as a patch for `git apply`.

    A file or a pipe gets the patch byte for byte. On a terminal, control characters are escaped. A patch has at most 64
    MiB: files that do not fit are left out, the largest first, and named on standard error; the exit code is then 6.
    """
    conversation_id = options.conversation_id
    changes = on_conversation(conversation_id, lambda client: WorkspaceFiles(client.store).changes(conversation_id))
    print_patch(changes.patch)
    if changes.left_out_count:
        shown = changes.left_out[:NAMES_SHOWN]
        for name in shown:
            note(f"Left out: {name}")
        if more := changes.left_out_count - len(shown):
            note(f"Left out: {format_count(more, 'more file')}.")
        note(
            f"The patch is not complete: {format_count(changes.left_out_count, 'changed file')} did not fit into "
            "64 MiB. "
            f"Copy those that you need with `deckhands cp {conversation_id}:PATH .`."
        )
        sys.exit(ExitCode.LIMIT)
    elif not changes.patch:
        note("Nothing was changed.")


@click.command()
@conversation_argument
@click.option("--list", "is_listing", is_flag=True, help="List the events whose files are kept, and save nothing.")
@json_option
@author_options
@with_options(CheckpointOptions)
def checkpoint(options: CheckpointOptions) -> None:
    """Save a workspace now. Another node can restore it, and forks start with it."""
    conversation_id = options.conversation_id
    if options.is_listing:
        refuse_author("--list changes nothing")
        events = on_conversation(
            conversation_id, lambda client: WorkspaceFiles(client.store).checkpoints(conversation_id)
        )
        if options.as_json:
            print_json({"events": [*events]})
        else:
            print_text("\n".join(map(str, events)) or "No checkpoint is kept.")
        return
    files, size = on_conversation(
        conversation_id,
        recording(
            lambda client: WorkspaceFiles(client.store).checkpoint(conversation_id), "checkpoint", conversation_id
        ),
    )
    if options.as_json:
        print_json({"files": files, "size_bytes": size})
    else:
        note(f"Saved: {format_count(files, 'file')}, {format_count(size, 'byte')}.")


def _parse_place(text: str) -> tuple[str, str] | None:
    """Split `ID:PATH` into the conversation and the path; None for a path of this machine."""
    conversation_id, mark, path = text.partition(":")
    return (find_full_id(conversation_id), path or ".") if mark and "/" not in conversation_id else None
