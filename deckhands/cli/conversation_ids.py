"""Conversation ids abbreviated to a prefix, as users type them.

Holds: a full id is used as it is, without a lookup; an ambiguous prefix is refused with a list of the matching ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from broker.log import Conversations
from broker.runtime import StoreError, UnknownConversation, UsageError, is_conversation_id
from deckhands.client import (
    IsArchived,
    NoCluster,
    clean_line,
    open_cluster,
)
from deckhands.cluster import Home
from deckhands.settings import CliSettings

FULL_ID_CHARS = 26
"""The length of generated ids; shorter ones are a producer's names, or abbreviations."""
MAX_CANDIDATES = 10
MAX_COMPLETED = 30
MAX_SHOWN_CHARS = 200
COMPLETION_LIMIT_SECONDS = 5.0
"""The time limit of shell completion for a slow cluster or a busy machine."""


class Ambiguous(UsageError):
    """A prefix matches several conversations."""

    code = "ambiguous"


def find_full_id(text: str) -> str:
    """Return the id with a prefix; the text itself if no id starts with it.

    Raises:
        Ambiguous: several ids start with it; the text lists them.
    """
    if len(text) >= FULL_ID_CHARS or not is_conversation_id(text):
        return text
    settings = CliSettings.from_env()
    home = Home(settings.home)
    if home.has_run(text):
        return text
    runs = {path.name: "run of this machine" for path in home.run_folders() if path.name.startswith(text)}
    try:
        found = runs | asyncio.run(_find_on_cluster(settings, text))
    except NoCluster:
        found = runs
    except StoreError:
        if not runs:
            raise
        found = runs
    if text in found or not found:
        return text
    if len(found) > 1:
        listed = sorted(found.items())[:MAX_CANDIDATES]
        more = "" if len(found) <= MAX_CANDIDATES else "\n    …"
        names = "".join(f"\n    {name}  {clean_line(what, limit=60)}" for name, what in listed)
        raise Ambiguous(f"Several ids start with {text!r}.", remedy=f"Type a longer prefix:{names}{more}")
    return next(iter(found))


async def _find_on_cluster(settings: CliSettings, text: str) -> dict[str, str]:
    """Return the conversations whose ids start with a prefix, each with its state and title."""
    store = await open_cluster(settings=settings)
    try:
        index = Conversations(store)
        try:
            return {text: (await index.load_row(text)).title}
        except UnknownConversation:
            rows = await index.find_by_prefix(text, limit=MAX_CANDIDATES + 1)
    finally:
        await store.aclose()
    return {row.conversation_id: f"{row.state}  {row.title}" for row in rows}


class _ConversationId(click.ParamType):  # type: ignore[type-arg]
    """A click type: an id or a prefix of one. With a mark, the text after the mark is kept as it is."""

    name = "id"

    def __init__(self, mark: str = "") -> None:
        self._mark = mark

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return the text with the full id."""
        head, mark, rest = str(value).partition(self._mark) if self._mark else (str(value), "", "")
        return f"{find_full_id(head)}{mark}{rest}"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:  # noqa: ARG002
        """Return the conversations with the prefix, with state and title; none if the lookup is slow or fails."""
        if self._mark and self._mark in incomplete:
            return []
        found: dict[str, str] = {}
        with suppress(Exception):  # completion never shows errors while the user types
            settings = CliSettings.from_env()
            runs = [path.name for path in Home(settings.home).run_folders() if path.name.startswith(incomplete)]
            found = dict.fromkeys(runs[:MAX_COMPLETED], "run of this machine")
            found |= asyncio.run(_complete(settings, incomplete))
        return [CompletionItem(name, help=clean_line(what, limit=60)) for name, what in found.items()]


async def _complete(settings: CliSettings, text: str) -> dict[str, str]:
    """Return conversations of the cluster whose ids start with the prefix; the newest if it is empty."""
    async with asyncio.timeout(COMPLETION_LIMIT_SECONDS):
        store = await open_cluster(settings=settings, patience_seconds=COMPLETION_LIMIT_SECONDS)
        try:
            index = Conversations(store)
            limit = MAX_COMPLETED
            rows = await (index.find_by_prefix(text, limit=limit) if text else index.list_recent(limit=limit))
        finally:
            await store.aclose()
    return {row.conversation_id: f"{row.state}  {row.title}" for row in rows if is_conversation_id(row.conversation_id)}


CONVERSATION_ID = _ConversationId()
POINT = _ConversationId("@")


def conversation_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument for a conversation: its id or a prefix of it."""
    return click.argument("conversation_id", metavar="ID", type=CONVERSATION_ID)(command)


def conversation_or_task(
    name: str = "conversation_id", metavar: str = "[ID]", kind: _ConversationId = CONVERSATION_ID
) -> Callable[..., Any]:
    """Add the argument for a conversation, and `--task` for that of a Celery task; exactly one must be given.

    In both cases the command gets the conversation's id, and the task's id if it was given.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(*, task: str | None, **values: Any) -> Any:
            if (task is None) == (values[name] is None):
                raise UsageError(
                    "It is not clear which conversation is meant.", remedy="Name its ID, or pass --task, and not both."
                )
            if task is None:
                return command(task=None, **values)
            from deckhands.client import derive_task_conversation_id

            try:
                return command(**{**values, "task": task, name: derive_task_conversation_id(task)})
            except UnknownConversation as error:
                raise convert_error_of_task(error, task) from error

        option = click.option("--task", metavar="TASK", help="The conversation of the Celery task with this id.")
        argument: Callable[..., Any] = click.argument(name, metavar=metavar, type=kind, required=False)
        named: Callable[..., Any] = argument(option(call))
        return named

    return decorate


class UnknownTask(UsageError):
    """A Celery task that has no conversation in the store."""

    code = UnknownConversation.code


def convert_error_of_task(error: UnknownConversation, task: str) -> UsageError:
    """Convert the error for a task without a conversation; errors about archived conversations are kept."""
    if isinstance(error, IsArchived):
        return error
    return UnknownTask(
        f"The Celery task {ascii(task)[:MAX_SHOWN_CHARS]} has no conversation.",
        remedy="Only tasks deckhands.run and deckhands.submit have one, from their receipt until its deletion.",
    )
