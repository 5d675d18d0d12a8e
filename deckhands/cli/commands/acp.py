"""`deckhands acp`: drive conversations from an editor, over standard input and output."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

import click

from broker.runtime import UsageError
from deckhands.cli.command_group import with_options
from deckhands.client import AsyncConversation
from deckhands.settings import CliSettings

SECTION = "Start a conversation"
SUMMARIES = {"acp": "Drive conversations from an editor (Agent Client Protocol)."}


@dataclass(frozen=True, slots=True)
class AcpOptions:
    """Options of `acp`; without a cluster, each session has a private store and workers."""

    agent: str
    model: str | None
    cluster: str | None
    confirmation: str


@click.command()
@click.option("--agent", default="CodeActAgent", show_default=True, help="The agent of new sessions.")
@click.option("--model", help="Its model, or a profile; by default LLM_MODEL.")
@click.option(
    "--cluster", metavar="URL", help="The store of a cluster, redis://…; without it, sessions run on this machine."
)
@click.option(
    "--confirm",
    "confirmation",
    metavar="MODE",
    default="risky",
    show_default=True,
    help="Which actions the user must confirm: never, risky, always, or a plug-in.",
)
@with_options(AcpOptions)
def acp(options: AcpOptions) -> None:
    """Drive conversations from an editor, by the Agent Client Protocol on standard input and output.

    The directory of a session is the workspace. With --cluster, it is a directory on the tool workers' machine.
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
    asyncio.run(_serve(options, CliSettings.from_env()))


async def _serve(options: AcpOptions, settings: CliSettings) -> None:
    import acp as protocol

    from deckhands.server import EditorAgent

    def make(directory: str, conversation_id: str | None) -> AsyncConversation:
        return AsyncConversation(
            options.agent,
            workspace=directory,
            cluster=options.cluster,
            model=options.model or (settings.model if options.cluster is None else None),
            confirmation=options.confirmation,
            conversation_id=conversation_id,
        )

    agent = EditorAgent(make)
    try:
        await protocol.run_agent(cast("protocol.Agent", agent))
    finally:
        await agent.aclose()
