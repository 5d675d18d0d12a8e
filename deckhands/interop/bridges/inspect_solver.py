"""A Deckhands agent as a solver of inspect_ai.

    Task(dataset=…, solver=deckhands_agent(model="anthropic/claude-sonnet-4-5"), scorer=…, sandbox="docker")

Holds: a sample and an epoch are one conversation of the cluster, by an idempotency key. The agent works in a workspace
of the cluster. It starts with the files of the sample's sandbox, if there is one, and changed files are written back
there before the scorer runs.
Does not: use the model that inspect was called with; the cluster calls models, with its own limits and keys.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from inspect_ai.model import ChatMessage, ModelOutput, ModelUsage
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import sandbox
from pydantic import TypeAdapter

from broker.contract import AgentSpec, AgentState, Limits
from deckhands.client import MAX_TITLE, Client, Summary
from deckhands.evaluation import (
    AGENT_FAULT_CODES,
    LIMITS,
    MAX_BYTES,
    MAX_FILES,
    TreeFile,
    pack_tree,
    read_tree,
    to_dialogue,
    to_inspect_message,
)

_MESSAGES: TypeAdapter[list[Any]] = TypeAdapter(list[ChatMessage])


class SampleFailed(RuntimeError):
    """The infrastructure failed, so the sample has no result; inspect counts it as an error."""


@solver  # type: ignore[untyped-decorator]
def deckhands_agent(
    agent: str = "CodeActAgent",
    *,
    model: str | None = None,
    cluster: str | None = None,
    limits: Limits | None = None,
    use_sandbox: bool = True,
) -> Solver:
    """Return a solver that gives the sample's task to an agent.

    Args:
        model: a model or profile of the cluster; None for its default.
        cluster: the URL of the cluster's store; None for the running cluster, as found by `Client.connect`.
        limits: the limits of each conversation.
        use_sandbox: whether the workspace starts with the files of the sample's sandbox, and is written back there.
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:  # noqa: ARG001  (the signature of solvers)
        async with await Client.connect(cluster) as client:
            before = await _sandbox_files() if use_sandbox else None
            workspace, upload = pack_tree(before or {})
            spec = AgentSpec(name=agent, enable_workspace_skills=False)  # exactly as inspect gives it
            if model is not None:
                spec = spec.model_copy(update={"llm": spec.llm.model_copy(update={"model": model})})
            conversation_id = await client.submit(
                state.input_text,
                agent=spec,
                workspace=workspace,
                upload=upload,
                limits=limits,
                title=str(state.sample_id)[:MAX_TITLE],
                labels={"inspect": "sample"},
                idempotency_key=f"inspect/{state.uuid}/{state.epoch}",
            )
            summary = await client.wait_until_settled(conversation_id)
            events = await client.events(conversation_id, is_whole=True)
            if before is not None:
                await _write_back(client, conversation_id, before)
        _require_result(summary)
        dialogue = to_dialogue(conversation_id, events)
        state.messages = _MESSAGES.validate_python([to_inspect_message(turn) for turn in dialogue.turns])
        state.output = ModelOutput.from_content(dialogue.model or "deckhands", summary.message or dialogue.last_message)
        state.output.usage = ModelUsage(
            input_tokens=summary.prompt_tokens,
            output_tokens=summary.completion_tokens,
            total_tokens=summary.prompt_tokens + summary.completion_tokens,
        )
        state.metadata["deckhands"] = {
            "conversation_id": conversation_id,
            "state": str(summary.state),
            "error_code": summary.error_code,
            "cost_usd": summary.cost_usd,
            "iterations": summary.iterations,
        }
        return state

    return solve


def _require_result(summary: Summary) -> None:
    said = summary.error_code
    if summary.state == AgentState.STOPPED:
        raise SampleFailed(f"The conversation {summary.conversation_id} was stopped.")
    if summary.state == AgentState.ERROR and said not in LIMITS and said not in AGENT_FAULT_CODES:
        raise SampleFailed(f"The conversation {summary.conversation_id} ended in the error {said}: {summary.message}")


async def _sandbox_files() -> dict[str, TreeFile] | None:
    """Return the files of the sandbox's working directory; None if the sample has no sandbox."""
    try:
        place = sandbox()
    except (LookupError, RuntimeError, ValueError):  # inspect raises a different error for each kind of missing sandbox
        return None
    listed = await place.exec(["find", ".", "-type", "f", "-not", "-path", "*/.git/*"])
    names = [name.removeprefix("./") for name in listed.stdout.splitlines() if name]
    if len(names) > MAX_FILES:
        raise SampleFailed(f"The sandbox has more than {MAX_FILES:,} files.")
    found: dict[str, TreeFile] = {}
    for name in names:
        found[name] = TreeFile(await place.read_file(name, text=False))
        if sum(len(file.content) for file in found.values()) > MAX_BYTES:
            raise SampleFailed(f"The sandbox has more than {MAX_BYTES:,} bytes.")
    return found


async def _write_back(client: Client, conversation_id: str, before: dict[str, TreeFile]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found")
        await client.files.download(conversation_id, ".", target)
        after = read_tree(target)
    place = sandbox()
    for name, file in after.items():
        if (name not in before or before[name].content != file.content) and not name.startswith(".openhands/"):
            await place.write_file(name, file.content)
    gone = [name for name in before if name not in after]
    if gone:
        await place.exec(["rm", "-f", "--", *gone])
