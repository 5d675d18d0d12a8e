"""Checks of this machine's support for workspaces, by a separate `tool_worker` process; and of the settings.

It also reads a store without changing it, by connections that load no functions and checks that tolerate a missing
right.

Holds: only commands that read. A missing right of the store user becomes a finding and hides no other finding.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions

from broker.coordination import list_quarantined
from broker.health import HEALTHY, STORE_ROLE, check
from broker.runtime import (
    SYSTEM_CLOCK,
    TOOLS,
    BrokerSettings,
    DeckhandsError,
    SharedClock,
    StoreError,
    StoreMisconfigured,
    UsageError,
    make_worker_environment,
)
from broker.store import (
    APPEND_ONLY_REMEDY,
    NO_REPLICA_REMEDY,
    STORE,
    TOOLS_FAILED,
    Connection,
    MasterKeys,
    ShardKeys,
    ShardLayout,
    Store,
    connect,
    decode_text,
    describe_missing_replica,
    describe_volatility,
    find_vulnerability,
    load_server_facts,
    open_store,
    parse_numbers,
    read_tolerantly,
    to_pairs,
)
from broker.tools import ToolFailures
from deckhands.client import ArchiveStorage, ArchiveUnavailable, Retention

DEAD_LETTERS = "dead letters"
FAILING = "workers report"
RETENTION, ARCHIVE = "retention", "archive"
LIMIT_SECONDS = 60.0
PENDING_SECONDS = 120.0
"""The default of `DECKHANDS_KUBERNETES_PENDING_SECONDS`, which only tool workers read."""
POD_EXTRA_SECONDS = 120.0
"""For the self-test in a pod, besides the time in which a pod may start: requests, and the program's own limit."""
PACKAGES = ("broker", "controller_worker", "tool_worker", "deckhands")
"""What the distribution installs at the top level."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, whether it passed, whether it must pass, a line of detail, and a remedy."""

    name: str
    is_good: bool
    is_needed: bool
    detail: str
    remedy: str = ""


def find_limit(environment: Mapping[str, str]) -> float:
    """Return how long the examination of this machine may take. It waits for the start of a pod."""
    if environment.get("DECKHANDS_SANDBOX") != "kubernetes":
        return LIMIT_SECONDS
    try:
        pending = float(environment.get("DECKHANDS_KUBERNETES_PENDING_SECONDS") or PENDING_SECONDS)
    except ValueError:  # the examination itself names it
        return LIMIT_SECONDS
    return LIMIT_SECONDS + POD_EXTRA_SECONDS + pending if math.isfinite(pending) else LIMIT_SECONDS


def examine_machine(environment: Mapping[str, str]) -> list[Finding]:
    """Examine this machine as a tool worker with this environment would. Blocks for about a second."""
    command = [sys.executable, "-P", "-m", "tool_worker.worker.examination"]
    try:
        ended = subprocess.run(  # noqa: S603  (our own interpreter and our own program)
            command,
            capture_output=True,
            check=True,
            timeout=find_limit(environment),
            env=make_worker_environment(TOOLS, environment),
        )
        return [Finding(**found) for found in json.loads(ended.stdout)]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return [Finding("tool worker", is_good=False, is_needed=True, detail=f"cannot be examined: {error}")]


def examine_packages() -> list[Finding]:
    """Look for another installed distribution with a package of the same name, which may have replaced our files."""
    owners = packages_distributions()
    shared = {name: sorted({*owners.get(name, ())} - {"deckhands"}) for name in PACKAGES}
    others = [f"{name} is also installed by {', '.join(found)}" for name, found in shared.items() if found]
    if not others:
        return []
    remedy = "Install Deckhands into an environment without it, and again where it was installed beside it."
    return [Finding("packages", is_good=False, is_needed=True, detail="; ".join(others), remedy=remedy)]


async def examine_store(url: str) -> list[Finding]:
    """Check whether a store serves, and report its dead letters of conversations and of entries.

    Writes nothing, and does not set up a store that was never used.
    """
    verdict = await check(STORE_ROLE, url)
    found = [Finding("store", is_good=verdict.exit_status == HEALTHY, is_needed=True, detail=verdict.reason)]
    if verdict.exit_status == HEALTHY:
        connection = connect(url)
        try:
            facts = await load_server_facts(connection)
            found += [*_check_durability(facts), *_check_persistence(facts), *_check_replica(facts)]
            found += await _count_dead_letters(connection)
            found += await _find_failing_tools(connection, url)
        except (StoreError, ValueError) as error:
            found.append(Finding(DEAD_LETTERS, is_good=False, is_needed=True, detail=f"cannot be read: {error}"))
        finally:
            await connection.aclose()
    return found


def _check_durability(facts: Mapping[str, str]) -> list[Finding]:
    weakness = None if BrokerSettings.from_env().store_patched else find_vulnerability(facts)
    if weakness is None:
        return []
    detail = f"{weakness.text} {weakness.remedy}"
    return [Finding("store version", is_good=False, is_needed=weakness.is_certain, detail=detail)]


def _check_persistence(facts: Mapping[str, str]) -> list[Finding]:
    lost = describe_volatility(facts)
    return (
        [Finding("append-only file", is_good=False, is_needed=True, detail=f"{lost} {APPEND_ONLY_REMEDY}")]
        if lost
        else []
    )


