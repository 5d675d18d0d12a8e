"""Remote control: restricts the commands that a worker accepts through Celery's broker.

Holds: any client that can write to the broker may inspect workers and drain them. Only if the broker has a password may
it also stop workers and switch task events on. An ingress worker also accepts `revoke`, because the same clients may
send its tasks. All other commands of Celery's remote control are refused with an answer: they import modules by name,
change the queues of a worker, or store anything they are sent. A malformed command is dropped with a line in the log.
Answers go to reply queues only, and contain no password of a URL, although Celery would show that of a socket's URL.
"""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import Any, Literal
from urllib.parse import urlsplit

from celery.app.control import Control
from kombu import pidbox
from pydantic import BaseModel, Field, StrictStr, ValidationError

from broker.celery.messages import MessageRefused, log_dropped
from broker.runtime import hide_password

_log = logging.getLogger(__name__)

READ_ONLY_COMMANDS = frozenset(
    {"ping", "stats", "active", "active_queues", "conf", "registered", "reserved", "revoked", "scheduled", "query_task"}
)
"""Celery's read-only commands. Flower shows their answers."""
OWN_COMMANDS = frozenset({"conversations", "drain"})
PASSWORD_COMMANDS = frozenset({"shutdown", "enable_events", "disable_events", "heartbeat"})
INGRESS_COMMANDS = frozenset({"revoke"})
INGRESS_APP = "deckhands.ingress"
MAX_ARGUMENTS = 8


class _ReplyTo(BaseModel):
    exchange: StrictStr
    routing_key: StrictStr = Field(max_length=256)


class _Command(BaseModel):
    method: StrictStr = Field(max_length=64)
    arguments: dict[str, Any] | None = Field(default=None, max_length=MAX_ARGUMENTS)
    destination: list[StrictStr] | None = None
    pattern: StrictStr | None = Field(default=None, max_length=256)
    matcher: Literal["glob"] | None = None
    reply_to: _ReplyTo | None = None
    ticket: StrictStr | None = Field(default=None, max_length=256)


class Node(pidbox.Node):  # type: ignore[misc]
    """A worker's side of remote control."""

    def handle_message(self, body: Any, message: Any = None) -> Any:  # noqa: ARG002  (kombu's)
        """Run a command that is addressed to this worker."""
        try:
            command = _Command.model_validate(body)
            self._check_reply_to(command)
        except (ValidationError, MessageRefused) as error:
            log_dropped("a command of Celery's remote control", error)
            return None
        if not self._is_addressed(command):
            return None
        is_taken = command.method in self.allowed and command.method in self.handlers
        return self.dispatch(**command.model_dump()) if is_taken else self._refuse(command)

    def reply(self, data: Any, exchange: str, routing_key: str, ticket: str | None, **options: Any) -> None:
        """Answer a command."""
        super().reply(_mask_passwords(data), exchange, routing_key, ticket, **options)

    @property
    def allowed(self) -> frozenset[str]:
        """The commands that a worker with this broker accepts, if it has them. `drain` is for controller workers."""
        has_password = urlsplit(str(self.state.app.conf.broker_url)).password
        own = OWN_COMMANDS | (INGRESS_COMMANDS if self.state.app.main == INGRESS_APP else frozenset())
        return READ_ONLY_COMMANDS | own | (PASSWORD_COMMANDS if has_password else frozenset())

    def _refuse(self, command: _Command) -> None:
        """Answer why a command is refused."""
        is_closed = command.method in PASSWORD_COMMANDS
        why = "the broker has no password" if is_closed else f"{self._kind} do not accept this command"
        refusal = f"The command {command.method!r} is refused: {why}."
        _log.warning(refusal)
        if command.reply_to is not None:
            self.reply({self.hostname: {"error": refusal}}, ticket=command.ticket, **command.reply_to.model_dump())

    @property
    def _kind(self) -> str:
        """The kind of worker for refusals, such as `tool workers`."""
        return f"{self.hostname.partition('-')[0]} workers"

    def _check_reply_to(self, command: _Command) -> None:
        if command.reply_to is not None and command.reply_to.exchange != self.mailbox.reply_exchange.name:
            raise MessageRefused(f"its reply queue is invalid: {command.reply_to.exchange!r}")

    def _is_addressed(self, command: _Command) -> bool:
        if command.destination:
            return self.hostname in command.destination
        return not command.pattern or fnmatchcase(self.hostname, command.pattern)


def _mask_passwords(data: Any) -> Any:
    """Remove the passwords of URLs from an answer."""
    if isinstance(data, str):
        return hide_password(data)
    if isinstance(data, dict):
        return {name: _mask_passwords(value) for name, value in data.items()}
    return [_mask_passwords(value) for value in data] if isinstance(data, list | tuple) else data


class ControlMailbox(pidbox.Mailbox):  # type: ignore[misc]
    """The mailbox of commands."""

    node_cls = Node


class RemoteControl(Control):  # type: ignore[misc]
    """The remote control of our applications."""

    Mailbox = ControlMailbox
