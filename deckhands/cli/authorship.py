"""`--by` and `--reason`: who acts on a conversation and why, for its log or for the record of operations."""

from __future__ import annotations

import getpass
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from broker.contract import OperatorActed
from broker.runtime import UsageError
from deckhands.client import Client, check_note

_KEY = "deckhands.authorship"
T = TypeVar("T")


def _keep(context: click.Context, option: click.Parameter, text: str) -> None:
    assert option.name is not None
    if said := check_note(text, option.name):
        context.meta.setdefault(_KEY, {})[option.name] = said


by_option = click.option("--by", default="", expose_value=False, callback=_keep, help="Your name, for the log.")
reason_option = click.option(
    "--reason", default="", expose_value=False, callback=_keep, help="The reason, for the log."
)


def author_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--by` and `--reason` to a command; `with_author` and `record_operation` read them."""
    return by_option(reason_option(command))


def with_author(client: Client, action: str) -> Client:
    """Return the client. If the user gave an author or a reason, its next call puts both into the log.

    Args:
        action: the operation, as in the server's API: `pause`, `cancel`, …
    """
    found = _find()
    return (
        client if found is None else client.as_operator(OperatorActed(author=found[0], action=action, reason=found[1]))
    )


async def record_operation(client: Client, action: str, target: str) -> None:
    """Record the author and the reason, if given, of an operation that is recorded in no log."""
    found = _find()
    if found is not None:
        from deckhands.server import Operations

        await Operations(client.store).record(found[0], "", action, target, found[1])


def recording(act: Callable[[Client], Awaitable[T]], action: str, target: str) -> Callable[[Client], Awaitable[T]]:
    """Return a function that acts, and then records the author and the reason, if given; see `record_operation`."""

    async def act_and_record(client: Client) -> T:
        done = await act(client)
        await record_operation(client, action, target)
        return done

    return act_and_record


def refuse_author(why: str) -> None:
    """Refuse `--by` and `--reason` where nothing would have them.

    Raises:
        UsageError: one of them was given.
    """
    if any(find_given()):
        raise UsageError(f"--by and --reason have no effect here: {why}.", remedy="Leave them out.")


def find_given() -> tuple[str, str]:
    """Return the author and the reason as the user gave them, each empty if it was not given."""
    given: dict[str, str] = click.get_current_context().meta.get(_KEY, {})
    return given.get("by", ""), given.get("reason", "")


def _find() -> tuple[str, str] | None:
    """Return the author and the reason; without `--by`, the author is the logged-in user."""
    by, reason = find_given()
    return (by or _find_login(), reason) if by or reason else None


def _find_login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        return "unknown"
