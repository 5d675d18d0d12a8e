"""`deckhands submit`: queue a task on a running cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import click
from pydantic import ValidationError

from broker.runtime.errors import UsageError
from broker.specs.specs import Tenancy
from deckhands.cli.connecting import cluster_client
from deckhands.cli.options import NAME_REMEDY, json_option, read_task
from deckhands.cli.output import note, print_json
from deckhands.cli.task_options import (
    TaskOptions,
    agent_of,
    limits_of,
    place_of,
    task_options,
    with_script_here,
    workspace_of,
)
from deckhands.cli.verbs import options_as
from deckhands.client.named_directory import own_directory
from deckhands.reading.terminal import print_text
from deckhands.runs.cluster_notices import warn_of_ignored_settings, warn_of_missing_workers
from deckhands.settings import FaceSettings
from deckhands.verbs.secret import secret_values

SECTION = "Start a conversation"
VERBS = {"submit": "Queue a task on a running cluster."}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions(TaskOptions):
    """Options of `submit`."""

    workspace: str | None
    tenant: str
    experiment: str
    priority: str | None
    idempotency_key: str | None
    as_json: bool


@click.command()
@task_options
@click.option(
    "-w",
    "--workspace",
    metavar="DIR|URL|FILE",
    help="A directory on the tool workers' host, git+https://…#REF, or an archive or bundle; by default an empty one.",
)
@click.option("--tenant", default="", help="Whose budget pays; tenants share a model's quota.")
@click.option("--experiment", default="", help="A part of the tenant's work with its own budget.")
@click.option(
    "--priority",
    type=click.Choice(["interactive", "batch"]),
    help="What goes first when a model's quota is short; by default batch.",
)
@click.option("--idempotency-key", help="The same key always gives the same conversation.")
@json_option
@options_as(SubmitOptions)
def submit(options: SubmitOptions) -> None:
    """Queue a task on a running cluster and print the conversation's id."""
    settings = FaceSettings.from_env()
    task = read_task(options.argument, options.text, file=options.file)
    conversation_id = asyncio.run(_submit(settings, task, options))
    if options.as_json:
        print_json({"conversation_id": conversation_id})
    else:
        print_text(conversation_id)


async def _submit(settings: FaceSettings, task: str, options: SubmitOptions) -> str:
    place = place_of(options.workspace, options)
    agent = agent_of(options, options.model)
    if settings.url is None:  # a cluster named by DECKHANDS_URL may be on other hosts
        agent = with_script_here(agent)
        if place.path is not None:
            place = replace(place, path=own_directory(place.path, settings.environment))
    values = secret_values(settings, options.secrets)
    async with cluster_client(settings) as client:
        conversation_id = await client.submit(
            task,
            agent=agent,
            workspace=workspace_of(options, place, "auto"),
            upload=place.content,
            limits=limits_of(options),
            tools=options.tools,
            tenancy=_tenancy(options),
            title=options.title,
            secrets=values,
            idempotency_key=options.idempotency_key,
        )
        await warn_of_missing_workers(client, note)
        await warn_of_ignored_settings(client, note)
        return conversation_id


def _tenancy(options: SubmitOptions) -> Tenancy | None:
    asked = {"tenant": options.tenant, "experiment": options.experiment, "priority": options.priority}
    given = {name: value for name, value in asked.items() if value}
    try:
        return Tenancy.model_validate(given) if given else None
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise UsageError(f"--{name} is {given[str(name)]!r}.", remedy=NAME_REMEDY) from None
