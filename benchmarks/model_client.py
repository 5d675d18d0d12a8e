"""CPU per model call, of our backends and of bare exchanges of the same bytes, against the local model server.

    python benchmarks/model_client.py [--messages 41] [--calls 40] [--rounds 5]

The clients take turns within each round, each with its bare exchange (see `bare_exchange`); the medians over the rounds
are printed, and the median of the ratios. A call carries a system prompt, a
history of so many messages and six tools, and gets a reply with one tool call at once. CPU is this process' own, so the
server's is not in it. Then each client keeps 200 calls in flight against a latency of one second: what the clients add
to it, what they cost then, and what the server costs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bare_exchange import BareExchange
from broker.contract.tool_specs import ToolSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import LLM, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.wires.chat_wire import ChatWire, write_tools
from tests.model_server.running_server import RunningModelServer

IN_FLIGHT = 200
CALLS_IN_FLIGHT_EACH = 3
BUSY_SECONDS = 120.0
"""A client that needs all of the CPU must not time out on a connection that it has no time to make."""

TOOLS = tuple(
    ToolSpec(
        f"tool_{number}",
        "What the tool does, in a few sentences. " * 10,
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    )
    for number in range(6)
)

Call = Callable[[], Awaitable[object]]


def history(count: int) -> tuple[Message, ...]:
    """Return a system prompt and so many messages: a task, then pairs of call and result (so an odd number)."""
    messages = [Message("user", (TextPart("Do it. " * 20),))]
    for number in range((count - 1) // 2):
        call = ToolCall(f"call_{number}", "tool_1", '{"command": "ls -la /tmp/some/directory && cat notes.txt"}')
        messages.append(Message("assistant", (TextPart("I will look at it."),), (call,)))
        messages.append(Message("tool", (TextPart("a line of output\n" * 40),), tool_call_id=call.id, name=call.name))
    return (Message("system", (TextPart("You are an agent. " * 200),)), *messages)


class Clients:
    """The clients under measurement, each a function that makes one call."""

    def __init__(self, server: RunningModelServer, messages: int) -> None:
        self._request = ModelRequest(history(messages), TOOLS, "c1", 0, "/w")
        self._plain = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))
        self._url = server.url + "/v1/chat/completions"
        chat = {"model": "my-own", "base_url": server.url + "/v1"}
        self._llms: dict[str, LLM] = {
            name: create_llm(
                LLMConfig.create(api_key="no-key", connect_timeout=BUSY_SECONDS, native_tool_calling=True, **address),
                SystemClock(),
            )
            for name, address in {
                "anthropic": {"model": "claude-sonnet-5", "base_url": server.url},
                "openai": chat,
                "litellm": chat | {"backend": "litellm"},
            }.items()
        }

    def calls(self) -> dict[str, Call]:
        """Return the calls by the client's name."""
        return {"plain httpx": self._ask_plainly} | {name: self._asking(llm) for name, llm in self._llms.items()}

    async def aclose(self) -> None:
        """Close all connections."""
        await self._plain.aclose()
        for llm in self._llms.values():
            await llm.aclose()

    def _asking(self, llm: LLM) -> Call:
        return lambda: llm.complete(self._request)

    async def _ask_plainly(self) -> None:
        body = {
            "model": "my-own",
            "messages": ChatWire(cache_marks=False, thoughts="none").write_values(self._request.messages),
            "tools": write_tools(self._request.tools),
        }
        (await self._plain.post(self._url, json=body)).json()


async def cpu_ms(call: Call, calls: int) -> float:
    """Return milliseconds of CPU per call."""
    await call()
    clock = SystemClock()
    began = clock.cpu()
    for _ in range(calls):
        await call()
    return (clock.cpu() - began) / calls * 1_000


async def one_at_a_time(messages: int, calls: int, rounds: int) -> None:
    server = RunningModelServer(("--builtin", "bash:100", "--records", "1"))
    clients = Clients(server, messages)
    try:
        figures: dict[str, list[float]] = {}
        floors: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, call in clients.calls().items():
                figures.setdefault(name, []).append(await cpu_ms(call, calls))
                server.clear()
                await call()
                async with BareExchange(server.url, server.requests()[0]) as exchange:
                    floors.setdefault(name, []).append(await exchange.cpu_seconds(calls) * 1_000)
        print(f"One at a time, {messages} messages: medians of {rounds} rounds of {calls} calls")
        print(f"{'':14}{'CPU ms/call':>14}{'least':>10}{'most':>10}{'bare exchange':>16}{'÷ bare':>10}")
        for name, values in figures.items():
            bare = floors[name]
            ratio = statistics.median(value / floor for value, floor in zip(values, bare, strict=True))
            print(
                f"{name:14}{statistics.median(values):14.2f}{min(values):10.2f}{max(values):10.2f}"
                f"{statistics.median(bare):16.2f}{ratio:10.2f}"
            )
    finally:
        await clients.aclose()
        server.stop()


async def many_in_flight(messages: int) -> None:
    server = RunningModelServer(("--builtin", "bash:100", "--latency", "1.0", "--records", "0"))
    clients = Clients(server, messages)
    process, clock = psutil.Process(server.pid), SystemClock()
    calls = IN_FLIGHT * CALLS_IN_FLIGHT_EACH
    try:
        print(f"\n{IN_FLIGHT} in flight at 1 s of latency, {calls} calls; {CALLS_IN_FLIGHT_EACH}.0 s would be ideal")
        print(f"{'':14}{'CPU ms/call':>14}{'seconds':>10}{'server CPU ms/call':>22}")
        for name, call in clients.calls().items():

            async def caller(call: Call = call) -> None:
                for _ in range(CALLS_IN_FLIGHT_EACH):
                    await call()

            await call()
            served, used, began = sum(process.cpu_times()[:2]), clock.cpu(), clock.monotonic()
            await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
            seconds, used = clock.monotonic() - began, clock.cpu() - used
            served = sum(process.cpu_times()[:2]) - served
            print(f"{name:14}{used / calls * 1_000:14.2f}{seconds:10.1f}{served / calls * 1_000:22.2f}")
    finally:
        await clients.aclose()
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=41)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    asyncio.run(one_at_a_time(arguments.messages, arguments.calls, arguments.rounds))
    asyncio.run(many_in_flight(arguments.messages))


if __name__ == "__main__":
    main()
