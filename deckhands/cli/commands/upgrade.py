"""`deckhands upgrade`: replace a store's functions by newer or older ones, or show what would happen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import click

from broker.contract import SCHEMA_VERSION
from broker.limits import Ledger
from broker.log import WaitReason
from broker.runtime import DeckhandsError, format_count, read_version
from broker.store import Store, UpgradePlan, deploy, open_store, plan_upgrade
from deckhands.cli.command_group import with_options
from deckhands.cli.options import json_option
from deckhands.client import note, print_json, print_text, store_url
from deckhands.settings import CliSettings

SECTION = "Operate a cluster"
SUMMARIES = {"upgrade": "Load this version's functions, or go back to them; --check shows what would happen."}
STOP_SECONDS = 60.0
EFFECTS = {
    "none": "nothing: the store has the functions of this version",
    "load": "the functions of this version are loaded: the store has none",
    "upgrade": "the functions are replaced by those of this version",
    "roll_back": "the newer functions are replaced by those of this version, and newer workers wait",
    "use_newer": "nothing: the store has newer functions, and they serve this version; --roll-back replaces them",
    "refuse": "nothing: the store has other functions, and they do not serve this version; see --roll-back",
}


@dataclass(frozen=True, slots=True)
class UpgradeOptions:
    """Options of `upgrade`."""

    check: bool
    roll_back: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    """The effect that an upgrade would have.

    Attributes:
        waiting: conversations that wait for a worker of a newer version.
        pinned: conversations that wait for a worker of the version that they are pinned to.
        is_locked: the store encrypts conversations, and this process has no master key.
    """

    plan: UpgradePlan
    waiting: int
    pinned: int
    is_locked: bool

    @property
    def is_possible(self) -> bool:
        """Whether it would succeed without stopping any worker."""
        return self.plan.effect != "refuse" and not self.plan.stopping and not self.is_locked


@click.command()
@click.option(
    "--check", is_flag=True, help="Print the steps and change nothing. Exit code 1 if the upgrade cannot run now."
)
@click.option("--roll-back", is_flag=True, help="Replace newer functions by those of this version.")
@json_option
@with_options(UpgradeOptions)
def upgrade(options: UpgradeOptions) -> int:
    """Load the functions of this version into the store; workers that these do not serve hand back and stop.

    The store user must have the right to load functions. It waits a minute for the workers.
    """
    settings = CliSettings.from_env()
    found = asyncio.run(_run(store_url(settings), settings, options))
    if options.as_json:
        print_json(_as_json(found))
    else:
        print_text("\n".join(_render(found)))
        if not options.check:
            note(_describe_result(found.plan))
    return int(options.check and not found.is_possible)


def _describe_result(plan: UpgradePlan) -> str:
    if plan.effect == "use_newer":
        return f"The store keeps its newer functions of version {plan.there}, which serve this build."
    return f"The store has the functions of version {plan.own}."


async def _run(url: str, settings: CliSettings, options: UpgradeOptions) -> Forecast:
    store = await open_store(url, shards=settings.shards, deploys=False)
    try:
        found = await forecast(store, rolls_back=options.roll_back)
        if not options.check:
            if found.plan.effect == "refuse":
                raise DeckhandsError(
                    f"The functions in the store have version {found.plan.there}, and those of this build "
                    f"{found.plan.own} do not replace them.",
                    remedy="Use the version that loaded them, or `deckhands upgrade --roll-back` of an older one.",
                )
            await deploy(store.connection, stop_seconds=STOP_SECONDS, is_setup=True, rolls_back=options.roll_back)
            await Ledger(store).move_limits()
        return found
    finally:
        await store.aclose()


async def forecast(store: Store, *, rolls_back: bool = False) -> Forecast:
    """Return the effect that an upgrade to this version would have. Only reads."""
    plan = await plan_upgrade(store.connection, rolls_back=rolls_back)
    commands = [("ZRANGE", names.parked, 0, -1) for names in await store.load_shards()]
    ids = [cid.decode(errors="backslashreplace") for reply in await store.call_many(commands) for cid in reply]
    reasons = await store.call_many([("HGET", names.meta, "wait_reason") for names in await store.locate_all(ids)])
    newer, pinned = (reasons.count(one.value.encode()) for one in (WaitReason.NEWER_WORKER, WaitReason.PINNED_VERSION))
    return Forecast(plan, newer, pinned, store.is_encrypted and not store.encryption.is_on)


def _render(found: Forecast) -> list[str]:
    plan = found.plan
    lines = [
        f"this build    Deckhands {read_version()}, functions {plan.own}, events up to schema {SCHEMA_VERSION}",
        f"the store     functions {plan.there if plan.effect != 'load' else 'none'}"
        + (", held after a rollback" if plan.is_held else ""),
        f"effect        {EFFECTS[plan.effect]}",
    ]
    lines += [f"has to stop   {worker}" for worker in plan.stopping]
    if plan.effect in ("upgrade", "roll_back") and not plan.stopping:
        lines.append("has to stop   no worker")
    if found.waiting:
        count = format_count(found.waiting, "conversation")
        lines.append(f"waiting       {count} for a worker of a newer version")
    if found.pinned:
        count = format_count(found.pinned, "conversation")
        lines.append(f"waiting       {count} for a worker of the version that they are pinned to")
    if found.is_locked:
        lines.append("encryption    workers would not start: the store encrypts, and this process has no master key")
    return lines


def _as_json(found: Forecast) -> dict[str, object]:
    plan = found.plan
    return {
        "effect": plan.effect,
        "functions": {"store": plan.there.stamp, "build": plan.own.stamp},
        "has_to_stop": list(plan.stopping),
        "is_held": plan.is_held,
        "waiting_for_newer": found.waiting,
        "waiting_for_pinned": found.pinned,
        "is_locked": found.is_locked,
        "is_possible": found.is_possible,
    }
