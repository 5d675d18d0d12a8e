"""SDK agents on a real store: the Claude Agent SDK with its CLI, the real loop, a scripted model."""

from __future__ import annotations

import pytest

from tests.conversation_hands import THINK, Hands
from tests.polling import until

pytest.importorskip("claude_agent_sdk")

LIMIT_SECONDS = 60.0


def bash(command: str) -> dict[str, object]:
    return {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]}


async def begin(hands: Hands, *turns: dict[str, object], name: str = "CodeActAgentSDK", **fields: object) -> None:
    await hands.begin(*turns)  # writes the script


async def test_a_conversation_in_the_loop_of_the_sdk(hands: Hands) -> None:
    await hands.begin(THINK, THINK, name="CodeActAgentSDK")
    loop = await hands.claim()
    loop.wake(has_new_events=False)
    await until(lambda: hands.gone, what="the end", limit=LIMIT_SECONDS)
    print(await hands.kinds())
