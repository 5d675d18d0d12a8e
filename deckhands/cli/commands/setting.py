"""`deckhands set`, `interrupt` and `exec`: change a running conversation, stop its work, run a command beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from broker.contract import (
    DEFAULT_TIMEOUT_SECONDS,
    AgentKind,
    ConfirmationPolicy,
    ConversationChanged,
    ConversationCreated,
    Limits,
)
from deckhands.cli.authorship import author_options, find_given, with_author
from deckhands.cli.command_group import with_options
from deckhands.cli.conversation_ids import conversation_argument
from deckhands.cli.options import Amount, ConversationOptions, json_option
from deckhands.cli.selection import parse_labels
from deckhands.client import Change, Client, note, on_conversation, print_json, print_text, to_confirmation_policy

SECTION = "Control a conversation"
SUMMARIES = {
    "set": "Change settings of a running conversation.",
    "interrupt": "Stop the running work of a conversation, and pause it.",
    "exec": "Run a command in a workspace beside the agent.",
}


@dataclass(frozen=True, slots=True)
class SetOptions:
    """Options of `set`; None leaves a setting unchanged."""

    conversation_id: str
    model: str | None
    agent: str | None
    loop: AgentKind | None
    confirm: str | None
    analyzer: str | None
    max_iterations: int | None
    max_budget: float | None
    max_tokens: int | None
    max_seconds: float | None
    tools: tuple[str, ...]
    labels: tuple[str, ...]
    title: str | None


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """Options of `exec`."""

    conversation_id: str
    command: str
    timeout: float
    as_json: bool


@click.command()
@conversation_argument
@click.option("--model", help="Continue with this model or profile.")
@click.option("--agent", help="Let this agent continue.")
@click.option("--loop", type=click.Choice(["sdk", "legacy"]), help="Let the agent continue in the other loop.")
@click.option("--confirm", help="Which actions need confirmation: never, always, risky, or a plug-in.")
@click.option("--analyzer", help="The analyzer of risks: none, llm, shell, ensemble, or a plug-in.")
@click.option("-i", "--max-iterations", type=click.IntRange(min=1), help="The most iterations.")
@click.option("--max-budget", type=Amount(min=0, min_open=True), help="The most US dollars.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The most tokens.")
@click.option("--max-seconds", type=Amount(min=0, min_open=True), help="The most seconds of work.")
@click.option("--tool", "tools", multiple=True, help="Add a tool, or a pattern of tools. May be repeated.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Replace all labels. May be repeated.")
@click.option("--title", help="Another name for listings.")
@author_options
@with_options(SetOptions)
def set(options: SetOptions) -> None:  # noqa: A001  (the name of the verb)
    """Change settings of a conversation from its next step on. Limits that are not given stay unchanged."""
    on_conversation(options.conversation_id, lambda client: _change(client, options))
    note("The change is in the log.")


@click.command()
@conversation_argument
@author_options
@with_options(ConversationOptions)
def interrupt(options: ConversationOptions) -> None:
    """Stop the running work of a conversation, and pause it; `resume` continues it."""
    name = options.conversation_id
    on_conversation(name, lambda client: with_author(client, "interrupt").interrupt(name))
    note("The request is in the log.")


@click.command()
@conversation_argument
@click.argument("command")
@click.option(
    "--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, show_default=True, help="Kill it after this many seconds."
)
@author_options
@json_option
@with_options(ExecOptions)
def exec(options: ExecOptions) -> int:  # noqa: A001  (the name of the verb)
    """Run COMMAND in the workspace, in a separate shell; the agent does not see it. Exits with its code."""
    name, seconds = options.conversation_id, options.timeout
    by, reason = find_given()
    done = on_conversation(
        name,
        lambda client: client.execute(name, options.command, timeout_seconds=seconds, by=by, reason=reason),
    )
    if options.as_json:
        print_json({"event_id": done.event_id, "output": done.output, "exit_code": done.exit_code})
    else:
        print_text(done.output)
    return done.exit_code if done.exit_code >= 0 else 1


async def _change(client: Client, options: SetOptions) -> None:
    name = options.conversation_id
    by, reason = find_given()
    change = Change(
        agent=options.agent,
        loop=options.loop,
        confirmation=await _policy(client, options),
        analyzer=options.analyzer,
        limits=await _limits(client, options),
        tools=options.tools,
        labels=parse_labels(options.labels) if options.labels else None,
        title=options.title,
        by=by,
        reason=reason,
    )
    await client.change(name, change, model=options.model)


async def _policy(client: Client, options: SetOptions) -> ConfirmationPolicy | None:
    """Return the policy with another mode, otherwise unchanged."""
    if options.confirm is None:
        return None
    mode = to_confirmation_policy(options.confirm).mode
    policy = ConfirmationPolicy()
    for event in await client.events(options.conversation_id, is_lenient=True):
        if isinstance(event, ConversationCreated):
            policy = event.agent.confirmation
        elif isinstance(event, ConversationChanged):
            policy = event.confirmation or (event.agent.confirmation if event.agent else policy)
            policy = policy.model_copy(update={"analyzer": event.analyzer}) if event.analyzer else policy
    return policy.model_copy(update={"mode": mode})


async def _limits(client: Client, options: SetOptions) -> Limits | None:
    """Return the limits with the given ones replaced; None if none is given."""
    named: dict[str, Any] = {
        "max_iterations": options.max_iterations,
        "max_budget_usd": options.max_budget,
        "max_tokens": options.max_tokens,
        "max_seconds": options.max_seconds,
    }
    changes = {limit: value for limit, value in named.items() if value is not None}
    if not changes:
        return None
    limits = Limits()
    for event in await client.events(options.conversation_id, is_lenient=True):
        if isinstance(event, ConversationCreated | ConversationChanged):
            limits = event.limits or limits
    return limits.model_copy(update=changes)
