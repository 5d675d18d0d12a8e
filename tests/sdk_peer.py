"""OpenHands' SDK as a judge of what we write for it: it runs in its own environment, which `benchmarks/peer/setup.sh` makes.

Run as a program by that environment's Python, it reads requests of JSON on its standard input and prints a reply.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parents[1] / "build" / "peer-venv" / "bin" / "python"
IS_INSTALLED = PYTHON.exists()


def ask_sdk(question: str, **given: Any) -> dict[str, Any]:
    """Return the SDK's reply to a question: the name of one of the functions below."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }
    asked = subprocess.run(
        [PYTHON, __file__],
        input=json.dumps([question, given]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    reply: dict[str, Any] = json.loads(asked.stdout.rsplit("\n", 2)[-2])
    return reply


def judge_events(conversations: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what the SDK refuses in events, and what it would show to a model and to users."""
    from openhands.sdk.context.view import View
    from openhands.sdk.event import ActionEvent, Event, LLMConvertibleEvent

    problems, views, messages = [], {}, {}
    for name, events in conversations.items():
        read = []
        for fields in events:
            try:
                read.append(Event.model_validate(fields))
                str(read[-1].visualize)
            except (ValueError, TypeError, AttributeError) as error:
                problems.append(f"{name} {fields['kind']}: {error}")
        view = View.from_events(read).events
        views[name] = [event.id for event in view]
        shown = LLMConvertibleEvent.events_to_messages(view)
        messages[name] = [
            {
                "role": message.role,
                "text": "".join(getattr(part, "text", "") for part in message.content),
                "calls": [call.id for call in message.tool_calls or ()],
                "answers": message.tool_call_id,
            }
            for message in shown
        ]
        batches = [event.llm_response_id for event in read if isinstance(event, ActionEvent)]
        runs = [one for n, one in enumerate(batches) if n == 0 or batches[n - 1] != one]
        if len(runs) != len(set(runs)):
            problems.append(f"{name}: the calls of a reply do not stand together")
    return {"problems": problems, "views": views, "messages": messages}


def judge_states(states: dict[str, dict[str, Any]], infos: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the SDK reads of states and of its server's information about conversations."""
    from openhands.agent_server.models import ConversationInfo
    from openhands.sdk.conversation.state import ConversationState
    from openhands.sdk.event import ConversationStateUpdateEvent

    found = {}
    for name, info in infos.items():
        read = ConversationInfo.model_validate(info)
        state = ConversationState.model_validate(states[name])
        ConversationStateUpdateEvent(key="full_state", value=states[name])
        combined = state.stats.get_combined_metrics()
        found[name] = {
            "status": state.execution_status.value,
            "model": read.agent.llm.model,
            "cost": combined.accumulated_cost,
            "prompt_tokens": combined.accumulated_token_usage.prompt_tokens,
            "info_cost": read.metrics.accumulated_cost,
            "policy": type(state.confirmation_policy).__name__,
        }
    return found


def open_directory(path: str, conversation_id: str, workspace: str) -> dict[str, Any]:
    """Return what a conversation holds that the SDK opened from a directory, and what it can do with it."""
    from uuid import UUID

    from openhands.sdk import LLM, Agent, Conversation, Tool
    from openhands.sdk.agent import AgentBase

    state = json.loads((Path(path) / UUID(conversation_id).hex / "base_state.json").read_text())
    agent = AgentBase.model_validate(state["agent"])
    assert isinstance(agent, Agent)
    params = {"terminal": {"terminal_type": "subprocess"}}  # the other one needs a running tmux
    tools = [Tool(name=tool.name, params=params.get(tool.name, {})) for tool in agent.tools]
    llm = LLM(model=agent.llm.model, api_key="none", usage_id="agent")
    agent = agent.model_copy(update={"llm": llm, "tools": tools})
    conversation = Conversation(
        agent=agent,
        workspace=workspace,
        persistence_dir=path,
        conversation_id=UUID(conversation_id),
        visualizer=None,
    )
    stats = conversation.conversation_stats.get_combined_metrics()
    conversation.send_message("Continue, please.")
    return {
        "status": state["execution_status"],
        "events": [event.id for event in conversation.state.events][: len(conversation.state.events)],
        "kinds": [type(event).__name__ for event in conversation.state.events],
        "view": [event.id for event in conversation.state.view.events],
        "cost": stats.accumulated_cost,
    }


if __name__ == "__main__":
    import openhands.tools.apply_patch
    import openhands.tools.file_editor
    import openhands.tools.task
    import openhands.tools.task_tracker
    import openhands.tools.terminal  # noqa: F401  (their events' classes)

    asked, given_fields = json.load(sys.stdin)
    reply_fields = globals()[asked](**given_fields)
    print(json.dumps(reply_fields))
    sys.stdout.flush()
    os._exit(0)
