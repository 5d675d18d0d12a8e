"""Run the benchmarks and print their tables: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    agent_server,
    crowd,
    encrypting,
    fairness,
    far_store,
    gateway,
    governor,
    idling,
    ingress_backlog,
    machine,
    page,
    recording,
    restoring,
    stepping,
    tenants,
    top,
    tracing,
    tree,
)
from benchmarks.bench import Bench, Size
from benchmarks.figures import Result, table
from benchmarks.peer.sdk import Sdk, set_up
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store

BENCHMARKS: Mapping[str, Callable[[Bench], Awaitable[Result]]] = {
    "recording": recording.measure,
    "restoring": restoring.measure,
    "stepping": stepping.measure,
    "model": stepping.measure_with_model,
    "bash": stepping.measure_bash,
    "far_store": far_store.measure,
    "crowd": crowd.measure,
    "idling": idling.measure,
    "governor": governor.measure,
    "tree": tree.measure,
    "ingress_backlog": ingress_backlog.measure,
    "fairness": fairness.measure,
    "tenants": tenants.measure,
    "tracing": tracing.measure,
    "encrypting": encrypting.measure,
    "streams": gateway.measure_streams,
    "listing": gateway.measure_listing,
    "top": top.measure,
    "page": page.measure,
    "servers": agent_server.measure,
}
SCRIPTS: Mapping[str, Sequence[str]] = {
    "front_door": ("--smoke", "--no-peer"),
    "append": ("--rounds", "50"),
    "model_client": ("--rounds", "1", "--calls", "2"),
    "in_flight": ("--calls", "20", "--latency", "0.5"),
    "host_round_trip": ("--rounds", "10", "--hosts", "2"),
    "tool_round_trips": ("--rounds", "5", "--slow-rounds", "2"),
    "neighbours": ("--seconds", "0.5", "--quiet", "1", "--starts", "10"),
    "retiring": ("--conversations", "50"),
    "long_log": ("--events", "500"),
    "sdk_sessions": ("--sessions", "1", "--steps", "2"),
    "eval_in_flight": ("--count", "20", "--latency", "0.2", "--write-as", "eval_in_flight_smoke"),
    "rollout_in_flight": ("--count", "5", "--turns", "1", "--token-seconds", "0.005"),
    "rollout_kills": (
        *("--trajectories", "16", "--turns", "2", "--group-size", "4", "--slots", "8", "--reply-seconds", "0.3"),
        *("--controllers", "2", "--tools", "2", "--no-peer"),
    ),
    "engines": ("--count", "6", "--late", "1"),
    "eval_workspaces": ("--count", "2", "--latency", "0.1"),
    "eval_kills": (
        *("--count", "20", "--at-once", "10", "--latency", "0.3", "--controllers", "2", "--tools", "2", "--no-peer"),
    ),
    "eval_crowd": ("--count", "10", "--steps", "4", "--latency", "0.2", "--no-peer"),
}
"""Benchmarks that print their own tables and run by themselves too, and with what they only show that they work."""
WITH_PEER = frozenset({"recording", "restoring", "stepping", "model", "bash", "crowd", "idling", "servers"})
"""Benchmarks that measure OpenHands' SDK too. The others do not install it, which takes up to a quarter of an hour."""
QUIET_LOAD = 0.7
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Deckhands beside its peer.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join((*BENCHMARKS, *SCRIPTS))}; or all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_const", const=Size.FULL, dest="size", help="more rounds: half an hour")
    size.add_argument("--smoke", action="store_const", const=Size.SMOKE, dest="size", help="only see that it works")
    parser.add_argument("--no-peer", action="store_true", help="leave OpenHands' SDK out")
    parser.add_argument("--directory", type=Path, help="where to put the stores; a temporary directory if not given")
    arguments = parser.parse_args()
    names = arguments.names or [*BENCHMARKS, *SCRIPTS]
    if unknown := set(names) - {*BENCHMARKS, *SCRIPTS}:
        parser.error(f"there is no benchmark {min(unknown)!r}")
    asyncio.run(_run([name for name in names if name in BENCHMARKS], arguments))
    for name in names:
        if name in SCRIPTS:
            _run_script(name, SCRIPTS[name] if arguments.size is Size.SMOKE else ())
    print(f"\nload at the end: {machine.load():.2f}")


async def _run(names: Sequence[str], arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.directory) as folder:
        directory = Path(folder)
        print(machine.describe(await _store_version(directory / "version")))
        print(f"load at the start: {machine.load():.2f}" + _noise())
        async with _peer(directory, is_wanted=not (arguments.no_peer or WITH_PEER.isdisjoint(names))) as sdk:
            peer_name = f"OpenHands SDK {sdk.version}" if sdk else "OpenHands SDK"
            for name in names:
                began = time.monotonic()
                bench = Bench(directory / name, arguments.size or Size.SHORT, sdk)
                bench.directory.mkdir()
                result = await BENCHMARKS[name](bench)
                print(f"\n## {name} ({time.monotonic() - began:.0f} s)\n\n{table(result, peer_name=peer_name)}")
                sys.stdout.flush()


@contextlib.asynccontextmanager
async def _peer(directory: Path, *, is_wanted: bool) -> AsyncIterator[Sdk | None]:
    """Start the SDK, installing it first if need be; None when that is not possible."""
    problem = set_up() if is_wanted else ""
    if problem:
        print(f"OpenHands' SDK: not installed ({problem})")
    if problem or not is_wanted:
        yield None
        return
    sdk = await Sdk.start(directory / "peer.log")
    try:
        yield sdk
    finally:
        await sdk.stop()


def _run_script(name: str, arguments: Sequence[str]) -> None:
    print(f"\n## {name}\n", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True, cwd=HERE.parent)


def _noise() -> str:
    if machine.load() <= QUIET_LOAD:
        return ""
    return " (the machine is not idle: times will be longer than they would be, CPU a little)"


async def _store_version(directory: Path) -> str:
    store = EmbeddedValkey(directory)
    await store.start()
    try:
        opened = await open_store(store.url)
        text = (await opened.connection.call("INFO", "server")).decode()
        await opened.aclose()
    finally:
        await store.stop()
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {facts['redis_version']}"


if __name__ == "__main__":
    main()
