"""`deckhands secret`: what an agent's commands may use, and nobody may read."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from broker.runtime.errors import UsageError
from broker.secrets.secrets import check_secret
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import on_conversation
from deckhands.client.secret_keeping import keep_secrets
from deckhands.reading.terminal import print_text
from deckhands.settings import FaceSettings


@click.command()
@click.argument("conversation_id")
@click.argument("name", required=False)
@click.option("--from-env", is_flag=True, help="Take the value of the variable NAME of this environment.")
@click.option("--remove", is_flag=True, help="Give it to no command any more. It stays hidden.")
@json_option
def secret(*, conversation_id: str, name: str | None, from_env: bool, remove: bool, as_json: bool) -> None:
    """Add or replace the secret NAME; its value is read from standard input. Without NAME: list the names."""
    settings = FaceSettings.from_env()
    if name is None:
        names = on_conversation(conversation_id, lambda client: client.secrets.names(conversation_id))
        if as_json:
            print_json({"names": names})
        else:
            print_text("\n".join(names))
        return
    if remove:
        on_conversation(conversation_id, lambda client: client.secrets.remove(conversation_id, name))
        note(f"{name} is given to no command any more.")
        return
    value = secret_values(settings, [name])[name] if from_env else sys.stdin.read().rstrip("\n")
    on_conversation(conversation_id, lambda client: keep_secrets(client.secrets, conversation_id, {name: value}))
    note(f"Commands that name {name} get it.")


def secret_values(settings: FaceSettings, given: Iterable[str]) -> dict[str, str]:
    """Return secrets by name, each given as NAME, a variable of this environment, or as NAME=VALUE.

    Raises:
        UsageError: a variable is not set; the text does not contain a value.
    """
    values: dict[str, str] = {}
    for secret_given in given:
        name, separator, value = secret_given.partition("=")
        values[name] = value if separator else settings.environment.get(name, "")
        if not values[name]:
            what = "The value of the secret" if separator else "The environment variable"
            raise UsageError(f"{what} {name} is {'empty' if separator else 'not set'}.")
        check_secret(name, values[name])
    return values
