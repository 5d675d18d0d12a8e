"""Programs written for OpenHands' SDK, which know nothing of Deckhands. `benchmarks/peer/setup.sh` makes their Python.

Run by it, this file reads what to do as JSON on its standard input, and prints what the SDK has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.sdk_peer import PYTHON


class Program:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def result(self) -> dict[str, Any]:
        """Return what it has seen, once it has ended."""
        out, problems = await self._process.communicate()
        assert self._process.returncode == 0, problems.decode()[-4000:]
        found: dict[str, Any] = json.loads(out.decode().rsplit("\n", 2)[-2])
        return found


@contextlib.asynccontextmanager
async def program(what: str, home: Path, **given: Any) -> AsyncIterator[Program]:
    """Run one of the functions below with the SDK's Python; it is killed at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", __file__),
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([what, given]).encode())
    process.stdin.close()
    try:
        yield Program(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def make_agent(model: str) -> Any:
    """The agent that OpenHands' examples use."""
    from openhands.sdk import LLM
    from openhands.tools.preset.default import get_default_agent

    return get_default_agent(llm=LLM(usage_id="agent", model=model, api_key="sk-of-the-client"), cli_mode=True)


def describe(conversation: Any, seen: list[Any]) -> dict[str, Any]:
    """What a conversation looks like to its client; `seen` has the events that reached its callbacks."""
    metrics = conversation.conversation_stats.get_combined_metrics()
    return {
        "id": str(conversation.id),
        "status": conversation.state.execution_status.value,
        "kinds": [type(event).__name__ for event in conversation.state.events],
        "events": [event.id for event in conversation.state.events if getattr(event, "key", "") != "full_state"],
        "seen": [event.id for event in seen if getattr(event, "key", "") != "full_state"],
        "prompt_tokens": metrics.accumulated_token_usage.prompt_tokens,
    }


def run_once(url: str, key: str, model: str, directory: str) -> dict[str, Any]:
    """Create a conversation, send a message, and let the agent work to its end."""
    from openhands.sdk import Conversation, Workspace

    seen: list[Any] = []
    workspace = Workspace(host=url, api_key=key, working_dir=directory)
    conversation = Conversation(
        agent=make_agent(model), workspace=workspace, callbacks=[seen.append], delete_on_close=False
    )
    conversation.send_message("Do it.")
    conversation.run(timeout=240)
    found = describe(conversation, seen)
    conversation.close()
    return found


def use_everything(url: str, key: str, models: list[str], directory: str) -> dict[str, Any]:
    """Go through what a client of the SDK can do with a conversation."""
    from openhands.sdk import LLM, Conversation, Workspace
    from openhands.sdk.conversation.impl.remote_conversation import RemoteConversation
    from openhands.sdk.security.confirmation_policy import AlwaysConfirm, NeverConfirm
    from openhands.sdk.security.llm_analyzer import LLMSecurityAnalyzer

    found: dict[str, Any] = {}
    workspace = Workspace(host=url, api_key=key, working_dir=directory)
    conversation = Conversation(agent=make_agent(models[0]), workspace=workspace, tags={"team": "billing"})
    conversation.set_security_analyzer(LLMSecurityAnalyzer())
    conversation.set_confirmation_policy(AlwaysConfirm())
    conversation.send_message("Do it.")
    found["title"] = conversation.generate_title(llm=LLM(usage_id="title", model="none/none", num_retries=1))
    conversation.run(timeout=120)
    found["asked"] = conversation.state.execution_status.value
    conversation.reject_pending_actions("Not this one.")
    conversation.set_confirmation_policy(NeverConfirm())
    conversation.run(timeout=120)
    while conversation.state.execution_status.value == "waiting_for_confirmation":
        conversation.run(timeout=120)
    found["ended"] = conversation.state.execution_status.value
    conversation.set_title("Named")
    conversation.run(timeout=120)
    found["again"] = conversation.state.execution_status.value
    fork = conversation.fork(title="A fork")
    found["fork"] = [fork.state.execution_status.value, len(fork.state.events) > 0]
    fork.send_message("Once more.")
    fork.run(timeout=120)
    found["fork_ended"] = fork.state.execution_status.value
    attached = RemoteConversation.attach(workspace, conversation.id)
    info = attached.state.refresh_from_server()
    found["attached"] = [info["title"], info["tags"], attached.state.confirmation_policy.kind]
    found["kinds"] = sorted({type(event).__name__ for event in attached.state.events})
    attached.close()
    fork.close()
    conversation.delete_on_close = True
    conversation.close()
    found["deleted"] = workspace.client.get(f"/api/conversations/{conversation.id}").status_code
    return found


def record_events(url: str, key: str, model: list[str], directory: str, walks: dict[str, Any]) -> dict[str, Any]:
    """Walk through conversations, and return for each the events that the SDK has seen, and the states between.

    Args:
        directory: each conversation works in a folder below it.
        walks: by the name of each conversation `steps`, of which each is the name of a method and its arguments such as
            `["run"]`, or `["continue"]`; and `limits`, further arguments of the conversation such as `max_iteration_per_run`.
    """
    from openhands.sdk import LLM, Conversation, Tool, Workspace
    from openhands.sdk.conversation.exceptions import ConversationRunError
    from openhands.sdk.security import confirmation_policy
    from openhands.tools.preset.default import get_default_agent

    llm = LLM(usage_id="agent", model=model[0], base_url=model[1], api_key="sk-of-the-client", num_retries=0)
    agent = get_default_agent(llm=llm, cli_mode=True)
    # Its other terminal is a program that outlives its server.
    params = {"terminal": {"terminal_type": "subprocess"}}
    tools = [Tool(name=tool.name, params=params.get(tool.name, tool.params)) for tool in agent.tools]
    agent = agent.model_copy(update={"tools": tools})
    found = {}
    for walk, described in walks.items():
        seen: list[Any] = []
        is_changed = threading.Event()
        states = []
        workspace = Workspace(host=url, api_key=key, working_dir=f"{directory}/{walk}")
        conversation = Conversation(
            agent=agent,
            workspace=workspace,
            callbacks=[seen.append, lambda _event, is_changed=is_changed: is_changed.set()],
            delete_on_close=False,
            visualizer=None,
            **described["limits"],
        )
        for name, *given in described["steps"]:
            match name:
                case "set_confirmation_policy":
                    conversation.set_confirmation_policy(getattr(confirmation_policy, given[0])())
                case "continue":  # until it rests again; a server may have started the agent already
                    while (status := conversation.state.refresh_from_server()["execution_status"]) == "running":
                        is_changed.wait(10)
                        is_changed.clear()
                    if status == "idle":
                        conversation.run(timeout=120)
                case "run":
                    with contextlib.suppress(ConversationRunError):  # the state after it says so
                        conversation.run(timeout=120)
                case _:
                    getattr(conversation, name)(*given)
            states.append(conversation.state.refresh_from_server()["execution_status"])
        events = [event.model_dump(mode="json") for event in conversation.state.events]
        conversation.close()
        found[walk] = {"states": states, "events": events, "seen": [event.model_dump(mode="json") for event in seen]}
    return found


if __name__ == "__main__":
    asked, given_fields = json.load(sys.stdin)
    reply = globals()[asked](**given_fields)
    sys.stdout.write(f"\n{json.dumps(reply)}\n")
    sys.stdout.flush()
    os._exit(0)
