"""Events of the usual sizes: a command's output of 1.4 KB, and a whole conversation of such steps."""

from __future__ import annotations

import random

from broker.contract.actions import CmdRunAction, MessageAction, SystemMessageAction
from broker.contract.agent_state import AgentState
from broker.contract.events import (
    ConversationCreated,
    Event,
    EventSource,
    ModelReply,
    ModelToolCall,
    TokenUsage,
    ToolCallMetadata,
)
from broker.contract.observations import (
    AgentStateChangedObservation,
    CmdOutputMetadata,
    CmdOutputObservation,
    NullObservation,
)
from broker.contract.recall import RecallAction, RecallType

OUTPUT_CHARS = 1_100
"""Makes an observation of 1.4 KB, its fields included."""
_WORDS = ("error", "warning", "tests", "passed", "module", "src/main.py", "line", "import", "return", "value", "0.21s")


def output(seed: int) -> str:
    """Return what a command might print: words and numbers, never twice the same."""
    random_words = random.Random(seed)
    text = ""
    while len(text) < OUTPUT_CHARS:
        text += random_words.choice(_WORDS) + random_words.choice("  :,\n") + str(random_words.randrange(100_000))
    return text[:OUTPUT_CHARS]


def observation(cause: int, *, seed: int = 0, metadata: ToolCallMetadata | None = None) -> CmdOutputObservation:
    """Return an observation of about 1.4 KB for an action."""
    return CmdOutputObservation(
        command=f"python -m pytest tests/test_{seed}.py",
        content=output(seed),
        metadata=CmdOutputMetadata(exit_code=0, working_dir="/workspace", py_interpreter_path="/usr/bin/python3"),
        source=EventSource.AGENT,
        cause=cause,
        tool_call_metadata=metadata or ToolCallMetadata(function_name="execute_bash", tool_call_id="1", reply_id=1),
    )


def conversation(conversation_id: str, count: int) -> tuple[ConversationCreated, list[Event]]:
    """Return the events of a conversation: the first, and the `count - 1` after it, step by step."""
    created = ConversationCreated(conversation_id=conversation_id, source=EventSource.USER, title="A benchmark")
    events: list[Event] = [
        SystemMessageAction(content="You are an agent. " * 200, tools=("execute_bash",), agent_class="CodeActAgent"),
        MessageAction(content="Make the tests pass. " * 10, source=EventSource.USER),
        RecallAction(recall_type=RecallType.WORKSPACE_CONTEXT, query="Make the tests pass."),
        AgentStateChangedObservation(agent_state=AgentState.RUNNING),
        NullObservation(cause=4),
    ]
    while len(events) + 1 < count:
        events += _step(len(events) + 2)
    return created, events[: count - 1]


def _step(reply_id: int) -> tuple[Event, ...]:
    metadata = ToolCallMetadata(
        function_name="execute_bash", tool_call_id=f"call_{reply_id}", reply_id=reply_id, total_calls_in_response=1
    )
    command = f"python -m pytest tests/test_{reply_id}.py"
    reply = ModelReply(
        content="I will run the tests again and look at what fails.",
        tool_calls=(
            ModelToolCall(id=f"call_{reply_id}", name="execute_bash", arguments=f'{{"command": "{command}"}}'),
        ),
        model="claude-sonnet-4-5",
        response_id=f"msg_{reply_id}",
        usage=TokenUsage(prompt_tokens=10_000 + reply_id, completion_tokens=60),
        cost_usd=0.01,
        iteration=reply_id // 3,
        seen_id=reply_id - 1,
    )
    action = CmdRunAction(command=command, thought=reply.content, tool_call_metadata=metadata)
    return reply, action, observation(reply_id + 1, seed=reply_id, metadata=metadata)
