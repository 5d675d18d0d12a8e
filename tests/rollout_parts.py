"""An engine, a cluster that calls it, and what a trainer checks in each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deckhands.client import Segment
from deckhands.rollouts import StubEngine
from deckhands.rollouts.stub_engine import logprob_of
from tests.faults.harness import FaultCluster

RETRIES = {"LLM_RETRY_MIN_WAIT": "0", "LLM_RETRY_MULTIPLIER": "0.05"}


def make_environment(address: str, api: str = "completions") -> dict[str, str]:
    """Return the settings of workers that call an engine."""
    native = {} if api == "completions" else {"LLM_NATIVE_TOOL_CALLING": "true"}
    return {
        "LLM_MODEL": "openai/stub",
        "LLM_BASE_URL": f"{address}/v1",
        "LLM_API_KEY": "none",
        "LLM_ROLLOUT_API": api,
        **RETRIES,
        **native,
    }


def make_prompts(count: int) -> list[dict[str, Any]]:
    """Return prompts whose answer no reply of the stub gives."""
    return [{"id": f"prompt-{n}", "task": f"Find the answer {n}.", "answer": "the answer"} for n in range(count)]


class Rollouts:
    """An engine in this process, and workers of a cluster that call it."""

    def __init__(self, cluster: FaultCluster, engine: StubEngine, address: str) -> None:
        self.cluster, self.engine, self.address = cluster, engine, address
        self.client = cluster.client

    def start(self, api: str = "completions", name: str = "c1", **more: str) -> None:
        """Start a controller worker."""
        self.cluster.start_controller(name, **make_environment(self.address, api), **more)

    async def set_weights(self, version: int) -> None:
        """Update the engine's weights, also in the middle of replies."""
        async with self.engine.policy.changed:
            self.engine.policy.version = version
            self.engine.policy.changed.notify_all()

    def find_truth(self, segment: Segment) -> list[dict[str, Any]]:
        """Return the engine's rows of the replies of a segment, by their prompts."""
        tokens = segment.tokens.tolist()
        return [
            row
            for reply in segment.replies
            for row in self.engine.truth
            if row["prompt"] == tokens[: reply.start] and row["tokens"] == tokens[reply.start : reply.end]
        ]


def count_mismatches(segment: Segment, truth: Mapping[tuple[int, ...], Sequence[Mapping[str, Any]]]) -> int:
    """Return how many sampled tokens of a segment the engine did not sample there, with that version and log-prob."""
    wrong = 0
    tokens = segment.tokens.tolist()
    for reply in segment.replies:
        sampled = tokens[reply.start : reply.end]
        versions = segment.versions[reply.start : reply.end].tolist()
        rows = truth.get(tuple(tokens[: reply.start]), ())
        if not any(row["tokens"] == sampled and row["versions"] == versions for row in rows):
            wrong += len(sampled)
        places = range(reply.start, reply.end)
        wrong += sum(segment.logprobs[at] != logprob_of(tokens[at], segment.versions[at]) for at in places)
        wrong += sum(segment.mask[at] != 1 for at in places)
    wrong += sum(segment.mask) - sum(reply.end - reply.start for reply in segment.replies)
    return wrong
