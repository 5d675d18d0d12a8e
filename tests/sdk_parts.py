"""Helpers for tests of SDK agents: a worker's services whose SDK is the stand-in, or the real one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from controller_worker.loop.conversation_loop import ConversationLoop
from controller_worker.loop.sdk.runner import PROGRAM
from controller_worker.loop.sdk.sessions import SandboxChoice, SdkSessions
from tests.conversation_hands import CID, Hands

STAND_IN = str(Path(__file__).with_name("sdk_stand_in.py"))


def stand_in(habit: str = "obedient", heard: Path | None = None) -> tuple[str, ...]:
    """Return the program that replaces the SDK's; it adds each line of its input to a file, if one is named."""
    return (sys.executable, "-I", "-S", STAND_IN, habit, *([] if heard is None else [str(heard)]))


def with_sdk(
    hands: Hands, program: Sequence[str] = PROGRAM, *, limit: int = 8, sandbox: SandboxChoice = "none"
) -> Hands:
    hands.services = replace(hands.services, sdk_sessions=SdkSessions(limit, sandbox, program=program))
    return hands


async def taken_up(hands: Hands, conversation_id: str = CID) -> ConversationLoop:
    """Claim a conversation and let it run; it is not waited for."""
    loop = await hands.claim(conversation_id)
    loop.wake(has_new_events=False)
    return loop
