"""Train the dictionary by which small events are compressed, and say what it saves.

    python -m benchmarks.entry_dictionary                 compare with the dictionary in use
    python -m benchmarks.entry_dictionary --write PATH    write a new one

The samples are logs of conversations of each kind of agent: a real controller, a no-op tool and scripted models whose
texts are random, so that a dictionary learns what events have in common and not what these agents say. A dictionary
that has been released stays as it is: entries in stores refer to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.cluster import BenchCluster, running_cluster
from broker.contract import AgentSpec, Limits, LLMSpec, WorkspaceSpec, codec

AGENTS = ("CodeActAgent", "CodeActAgent", "ReadOnlyAgent", "PlanningAgent")
CONVERSATIONS = 400
SIZE_BYTES = 24 * 1024
ENDS = (b"finished", b"awaiting_user_input", b"error")
POLL_SECONDS = 0.1
NAMES = re.compile(rb"scripted//[!-~]*\.json|scripted-[0-9a-z]+-[0-9]+|01[0-9a-z]{24}")
"""What only these conversations contain."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOOLS: dict[str, tuple[str, ...]] = {
    "execute_bash": ("command",),
    "think": ("thought",),
}


def random_text(draw: random.Random, words: int) -> str:
    """Return words that no dictionary can know."""
    return " ".join("".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(words))


def write_script(path: Path, draw: random.Random) -> Path:
    """Write a script of some tool calls, and an end: the agent finishes, or asks its user."""
    turns: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 6)):
        name = draw.choice(list(TOOLS))
        arguments = {field: random_text(draw, 2) for field in TOOLS[name]}
        usage = {"prompt_tokens": draw.randint(1_000, 90_000), "completion_tokens": draw.randint(5, 900)}
        call = {"name": name, "arguments": arguments}
        turns.append({"text": random_text(draw, 2) if number % 2 else "", "tool_calls": [call], "usage": usage})
    end = {"name": "finish", "arguments": {"message": random_text(draw, 2)}}
    turns.append({"tool_calls": [end]} if draw.random() < 0.7 else {"text": random_text(draw, 2)})
    path.write_text(json.dumps({"turns": turns}))
    return path


async def collect(directory: Path) -> list[bytes]:
    """Run the conversations, and return their events, packed."""
    draw = random.Random(1)
    async with running_cluster(directory / "cluster") as cluster:
        await cluster.start_controller()
        await cluster.start_noop_tool()
        ids = [await _submit(cluster, draw, number) for number in range(CONVERSATIONS)]
        samples = []
        for conversation_id in ids:
            names = cluster.client.store.known_keys(conversation_id)
            while await cluster.client.store.call("HGET", names.meta, "state") not in ENDS:
                await asyncio.sleep(POLL_SECONDS)
            entries = await cluster.client.store.call("XRANGE", names.events, "-", "+")
            packed = [codec.pack(codec.decode_wire(fields[fields.index(b"e") + 1])) for _, fields in entries]
            samples += [NAMES.sub(b"", sample) for sample in packed]
        return samples


async def _submit(cluster: BenchCluster, draw: random.Random, number: int) -> str:
    script = write_script(cluster.directory / f"script-{number}.json", draw)
    return await cluster.client.submit(
        random_text(draw, 2),
        agent=AgentSpec(name=AGENTS[number % len(AGENTS)], llm=LLMSpec(model=f"scripted/{script}")),
        workspace=WorkspaceSpec(pool="noop"),
        limits=Limits(max_iterations=draw.randint(10, 500)),
        headless=False,
        labels={"team": random_text(draw, 1)},
    )


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.entry_dictionary", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PATH", help="where to write the new dictionary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dictionary-") as directory:
        samples = asyncio.run(collect(Path(directory)))
    plain = sum(map(len, samples))
    print(f"{len(samples):,} events, {plain:,} bytes packed")
    if arguments.write:
        trained = zstandard.train_dictionary(SIZE_BYTES, samples, level=3, k=192, d=8)
        arguments.write.write_bytes(trained.as_bytes())
        compressor = zstandard.ZstdCompressor(level=1, dict_data=trained)
        print(f"with the new dictionary: {sum(len(compressor.compress(sample)) for sample in samples):,} bytes")
    in_use = zstandard.ZstdCompressor(level=1, dict_data=codec.load_dictionary())
    print(f"with the dictionary in use: {sum(len(in_use.compress(sample)) for sample in samples):,} bytes")


if __name__ == "__main__":
    main()
