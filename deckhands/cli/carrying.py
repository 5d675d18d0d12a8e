"""`deckhands cp`, `diff` and `checkpoint`: files of a workspace, in and out, and saved."""

from __future__ import annotations

from pathlib import Path

import click

from broker.runtime.errors import UsageError
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import on_conversation
from deckhands.client.files import Carrier
from deckhands.reading.terminal import print_patch


@click.command()
@click.argument("source")
@click.argument("target")
@json_option
def cp(*, source: str, target: str, as_json: bool) -> None:
    """Copy a file or directory into a workspace or out of it: `cp ID:PATH LOCAL`, or `cp LOCAL ID:PATH`.

    PATH is relative to the workspace. What goes to a directory that is there goes into it. At most 64 MiB, packed.
    """
    ends = _place(source), _place(target)
    if (ends[0] is None) == (ends[1] is None):
        raise UsageError(
            "One of the two must be in a workspace, and the other on this machine.",
            remedy="Write ID:PATH for the one and ./PATH for the other.",
        )
    skipped: list[str] = []
    if ends[0] is not None:
        conversation_id, path = ends[0]
        files, size, skipped = on_conversation(
            conversation_id, lambda client: Carrier(client.store).download(conversation_id, path, Path(target))
        )
    else:
        assert ends[1] is not None
        conversation_id, path = ends[1]
        files, size = on_conversation(
            conversation_id, lambda client: Carrier(client.store).upload(conversation_id, Path(source), path)
        )
    if as_json:
        print_json({"files": files, "size_bytes": size, "skipped": skipped})
        return
    for name in skipped:
        note(f"{name} leads out of the directory and was left out.")
    note(f"{files:,} files, {size:,} bytes.")


@click.command()
@click.argument("conversation_id")
def diff(*, conversation_id: str) -> None:
    """Print what was changed in a workspace since its beginning, as a patch for `git apply`.

    In a file or a pipe it is the patch, byte for byte. A terminal shows control characters spelt out.
    """
    patch = on_conversation(conversation_id, lambda client: Carrier(client.store).diff(conversation_id))
    print_patch(patch)
    if not patch:
        note("Nothing was changed.")


@click.command()
@click.argument("conversation_id")
@json_option
def checkpoint(*, conversation_id: str, as_json: bool) -> None:
    """Save a workspace now, from which another node can restore it and forks begin."""
    files, size = on_conversation(conversation_id, lambda client: Carrier(client.store).checkpoint(conversation_id))
    if as_json:
        print_json({"files": files, "size_bytes": size})
    else:
        note(f"Saved: {files:,} files, {size:,} bytes.")


def _place(text: str) -> tuple[str, str] | None:
    """Return the conversation and the path of `ID:PATH`; None for a path of this machine."""
    conversation_id, mark, path = text.partition(":")
    return (conversation_id, path or ".") if mark and "/" not in conversation_id else None
