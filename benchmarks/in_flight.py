"""What a thousand model calls in flight cost one process: memory, CPU, and how many calls a second it makes.

    python benchmarks/in_flight.py [--calls 1000] [--messages 41] [--latency 5] [--spread 0]

Each backend runs in a separate process, against the local model server. All calls begin at once, each with its own
history, as conversations have; memory is what the process holds more than with the client idle (after one call), at
the most, while all calls wait for their replies. With `--spread 20 --latency 40` they begin over twenty seconds, as
the calls of a crowd do, and most have waited for long. Then the same calls are made against a server that answers at
once, 200 in flight: calls a second of one process, which shares the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.model_client import BUSY_SECONDS, TOOLS, history
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import LLM, ModelRequest
from tests.model_server.running_server import RunningModelServer

BACKENDS = ("openai", "anthropic", "litellm")
AT_ONCE = 200
LOOK_SECONDS = 0.05
MEGABYTE = 1024 * 1024


def client(backend: str, url: str) -> LLM:
    """Return a model of a backend at the local server."""
    address = {"model": "claude-sonnet-5", "base_url": url}
    if backend != "anthropic":
        address = {"model": "my-own", "base_url": f"{url}/v1", "custom_llm_provider": "openai"}
    return create_llm(
        LLMConfig.create(
            **address,
            backend=backend,
            api_key="no-key",
            connect_timeout=BUSY_SECONDS,
            read_timeout=BUSY_SECONDS,
            native_tool_calling=True,
        ),
        SystemClock(),
    )


def requests(messages: int, calls: int) -> Sequence[ModelRequest]:
    """Return so many requests, each with its own messages, as conversations have."""
    return [ModelRequest(history(messages), TOOLS, f"c{number}", 0, "/w") for number in range(calls)]


async def hold(
    backend: str, urls: Sequence[str], messages: int, calls: int, spread_seconds: float = 0.0
) -> Mapping[str, float]:
    """Measure one backend in this process.

    Args:
        urls: of a server that answers late, and of one that answers at once.
        spread_seconds: the time over which the calls to the first one begin.
    """
    clock, process = SystemClock(), psutil.Process()
    asked = requests(messages, calls)
    slow, quick = client(backend, urls[0]), client(backend, urls[1])
    await quick.complete(asked[0])
    idle = most = process.memory_info().rss
    began, used = clock.monotonic(), clock.cpu()

    async def begin(number: int) -> None:
        await asyncio.sleep(number / calls * spread_seconds)
        await slow.complete(asked[number])

    waiting = asyncio.gather(*map(begin, range(calls)))
    while not waiting.done():
        await asyncio.wait([waiting], timeout=LOOK_SECONDS)
        most = max(most, process.memory_info().rss)
    await waiting
    took, used = clock.monotonic() - began, clock.cpu() - used
    places = asyncio.Semaphore(AT_ONCE)

    async def call(request: ModelRequest) -> None:
        async with places:
            await quick.complete(replace(request, iteration=1))

    again = clock.monotonic()
    await asyncio.gather(*(call(request) for request in asked))
    rate = calls / (clock.monotonic() - again)
    for llm in (slow, quick):
        await llm.aclose()
    return {
        "idle_megabytes": idle / MEGABYTE,
        "kilobytes_a_call": (most - idle) / calls / 1024,
        "cpu_ms_a_call": used / calls * 1_000,
        "seconds": took,
        "calls_a_second": rate,
    }


def compare(arguments: argparse.Namespace) -> None:
    """Measure every backend and print the table."""
    late = RunningModelServer(("--builtin", "bash:100", "--latency", str(arguments.latency), "--records", "0"))
    prompt = RunningModelServer(("--builtin", "bash:100", "--records", "0"))
    print(
        f"{arguments.calls} calls in flight, {arguments.messages} messages each, {arguments.latency:g} s of latency\n"
    )
    print(f"{'':12}{'idle MB':>9}{'kB/call':>9}{'CPU ms/call':>13}{'seconds':>9}{'calls/s':>9}")
    try:
        for backend in BACKENDS:
            options = ["--backend", backend, "--urls", late.url, prompt.url, "--calls", str(arguments.calls)]
            command = [sys.executable, __file__, *options, "--messages", str(arguments.messages)]
            command += ["--spread", str(arguments.spread)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            shown = (told["idle_megabytes"], told["kilobytes_a_call"], told["cpu_ms_a_call"], told["seconds"])
            print("{:12}{:9.0f}{:9.0f}{:13.2f}{:9.1f}{:9.0f}".format(backend, *shown, told["calls_a_second"]))
    finally:
        late.stop()
        prompt.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--messages", type=int, default=41)
    parser.add_argument("--latency", type=float, default=5.0, help="seconds")
    parser.add_argument("--spread", type=float, default=0.0, help="seconds over which the calls begin")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--urls", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend:
        found = asyncio.run(
            hold(arguments.backend, arguments.urls, arguments.messages, arguments.calls, arguments.spread)
        )
        print(json.dumps(found))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
