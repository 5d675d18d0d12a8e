"""`deckhands eval pause`, `resume`, `retune`, `requeue`, `cancel`, `status` and `logs`: steer an evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from broker.contract import TERMINAL_STATES, AgentState, Event
from broker.log import ConversationQuery, ConversationRow, Selection
from broker.runtime import UsageError, is_conversation_id, new_key
from deckhands.cli.authorship import author_options, recording
from deckhands.cli.command_group import with_options
from deckhands.cli.options import Amount, json_option, plain_option
from deckhands.cli.screen_printer import printer_for
from deckhands.cli.selection import require_confirmation, yes_option
from deckhands.client import Client, clean_line, for_each, note, print_json, print_text
from deckhands.evaluation import (
    FRESH_SECONDS,
    LABEL,
    MAX_AT_ONCE,
    OUTCOMES,
    RESULTS,
    AttemptDetails,
    Catalog,
    EvaluationSteering,
    Requeue,
    StoppingCriterion,
    StoredSteering,
    find_evaluation,
    load_request,
    parse_status,
    read_results,
    run_in_store,
)
from deckhands.settings import CliSettings

CHECK_AGENT = "CheckAgent"
RUNNING = "running"
MAX_NAMED = 10
MAX_LINE_CHARS = 1_000
LOOKS, LOOK_SECONDS = 20, 0.25

T = TypeVar("T")


class AtOnceType(click.ParamType):  # type: ignore[type-arg]
    """`auto`, or a number."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the ceiling."""
        if value == "auto":
            return MAX_AT_ONCE
        try:
            return int(click.IntRange(1, MAX_AT_ONCE).convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is neither `auto` nor a number from 1 to {MAX_AT_ONCE:,}.", param, ctx)


class UntilType(click.ParamType):  # type: ignore[type-arg]
    """A criterion of `stopping.Until`."""

    name = "ci=3%|decided"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a criterion unchanged, if it is valid."""
        if value != "":
            try:
                StoppingCriterion.parse(str(value), 2)
            except UsageError as error:
                self.fail(f"{error.message} {error.remedy}", param, ctx)
        return str(value)


evaluation_argument = click.argument("evaluation", metavar="DIR|NAME")
at_once_option = click.option(
    "-n", "--concurrency", "at_once", type=AtOnceType(),
    help="Maximum number of attempts at the same time; `auto` adapts it to the load. By default 4.",
)  # fmt: skip
budget_option = click.option(
    "--budget", type=Amount(min=0, may_be_infinite=True),
    help="Start no further attempt once all of them have cost this much, in USD; `inf`: no limit.",
)  # fmt: skip
token_budget_option = click.option(
    "--token-budget", type=Amount(min=0, may_be_infinite=True), metavar="N",
    help="Start no further attempt once all of them have used this many prompt and completion tokens; `inf`: no limit.",
)  # fmt: skip
retries_option = click.option(
    "--retries", type=click.IntRange(0, 100),
    help="How often an attempt is repeated after a failure of the infrastructure. By default 3.",
)  # fmt: skip
until_option = click.option(
    "--until", type=UntilType(), metavar="ci=3%|decided",
    help="Stop early: once each pass@1 is known to ±3 % (ci=3%), or once the first model is known as better or worse.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of `pause` and `resume`."""

    evaluation: str


@dataclass(frozen=True, slots=True)
class EvalCancelOptions:
    """Options of `cancel`."""

    evaluation: str
    is_sure: bool


@dataclass(frozen=True, slots=True)
class EvalStatusOptions:
    """Options of `status`."""

    evaluation: str
    as_json: bool


@dataclass(frozen=True, slots=True)
class EvalLogsOptions:
    """Options of `logs`."""

    directory: Path
    attempt: str
    is_plain: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRetuneOptions:
    """Options of `retune`."""

    evaluation: str
    at_once: int | None
    budget: float | None
    token_budget: float | None
    retries: int | None
    until: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequeueOptions:
    """Options of `requeue`."""

    evaluation: str
    outcomes: tuple[str, ...]
    causes: tuple[str, ...]
    instances: tuple[str, ...]
    models: tuple[str, ...]


@click.command()
@evaluation_argument
@author_options
@with_options(EvaluationOptions)
def pause(options: EvaluationOptions) -> None:
    """Start no further attempt, and pause those in flight; the current model call or tool finishes."""

    async def act(client: Client, steering: EvaluationSteering, _: StoredSteering) -> int:
        await steering.set_desired(state="paused")
        return await _call_all(client, options.evaluation, client.pause, _is_working)

    number = _steer(options.evaluation, act, "eval.pause")
    note(f"The evaluation is paused, with {number} attempts in flight. `deckhands eval resume` continues it.")


@click.command()
@evaluation_argument
@author_options
@with_options(EvaluationOptions)
def resume(options: EvaluationOptions) -> None:
    """Continue an evaluation that was paused or cancelled. `requeue` repeats its cancelled attempts."""

    async def act(client: Client, steering: EvaluationSteering, wanted: StoredSteering) -> bool:
        await steering.set_desired(state="running")
        await _call_all(client, options.evaluation, client.resume, lambda row: row.state == AgentState.PAUSED)
        return await _is_driven(client, wanted)

    _note_driver("The evaluation continues.", _steer(options.evaluation, act, "eval.resume"))


@click.command()
@evaluation_argument
@at_once_option
@budget_option
@token_budget_option
@retries_option
@until_option
@author_options
@with_options(EvalRetuneOptions)
def retune(options: EvalRetuneOptions) -> None:
    """Change the settings of a running evaluation. `--until ""` removes a criterion."""
    desired = {
        "at_once": options.at_once,
        "budget_usd": options.budget,
        "token_budget": options.token_budget,
        "retries": options.retries,
        "until": options.until,
    }
    if all(value is None for value in desired.values()):
        raise UsageError("No change is given.", remedy="Name -n, --budget, --token-budget, --retries or --until.")

    async def act(client: Client, steering: EvaluationSteering, wanted: StoredSteering) -> bool:
        listed = await Catalog(client.store).find(find_evaluation(options.evaluation)[0])
        about = listed.about if listed is not None else None
        if options.until and about is not None and about.instances:
            criterion = StoppingCriterion.parse(options.until, len(about.models))
            if obstacle := criterion.render_obstacle(about.instances, about.attempts):
                note(obstacle)
        await steering.set_desired(**desired)
        return await _is_driven(client, wanted)

    _note_driver("The change applies from now on.", _steer(options.evaluation, act, "eval.retune"))


@click.command()
@evaluation_argument
@click.option(
    "--state", "outcomes", multiple=True, type=click.Choice([*OUTCOMES, RUNNING]),
    help="Attempts with this outcome; `running`: those in flight.",
)  # fmt: skip
@click.option(
    "--class", "causes", multiple=True, metavar="CODE", help="Attempts with this cause, or with a failure of this code."
)
@click.option("--id", "instances", multiple=True, metavar="INSTANCE", help="Attempts at these instances.")
@click.option("--model", "models", multiple=True, help="Attempts with these models, as the results name them.")
@author_options
@with_options(EvalRequeueOptions)
def requeue(options: EvalRequeueOptions) -> None:
    """Repeat attempts that have ended or are in flight; the new results replace the old ones.

    Each option narrows the selection; repeat one to name several values.
    """
    order = Requeue(
        outcomes=options.outcomes, causes=options.causes, instances=options.instances, models=options.models
    )
    if order == Requeue():
        raise UsageError("No attempts are selected.", remedy="Name --state, --class, --id or --model.")

    order_id = new_key()

    async def act(client: Client, steering: EvaluationSteering, wanted: StoredSteering) -> bool:
        await _require_match(client, options.evaluation, order, wanted)
        if wanted.desired.state == "cancelled":
            await steering.set_desired(state=RUNNING)
        await steering.requeue(order, order_id)
        for _ in range(LOOKS):  # a driver reads orders about once a second, and once more after its last report
            wanted = await steering.read()
            if order_id not in wanted.orders or not await _is_driven(client, wanted):
                break
            await asyncio.sleep(LOOK_SECONDS)
        return order_id not in wanted.orders or await _is_driven(client, wanted)

    _note_driver("These attempts are repeated.", _steer(options.evaluation, act, "eval.requeue"))


async def _require_match(client: Client, evaluation: str, order: Requeue, wanted: StoredSteering) -> None:
    """Refuse an order that matches no attempt.

    Raises:
        UsageError: names the pattern.
    """
    results = Path(evaluation) / RESULTS
    rows = await Catalog(client.store).rows(find_evaluation(evaluation)[0])
    rows += read_results(results) if results.is_file() else []
    status = parse_status(wanted.status) if await _is_driven(client, wanted) else None
    in_flight = status.attempts if status is not None else ()
    has_more = status is not None and status.in_flight > len(in_flight) and RUNNING in order.outcomes
    if has_more or any(map(order.matches, rows)):
        return
    if not any(order.matches_running((one.model, one.instance, one.attempt)) for one in in_flight):
        raise UsageError(
            f"No attempt matches {order.pattern}, so none is repeated.",
            remedy="`deckhands eval status` counts the outcomes, and `results.jsonl` has each attempt. Attempts in "
            f"flight need --state {RUNNING}.",
        )


@click.command()
@evaluation_argument
@yes_option
@author_options
@with_options(EvalCancelOptions)
def cancel(options: EvalCancelOptions) -> None:
    """End an evaluation: attempts in flight are stopped, and all attempts without a result end as not run."""
    if not options.is_sure:
        require_confirmation("The attempts of this evaluation that have not ended", "cancelled")

    async def act(client: Client, steering: EvaluationSteering, wanted: StoredSteering) -> bool:
        await steering.set_desired(state="cancelled")
        is_driven = await _is_driven(client, wanted)
        for _ in range(LOOKS if is_driven else 0):  # the driver stops its attempts itself, and writes their rows
            if (await steering.read()).status.get("state") == "cancelled":
                break
            await asyncio.sleep(LOOK_SECONDS)

        async def stop(conversation_id: str) -> None:
            await client.cancel(conversation_id)

        await _call_all(client, options.evaluation, stop, lambda row: row.state not in TERMINAL_STATES)
        return is_driven

    _note_driver("The evaluation is cancelled.", _steer(options.evaluation, act, "eval.cancel"))


@click.command()
@evaluation_argument
@json_option
@with_options(EvalStatusOptions)
def status(options: EvalStatusOptions) -> None:
    """Show the progress of an evaluation and its attempts in flight, as last reported by the command that drives it."""

    async def act(client: Client, _: EvaluationSteering, wanted: StoredSteering) -> tuple[StoredSteering, bool]:
        return wanted, await _is_driven(client, wanted)

    wanted, is_driven = _steer(options.evaluation, act, "")
    if options.as_json:
        desired = wanted.desired.model_dump(exclude_none=True)
        desired = {name: None if value == math.inf else value for name, value in desired.items()}
        print_json({"is_driven": is_driven, "desired": desired, "status": dict(wanted.status)})
        return
    status = parse_status(wanted.status)
    print_text(status.render_line if status is not None else "It has not started.")
    for one in status.attempts if status is not None else ():
        print_text(clean_line(one.render_line, limit=MAX_LINE_CHARS))
    if not is_driven and not (status is not None and status.state == "over"):
        note("No command drives it now; `deckhands eval attach DIR` does.")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("attempt", metavar="INSTANCE|ID")
@plain_option
@json_option
@with_options(EvalLogsOptions)
def logs(options: EvalLogsOptions) -> None:
    """Show the events of an attempt of the evaluation in DIR, or of its check, also from its private cluster.

    It may have ended or be in flight. Name it by its instance, if that has only one attempt, or by the id of a
    conversation.
    """
    asked = load_request(options.directory)

    async def read(client: Client) -> Sequence[Event]:
        status = parse_status((await EvaluationSteering(client.store, asked.name).read()).status)
        in_flight = status.attempts if status is not None else ()
        conversation_id = _find_conversation(options.directory, options.attempt, in_flight)
        return await client.events(conversation_id, is_whole=True)

    events = asyncio.run(run_in_store(CliSettings.from_env(), asked.home or asked.name, read))
    printer = printer_for(as_json=options.as_json, is_plain=options.is_plain, is_whole=False, has_status=False)
    for event in events:
        printer.event(event)


def _find_conversation(directory: Path, attempt: str, in_flight: Sequence[AttemptDetails]) -> str:
    ended = read_results(directory / RESULTS) if (directory / RESULTS).is_file() else []
    latest = {row.key: row.conversation_id for row in ended if row.instance == attempt}
    latest |= {
        (one.model, one.instance, one.attempt): one.conversation_id for one in in_flight if one.instance == attempt
    }
    found = [conversation_id for conversation_id in latest.values() if conversation_id]
    if len(found) > 1:
        raise UsageError(
            f"There are {len(found)} attempts at {attempt}.", remedy=f"Name one of {', '.join(found[:MAX_NAMED])}."
        )
    if not found and not is_conversation_id(attempt):
        raise UsageError(
            f"No attempt at {attempt!r} has started.",
            remedy="`deckhands eval status DIR` lists those in flight, and `results.jsonl` those that have ended.",
        )
    return found[0] if found else attempt


COMMANDS = (pause, resume, retune, requeue, cancel, status, logs)


def _steer(
    evaluation: str, act: Callable[[Client, EvaluationSteering, StoredSteering], Awaitable[T]], action: str
) -> T:
    """Call a function with an evaluation, and record the author and the reason of an action; empty if it only reads."""
    name, place = find_evaluation(evaluation)

    async def steered(client: Client) -> T:
        steering = EvaluationSteering(client.store, name)
        wanted = await steering.read()
        if wanted == StoredSteering() and name == evaluation:
            raise UsageError(f"This store has no evaluation {name}.", remedy="Name its directory, or its name.")
        return await act(client, steering, wanted)

    act_on = recording(steered, action, name) if action else steered
    return asyncio.run(run_in_store(CliSettings.from_env(), place, act_on))


async def _is_driven(client: Client, wanted: StoredSteering) -> bool:
    """Return whether a command drives the evaluation now."""
    at = wanted.status.get("at")
    now = client.store.clock.now().timestamp()
    has_driver = wanted.status.get("has_driver", wanted.status.get("state") != "over")
    return isinstance(at, int | float) and abs(now - at) < FRESH_SECONDS and has_driver is not False


def _note_driver(text: str, is_driven: bool) -> None:
    rest = "" if is_driven else " No command drives it now; `deckhands eval attach DIR` does."
    note(text + rest)


async def _call_all(
    client: Client, evaluation: str, ask: Callable[[str], Awaitable[None]], is_meant: Callable[[ConversationRow], bool]
) -> int:
    """Call a function for the conversations of attempts, and return how many were called."""
    number = 0
    selected = ConversationQuery(client.store, Selection(labels={LABEL: find_evaluation(evaluation)[0]}))

    async def ids() -> AsyncIterator[str]:
        async for page in selected.iterate_pages():
            for row in page:
                if is_meant(row) and not row.is_closed:
                    yield row.conversation_id

    async def one(conversation_id: str) -> None:
        nonlocal number
        with suppress(UsageError):  # it has ended meanwhile
            await ask(conversation_id)
            number += 1

    await for_each(ids(), one)
    return number


def _is_working(row: ConversationRow) -> bool:
    is_check = row.fields.get("agent") == CHECK_AGENT
    return row.state not in TERMINAL_STATES and row.state != AgentState.PAUSED and not is_check
