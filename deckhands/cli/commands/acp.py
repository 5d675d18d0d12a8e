"""`deckhands acp`: drive conversations from an editor, over standard input and output."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import click

from broker.runtime import UsageError
from broker.secrets import SecretValue
from deckhands.cli.command_group import with_options
from deckhands.cli.commands.secret import secret_values
from deckhands.cli.task_options import SpecOptions, agent_of, spec_of, spec_options, workspace_of
from deckhands.client import UNNAMED_TASK, AsyncConversation, TaskFields, TaskSpec, WorkspaceInput
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"acp": "Drive conversations from an editor (Agent Client Protocol)."}


@dataclass(frozen=True, slots=True, kw_only=True)
class AcpOptions(SpecOptions):
    """Options of `acp`; without a cluster, each session has a private store and workers."""

    cluster: str | None


@click.command(context_settings={"default_map": {"confirm": "risky"}})
@spec_options
@click.option(
    "--cluster", metavar="URL", help="The store of a cluster, redis://…; without it, sessions run on this machine."
)
@with_options(AcpOptions)
def acp(options: AcpOptions) -> None:
    """Drive conversations from an editor, by the Agent Client Protocol on standard input and output.

    The directory of a session is the workspace. With --cluster, it is a directory on the tool workers' machine. The
    other options are those of `submit`, for each new session.
    """
    if find_spec("acp") is None:
        raise UsageError(
            "This needs a package that is not installed: agent-client-protocol.",
            remedy="Install it with `pip install 'deckhands[server]'`.",
        )
    if options.cluster is not None and options.cluster.startswith("http"):
        raise UsageError(
            "An editor drives a cluster by its store, not by a server.", remedy="Pass --cluster redis://…, or none."
        )
    logging.basicConfig(level=logging.WARNING)  # on standard error: the editor reads standard output
    settings = CliSettings.from_env()
    if options.model is None and options.cluster is None:
        options = replace(options, model=settings.model)
    secrets = secret_values(settings, options.secrets)
    _spec_in(options, Path.cwd(), secrets)  # an option that cannot be used is refused before the editor is served
    asyncio.run(_serve(options, secrets))


def _spec_in(options: AcpOptions, directory: Path, secrets: dict[str, SecretValue]) -> TaskSpec:
    """Return the task of a session, except its text."""
    return spec_of(
        options,
        UNNAMED_TASK,
        agent=agent_of(options, options.model),
        workspace=workspace_of(options, WorkspaceInput(path=directory), "auto"),
        secrets=secrets,
    )


async def _serve(options: AcpOptions, secrets: dict[str, SecretValue]) -> None:
    import acp as protocol

    from deckhands.server import EditorAgent

    def make(directory: str, conversation_id: str | None) -> AsyncConversation:
        spec = _spec_in(options, Path(directory).expanduser().absolute(), secrets)
        given = TaskFields.__annotations__.keys() & spec.model_fields_set
        fields: Any = {name: getattr(spec, name) for name in given}
        return AsyncConversation(
            spec.agent, tools=spec.tools, cluster=options.cluster, conversation_id=conversation_id, **fields
        )

    agent = EditorAgent(make)
    try:
        await protocol.run_agent(cast("protocol.Agent", agent))
    finally:
        await agent.aclose()
