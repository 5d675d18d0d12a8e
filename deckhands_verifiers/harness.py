"""The harness: a rollout of `verifiers` as a conversation of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.errors import HarnessError
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from broker.contract import AgentSpec, Limits
from broker.runtime import DeckhandsError, new_conversation_id
from broker.secrets import ENDPOINT_KEY, ENDPOINT_URL
from deckhands.client import Client
from deckhands.evaluation import (
    AttemptRow,
    Evaluation,
    EvaluationPlan,
    Instance,
    Results,
    derive_attempt_id,
    get_reward,
    read_dataset,
)
from deckhands_verifiers.taskset import RESULT


class DeckhandsHarnessConfig(HarnessConfig):
    """The cluster, and the agent.

    Attributes:
        url: the cluster's store; None for DECKHANDS_URL.
        policy: the entry of the operator's table of models whose `own_endpoints` has the address of `verifiers`.
    """

    url: str | None = None
    policy: str = "openai/policy"
    agent: str = "CodeActAgent"
    max_iterations: int = 100
    network: bool = True
    tenant: str = ""


class DeckhandsHarness(Harness[DeckhandsHarnessConfig]):
    """Runs rollouts in a cluster. The cluster isolates their commands, and none runs here."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(  # noqa: PLR0917  (the signature of `verifiers`)
        self,
        ctx: ModelContext,  # noqa: ARG002  (the model is that of the rollout's endpoint)
        trace: Trace,
        runtime: Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run one rollout to its end, and leave its reward in the trace."""
        if mcp_urls:
            raise HarnessError("deckhands-verifiers offers the cluster's tools, and none of a task's MCP servers")
        _, prompt = self.resolve_text_prompt(data)
        plan = EvaluationPlan(
            f"vf-{trace.id}",
            [find_instance(data, prompt or "")],
            [self.config.policy],
            agent=AgentSpec(name=self.config.agent),
            limits=Limits(max_iterations=self.config.max_iterations),
            at_once=1,
            retries=0,  # the trace would have the calls of both attempts
            is_paced=False,
            tenant=self.config.tenant,
            network=self.config.network,
            secrets={ENDPOINT_URL: endpoint, ENDPOINT_KEY: secret},
        )
        try:
            async with await Client.connect(self.config.url) as client:
                row = await run_attempt(client, plan)
        except DeckhandsError as error:
            raise HarnessError(f"the cluster cannot run the rollout: {error}") from error
        trace.info[RESULT] = describe(row)
        if not row.counts and trace.stop_condition is None:
            raise HarnessError(f"the conversation {row.conversation_id} ended without a result: {row.cause}")
        return ProgramResult(0, row.outcome, "")


async def run_attempt(client: Client, plan: EvaluationPlan) -> AttemptRow:
    """Run the one attempt of a plan, and return its row. If this is cancelled, so is the conversation."""
    attempt = plan.list_attempts()[0]
    with tempfile.TemporaryDirectory() as folder, Results(Path(folder) / "results.jsonl") as results:
        try:
            await Evaluation(client, plan, results).run()
        except asyncio.CancelledError:
            with contextlib.suppress(DeckhandsError):  # it may have ended, or not have started
                await client.cancel(derive_attempt_id(plan.name, attempt.key, 0, 0))
            raise
        return results.rows[attempt.key]


def find_instance(data: TaskData, prompt: str) -> Instance:
    """Return the instance of a task: of our dataset, or of another taskset, which scores it itself."""
    name = getattr(data, "instance", "")
    if not name:
        return Instance(id=new_conversation_id(), task=prompt)
    return _index(data.dataset)[name]


@cache
def _index(dataset: str) -> dict[str, Instance]:
    return {one.id: one for one in read_dataset(dataset)}


def describe(row: AttemptRow) -> dict[str, Any]:
    """Return the result of an attempt for the trace."""
    return {
        "conversation_id": row.conversation_id,
        "outcome": row.outcome,
        "cause": row.cause,
        "reward": get_reward(row),
        "step_rewards": list(row.step_rewards),
        "metrics": dict(row.metrics),
    }
