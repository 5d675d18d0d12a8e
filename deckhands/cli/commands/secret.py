"""`deckhands secret`: values that an agent's commands may use and no user can read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import click

from broker.runtime import UsageError
from broker.secrets import SecretReference, SecretValue, check_secret
from deckhands.cli.authorship import author_options, recording, refuse_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import conversation_argument
from deckhands.cli.options import json_option
from deckhands.client import Client, note, on_conversation, print_json, print_text, store_secrets
from deckhands.settings import CliSettings

SECTION = "Budgets, secrets, notes"
SUMMARIES = {"secret": "Give commands a secret that no user can read; list or remove secrets."}


@dataclass(frozen=True, slots=True)
class SecretOptions:
    """Options of `secret`; without a name, the names are listed."""

    conversation_id: str
    name: str | None
    from_env: bool
    source: str | None
    remove: bool
    as_json: bool


@click.command()
@conversation_argument
@click.argument("name", required=False)
@click.option("--from-env", is_flag=True, help="Take the value from the environment variable NAME.")
@click.option(
    "--source",
    metavar="SOURCE:PATH[#FIELD]",
    help="Let tool workers look the value up in a source of their operator, each time that a command names it.",
)
@click.option("--remove", is_flag=True, help="Stop giving it to commands. Its value stays hidden.")
@json_option
@author_options
@with_options(SecretOptions)
def secret(options: SecretOptions) -> None:
    """Add or replace the secret NAME. Its value is read from standard input. Without NAME, list the names."""
    if options.source is not None and (options.from_env or options.remove or options.name is None):
        raise UsageError("--source names where NAME is looked up.", remedy="Leave out --from-env and --remove.")
    settings = CliSettings.from_env()
    conversation_id, name = options.conversation_id, options.name
    if name is None:
        refuse_author("without NAME, nothing changes")
        names = on_conversation(conversation_id, lambda client: client.secrets.list_names(conversation_id))
        if options.as_json:
            print_json({"names": names})
        else:
            print_text("\n".join(names))
        return
    target = f"{conversation_id}/{name}"
    if options.remove:
        on_conversation(
            conversation_id, recording(lambda client: _remove(client, conversation_id, name), "secret.remove", target)
        )
        note(f"Commands no longer get {name}.")
        return
    value: SecretValue
    if options.source is not None:
        value = SecretReference.parse(options.source)
    else:
        value = secret_values(settings, [name])[name] if options.from_env else sys.stdin.read().rstrip("\n")
    on_conversation(
        conversation_id,
        recording(lambda client: store_secrets(client.secrets, conversation_id, {name: value}), "secret.set", target),
    )
    note(f"Commands that name {name} get it.")


async def _remove(client: Client, conversation_id: str, name: str) -> None:
    names = await client.secrets.list_names(conversation_id)
    if name not in names:
        has = f"It has {', '.join(names)}." if names else "It has none."
        raise UsageError(f"The conversation {conversation_id} has no secret {ascii(name)[:100]}.", remedy=has)
    await client.secrets.remove(conversation_id, name)


def secret_values(settings: CliSettings, given: Iterable[str]) -> dict[str, SecretValue]:
    """Return secrets by name. Each is given as NAME, an environment variable, as NAME=VALUE, or as NAME@SOURCE:PATH.

    Raises:
        UsageError: a variable is not set, a value is empty or cannot be a secret, or a source has an invalid form.
    """
    values: dict[str, SecretValue] = {}
    for secret_given in given:
        name = re.split("[=@]", secret_given, maxsplit=1)[0]
        separator, value = secret_given[len(name) : len(name) + 1], secret_given[len(name) + 1 :]
        if separator == "@":
            values[name] = SecretReference.parse(value)
        else:
            values[name] = value if separator else settings.environment.get(name, "")
        if not values[name]:
            what = "The value of the secret" if separator else "The environment variable"
            raise UsageError(f"{what} {name} is {'empty' if separator else 'not set'}.")
        check_secret(name, values[name])
    return values
