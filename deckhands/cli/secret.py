"""`deckhands secret`: what an agent's commands may use, and nobody may read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from functools import partial

import click

from broker.errors import UsageError
from broker.secrets import Secrets, secret_key
from broker.settings import BrokerSettings
from deckhands.cli.options import json_option
from deckhands.cli.output import note, print_json
from deckhands.cli.reach import conversation_client
from deckhands.client import Client
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
        names = asyncio.run(_names(settings, conversation_id))
        if as_json:
            print_json({"names": names})
        else:
            click.echo("\n".join(names))
        return
    if remove:
        asyncio.run(_remove(settings, conversation_id, name))
        note(f"{name} is given to no command any more.")
        return
    value = secret_values(settings, [name])[name] if from_env else sys.stdin.read().rstrip("\n")
    asyncio.run(_put(settings, conversation_id, {name: value}))
    note(f"Commands that name {name} get it.")


def secret_values(settings: FaceSettings, names: Iterable[str]) -> dict[str, str]:
    """Return variables of this environment.

    Raises:
        UsageError: one is not set.
    """
    values = {name: settings.environment.get(name, "") for name in names}
    if missing := [name for name, value in values.items() if not value]:
        raise UsageError(f"The environment variable {missing[0]} is not set.")
    return values


async def keep_secrets(client: Client, conversation_id: str, values: Mapping[str, str]) -> None:
    """Keep secrets for a conversation, which need not have begun."""
    secrets = _secrets(client)
    for name, value in values.items():
        await secrets.put(conversation_id, name, value)


def _secrets(client: Client) -> Secrets:
    return Secrets(client.store, partial(secret_key, BrokerSettings.from_env(), is_made=True))


async def _names(settings: FaceSettings, conversation_id: str) -> list[str]:
    async with conversation_client(settings, conversation_id) as client:
        return await _secrets(client).names(conversation_id)


async def _remove(settings: FaceSettings, conversation_id: str, name: str) -> None:
    async with conversation_client(settings, conversation_id) as client:
        await _secrets(client).remove(conversation_id, name)


async def _put(settings: FaceSettings, conversation_id: str, values: Mapping[str, str]) -> None:
    async with conversation_client(settings, conversation_id) as client:
        await keep_secrets(client, conversation_id, values)
