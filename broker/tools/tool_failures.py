"""Tools that tool workers cannot offer.

The reasons are published, so that a user who requests such a tool sees them.

Holds: a reason is one line of bounded length without control characters, sanitised on writing and again on reading.
Reports of workers that have ended are neither shown nor kept.
Does not: mask secrets; the tool worker does, because it knows them.
Keys: `deck:tools:failed`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from broker.coordination import list_members
from broker.runtime import StoreRefused
from broker.store import Store, keys

SANDBOX = "sandbox"
MAX_FAILURES = 32
MAX_REPORT_BYTES = 64 * 2**10
MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 600

_log = logging.getLogger(__name__)


def to_one_line(text: str, limit: int) -> str:
    """Return a text as one line of at most `limit` characters, without control and invisible characters."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _clean_name(text: str) -> str:
    return to_one_line(text, MAX_NAME_CHARS)


def _clean_reason(text: str) -> str:
    return to_one_line(text, MAX_REASON_CHARS)


class ToolFailure(BaseModel):
    """A source of tools that cannot be loaded, or a sandbox that does not work.

    Attributes:
        source: a name of `DECKHANDS_TOOLS`, an entry point, an MCP server, or `SANDBOX`.
        server: the MCP server, whose tools would be offered under `<server>/`; empty for other sources.
        reason: the cause.
        remedy: the action to take.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: Annotated[str, AfterValidator(_clean_name)]
    server: Annotated[str, AfterValidator(_clean_name)] = ""
    reason: Annotated[str, AfterValidator(_clean_reason)]
    remedy: Annotated[str, AfterValidator(_clean_reason)] = ""

    def may_explain(self, pattern: str) -> bool:
        """Return whether this failure may be the reason that a requested tool is missing."""
        server, slash, _ = pattern.partition("/")
        if self.server:
            return fnmatchcase(self.server, server) and (bool(slash) or "*" in server)
        return not slash and self.source != SANDBOX


@dataclass(frozen=True, slots=True)
class ReportedFailure:
    """A failure and its location."""

    worker_id: str
    node: str
    failure: ToolFailure

    def __str__(self) -> str:
        where = f"the tool worker {_clean_name(self.worker_id)}" + (
            f" (node {_clean_name(self.node)})" if self.node else ""
        )
        source = self.failure.source
        reason = self.failure.reason.rstrip(".")
        what = f"{where} has no working sandbox" if source == SANDBOX else f"{where} cannot load tools from {source}"
        return f"{what[0].upper()}{what[1:]}: {reason}."


class ToolFailures:
    """The failures reported by the tool workers of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def report(self, worker_id: str, failures: Iterable[ToolFailure]) -> None:
        """Replace a worker's previous report; no failures remove it. Idempotent."""
        found = [failure.model_dump() for failure in failures][:MAX_FAILURES]
        try:
            if found:
                await self._store.call("HSET", keys.TOOLS_FAILED, worker_id, json.dumps(found))
            ended = await self._find_other_ended(worker_id)
            gone: list[bytes | str] = [*ended, *([] if found else [worker_id])]
            if gone:
                await self._store.call("HDEL", keys.TOOLS_FAILED, *gone)
        except StoreRefused as error:  # a key of another type: the worker continues without the report
            _log.error("cannot publish the failures of tools under %s: %s", keys.TOOLS_FAILED, error)

    async def load_all(self) -> list[ReportedFailure]:
        """Return the reports of all running workers, by worker. Invalid reports are left out."""
        try:
            flat = await self._store.call("HGETALL", keys.TOOLS_FAILED)
        except StoreRefused:
            return []
        if not flat:
            return []
        texts = dict(zip(flat[::2], flat[1::2], strict=True))
        found = []
        for member in sorted(await list_members(self._store), key=lambda member: member.worker_id):
            text = texts.get(member.worker_id.encode(errors="replace"), b"")
            if member.role == "tool" and member.left_seconds > 0 and len(text) <= MAX_REPORT_BYTES:
                node = member.about.get("node", "")
                found += [ReportedFailure(member.worker_id, node, failure) for failure in _parse_failures(text)]
        return found

    async def _find_other_ended(self, worker_id: str) -> list[bytes]:
        """Return other workers with a report that are no longer running, even if it is empty."""
        reported = (await self._store.call("HGETALL", keys.TOOLS_FAILED))[::2]
        if set(reported) <= {worker_id.encode()}:
            return []
        running = {member.worker_id.encode(errors="replace") for member in await list_members(self._store)}
        return [name for name in reported if name not in running and name != worker_id.encode()]


def _parse_failures(text: bytes) -> list[ToolFailure]:
    try:
        listed = json.loads(text)
        return [ToolFailure.model_validate(one) for one in listed[:MAX_FAILURES]]
    except (ValueError, TypeError, KeyError, ValidationError, RecursionError):
        return []
