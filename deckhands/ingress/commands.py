"""The short tasks of the ingress: commands on a conversation, each performed once per task id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.contract import AgentState, ChangeAgentStateAction, Event, EventSource, MessageAction, MessagePolicy
from broker.log import STARTS_WORK, Condition, make_message_condition
from broker.runtime import UsageError, check_conversation_id
from deckhands.client import (
    TaskSpec,
    append_as_producer,
    build_answer,
    check_task,
    derive_task_conversation_id,
    find_pending_confirmation,
    render_state,
    to_conversation_id,
)
from deckhands.ingress.context import IngressContext
from deckhands.ingress.earlier_results import follow
from deckhands.ingress.failures import TaskExpired
from deckhands.ingress.runs import refuse_key, timing_of, with_time_limits

MAX_TEXT_CHARS = 100_000


class _CommandArguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(max_length=64)
    text: str = Field(default="", max_length=MAX_TEXT_CHARS)
    double_texting: MessagePolicy | None = None
    model: str | None = Field(default=None, max_length=300)
    action_id: int | None = None
    at: int | None = Field(default=None, ge=1)
    title: str = Field(default="", max_length=200)


TAKES: dict[str, tuple[str, ...]] = {
    "message": ("id", "text", "double_texting"),
    "pause": ("id",),
    "resume": ("id",),
    "cancel": ("id",),
    "confirm": ("id", "action_id"),
    "reject": ("id", "action_id"),
    "fork": ("id", "at", "model", "title"),
}
"""The arguments of each command, in order."""
STATES = {"pause": AgentState.PAUSED, "resume": AgentState.RUNNING, "cancel": AgentState.STOPPED}
ANSWERS = {"confirm": AgentState.USER_CONFIRMED, "reject": AgentState.USER_REJECTED}


class ConversationCommands:
    """Performs commands on conversations."""

    def __init__(self, context: IngressContext) -> None:
        self._context = context

    async def submit(
        self,
        task_id: str,
        previous: Sequence[Any],
        options: Mapping[str, Any],
        *,
        eta: datetime | None = None,
        expires: datetime | None = None,
        time_limits: Sequence[Any] | None = None,
        refused: UsageError | None = None,
    ) -> str:
        """Create a conversation that starts now or later, and return its id. Idempotent under the task id.

        Args:
            eta: the eta of the message; `expires` and `time_limits` are also from the message.
            refused: why the properties of the message are invalid; None if they are valid.

        Raises:
            UsageError: the request is invalid.
            TaskExpired: the task has expired, and no earlier delivery has created the conversation.
        """
        conversation_id = derive_task_conversation_id(task_id)
        if self._context.has_expired(expires) and not await self._context.meta(conversation_id):
            raise TaskExpired
        if refused is not None:
            raise refused
        following = follow(previous, options)
        refuse_key(following.fields)
        request, _ = with_time_limits(TaskSpec.parse(following.fields), time_limits)
        spec = request.with_timing(timing_of(request, eta, expires, self._context.store.clock.now()))
        await self._context.start_conversation(spec, conversation_id, task_id, archive=following.archive)
        return conversation_id

    async def run(
        self,
        what: str,
        task_id: str,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        *,
        eta: Any = None,
        expires: datetime | None = None,
        refused: UsageError | None = None,
    ) -> dict[str, Any]:
        """Perform a command, and return the conversation's id and state. Idempotent under the task id.

        Args:
            what: a name of `TAKES`.
            eta: the eta of the message. Even a past eta is refused, because otherwise the time in the queue would
                decide.
            expires: of the message.
            refused: see `submit`.

        Raises:
            UsageError: an argument is invalid, or the conversation does not accept the command now.
            ConversationBusy: the agent works, and the conversation accepts no message meanwhile.
            TaskExpired: the task has expired, and no earlier delivery has performed it.
        """
        if refused is not None and not self._context.has_expired(expires):
            raise refused
        if eta:
            moment = ascii(str(eta))[1:-1][:100]
            raise UsageError(
                f"deckhands.{what} cannot be used with an eta ({moment}): it runs immediately. Leave the eta out.",
                remedy="Send it without countdown and eta when its time has come.",
            )
        order = _parse_command(what, arguments, options)
        conversation_id = check_conversation_id(order.id)
        key = f"celery:{task_id}"
        if self._context.has_expired(expires):
            is_forked = what == "fork" and await self._context.meta(to_conversation_id(None, key))
            if not is_forked and not await self._is_done(conversation_id, key):
                raise TaskExpired
        if what == "fork":
            fork = await self._context.client.fork(
                conversation_id, at=order.at, model=order.model, title=order.title, idempotency_key=key
            )
            return {"conversation_id": fork, "state": (await self._context.client.row(fork)).state}
        if not await self._is_done(conversation_id, key):
            if what in ANSWERS and order.action_id is None:
                order = order.model_copy(update={"action_id": await self._bind_action(conversation_id, key)})
            try:
                event = await self._event(what, order)
            except UsageError:
                if not await self._is_done(conversation_id, key):
                    raise
                # Another worker has the same task, and its answer is the reason that no question is open any more.
            else:
                if event is None:
                    await self._note_done(conversation_id, key)
                else:
                    await append_as_producer(
                        self._context.log, conversation_id, [event], key=key, condition=_condition(what, order)
                    )
        return {"conversation_id": conversation_id, "state": (await self._context.client.row(conversation_id)).state}

    async def _event(self, what: str, order: _CommandArguments) -> Event | None:
        if what == "message":
            check_task(order.text, name="message")
            return MessageAction(content=order.text, source=EventSource.USER, double_texting=order.double_texting)
        if what in ANSWERS:
            return await build_answer(self._context.store, order.id, ANSWERS[what], order.action_id, {})
        ended_in = await self._context.client.find_end_state(order.id) if what in ("cancel", "pause") else None
        if ended_in is not None and what == "cancel":
            return None
        if ended_in is not None:
            raise UsageError(
                f"The conversation {order.id} {render_state(ended_in)}; it cannot be paused.",
                remedy="Send it a message to continue it.",
            )
        return ChangeAgentStateAction(agent_state=STATES[what], source=EventSource.USER)

    async def _bind_action(self, conversation_id: str, key: str) -> int:
        """Return the action that was open when a task without an action id first arrived; 0 if none was.

        A redelivery must not answer a later question.
        """
        store = self._context.store
        once = (await store.locate(conversation_id)).once
        field = f"b:{key}"
        _, asked_id = await find_pending_confirmation(store, conversation_id)
        await store.call("HSETNX", once, field, asked_id or 0)
        return int(await store.call("HGET", once, field))

    async def _is_done(self, conversation_id: str, key: str) -> bool:
        once = (await self._context.store.locate(conversation_id)).once
        return bool(await self._context.store.call("HEXISTS", once, f"p:{key}"))

    async def _note_done(self, conversation_id: str, key: str) -> None:
        """Record that a task had nothing to do, so that a redelivery does nothing either."""
        once = (await self._context.store.locate(conversation_id)).once
        last_id = await self._context.log.load_last_id(conversation_id)
        command = ("HSETNX", once, f"p:{key}", f"{last_id}:{last_id}")
        await self._context.store.call(*command)


def _condition(what: str, order: _CommandArguments) -> Condition:
    if what == "message":
        return make_message_condition(order.double_texting)
    return STARTS_WORK if what == "resume" else ""


def _parse_command(what: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> _CommandArguments:
    takes = TAKES[what]
    given = dict(zip(takes, arguments, strict=False))
    wrong = [*map(str, arguments[len(takes) :]), *(name for name in options if name not in takes or name in given)]
    if wrong:
        raise UsageError(
            f"deckhands.{what} cannot be used with {ascii(wrong[0])[:100]}.", remedy=f"It takes {', '.join(takes)}."
        )
    try:
        return _CommandArguments.model_validate({**given, **options})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UsageError(
            f"deckhands.{what} cannot be used: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            remedy=f"It takes {', '.join(takes)}.",
        ) from None