def _check_replica(facts: Mapping[str, str]) -> list[Finding]:
    alone = describe_missing_replica(facts) if BrokerSettings.from_env().acks == "replica" else ""
    return [Finding("replica", is_good=False, is_needed=True, detail=f"{alone} {NO_REPLICA_REMEDY}")] if alone else []


async def _count_dead_letters(connection: Connection) -> list[Finding]:
    number = await connection.call("HGET", STORE, "shards")
    if number is None:
        return []
    shards = [ShardKeys(shard) for shard in range(parse_numbers(decode_text(number))[-1])]
    dead = sum(await connection.call_many([("ZCARD", names.dead) for names in shards]))
    aside = await list_quarantined(connection, shards)
    said = [f"conversations that crashed three workers: {dead}"] if dead else []
    if aside:
        last = aside[-1]
        what = f"entry {last.entry_id} of {last.key}" if last.entry_id else last.key
        said.append(f"entries and keys that cannot be read: {len(aside)}, the last {what!a}: {last.why!a}")
    if said:
        said.append("see `deckhands dead ls`")
    return [Finding(DEAD_LETTERS, is_good=not said, is_needed=False, detail="; ".join(said) or "none")]


async def _find_failing_tools(connection: Connection, url: str) -> list[Finding]:
    """Return the tools that running tool workers report as failing, from a store that is in use."""
    if not await connection.call("EXISTS", TOOLS_FAILED):
        return []
    store = await open_store(url, deploys=False)
    try:
        reported = await ToolFailures(store).load_all()
    finally:
        await store.aclose()
    details = [f"{one} {one.failure.remedy}".strip() for one in reported]
    return [Finding(FAILING, is_good=False, is_needed=False, detail=detail) for detail in details]


def examine_retention(environment: Mapping[str, str]) -> list[Finding]:
    """Check the retention rules and the archive of this environment. Returns nothing if neither is set.

    Blocks, for as long as the archive's place takes.
    """
    settings = BrokerSettings.from_env(environment)
    found = []
    if settings.retention:
        try:
            warning = Retention.of_setting(settings.retention).warning(settings.archive)
            found.append(Finding(RETENTION, is_good=not warning, is_needed=False, detail=warning or "archives"))
        except UsageError as error:
            found.append(Finding(RETENTION, is_good=False, is_needed=True, detail=str(error)))
    if settings.archive:
        try:
            ArchiveStorage(settings.archive).size("no-conversation")
            found.append(Finding(ARCHIVE, is_good=True, is_needed=True, detail=settings.archive))
        except ArchiveUnavailable as error:
            found.append(Finding(ARCHIVE, is_good=False, is_needed=True, detail=str(error)))
    return found


def find_sandbox_fault(environment: Mapping[str, str]) -> str | None:
    """Return why no requested sandbox works here; None if one does, or if `none` is requested. Blocks."""
    demanded = BrokerSettings.from_env(environment).sandbox
    if demanded == "none":
        return None
    names = ("sandbox bwrap", "sandbox docker") if demanded == "auto" else (f"sandbox {demanded}",)
    tried = [finding for finding in examine_machine(environment) if finding.name in (*names, "tool worker")]
    if any(finding.is_good for finding in tried):
        return None
    return "; ".join(finding.detail for finding in tried)


PATIENCE_SECONDS = 5.0
REMEDY = "Name a store user with more rights in DECKHANDS_URL, such as that of a worker or the admin."
OVERWRITTEN = "If a key has another type, it was overwritten: docs/deployment.md, What cannot be read."


async def find_store(connection: Connection) -> Store | None:
    """Return the store behind a connection, unchanged; None if it was never used or was overwritten."""
    about = to_pairs((await read_tolerantly(connection, [("HGETALL", STORE)]))[0])
    generation = decode_text(about.get("generation"))
    try:
        layout = ShardLayout(*parse_numbers(decode_text(about.get("shards"))))
    except ValueError:
        return None
    return Store(
        connection=connection,
        layout=layout,
        generation=generation,
        clock=SharedClock(SYSTEM_CLOCK),
        patience_seconds=PATIENCE_SECONDS,
        warnings=(),
        masters=MasterKeys.load(BrokerSettings.from_env()),
    )


async def run_check(name: str, check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    """Return the findings of a check, or a finding that it lacks a right."""
    try:
        return await check()
    except StoreMisconfigured as error:
        if "NOPERM" not in error.message:
            raise
        return [Finding(name, False, False, "this store user may not read it", REMEDY)]
    except DeckhandsError as error:
        return [Finding(name, False, True, f"cannot be examined: {error.message}", error.remedy or OVERWRITTEN)]


def passed_finding(name: str, detail: str) -> Finding:
    """Return a finding of a passed check."""
    return Finding(name, is_good=True, is_needed=False, detail=detail)


def warning_finding(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that needs attention although the cluster works."""
    return Finding(name, is_good=False, is_needed=False, detail=detail, remedy=remedy)


def failed_finding(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that stops the cluster or breaks one of its promises."""
    return Finding(name, is_good=False, is_needed=True, detail=detail, remedy=remedy)
