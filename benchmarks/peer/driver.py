"""OpenHands' SDK at the same work: reads one order a line as JSON, does it, answers one line of JSON.

Runs under the peer's own interpreter (see setup.sh). Written against the SDK's public API: `LocalConversation` with its
defaults (files on disk, stuck detection on), only without the visualizer, which prints.

Orders: `{"work": name, …arguments}`; the answer is what the function of that name returns.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LOG_LEVEL": "ERROR"}
# What the libraries print must not get between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from openhands.sdk import LLM, Agent, LocalConversation, Message, TextContent, Tool, register_tool  # noqa: E402
from openhands.sdk.conversation.event_store import EventLog  # noqa: E402
from openhands.sdk.event import ActionEvent, MessageEvent, ObservationEvent  # noqa: E402
from openhands.sdk.io import LocalFileStore  # noqa: E402
from openhands.sdk.llm import MessageToolCall  # noqa: E402
from openhands.sdk.testing import TestLLM  # noqa: E402
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor  # noqa: E402
from openhands.tools.terminal import TerminalTool  # noqa: E402
from pydantic import SecretStr  # noqa: E402

TOOL = "execute_bash"


class NoopAction(Action):
    command: str


class NoopObservation(Observation):
    pass


class NoopExecutor(ToolExecutor[NoopAction, NoopObservation]):
    """Answers at once, and notes when and after how much CPU time it was asked."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, _: NoopAction, conversation: Any = None) -> NoopObservation:  # noqa: ARG002  (the SDK passes it)
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return NoopObservation.from_text(text="")


class NoopTool(ToolDefinition[NoopAction, NoopObservation]):
    name = TOOL

    @classmethod
    def create(cls, **_: Any) -> Sequence[NoopTool]:
        return [
            cls(
                description="Run a command.",
                action_type=NoopAction,
                observation_type=NoopObservation,
                executor=NoopExecutor(),
            )
        ]


register_tool(TOOL, NoopTool)


def hello() -> dict[str, Any]:
    return {"version": version("openhands-sdk"), "python": sys.version.split()[0], "pid": os.getpid()}


def append(count: int, text: str, directory: str) -> dict[str, Any]:
    """Append messages one at a time, each time to disk."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        log = EventLog(LocalFileStore(folder))
        seconds = []
        for event in [_message(text) for _ in range(count)]:
            began = time.perf_counter()
            log.append(event)
            seconds.append(time.perf_counter() - began)
    return {"seconds": seconds}


def cycle(count: int, text: str, directory: str) -> dict[str, Any]:
    """Record an action and its observation in a conversation, as a step of its loop does."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        conversation = _conversation(TestLLM.from_messages([]), folder, TOOL)
        seconds = []
        actions = [_action(number) for number in range(count)]
        for action, observation in [(action, _observation(action, text)) for action in actions]:
            began = time.perf_counter()
            with conversation.state as state:
                state.append_event(action)
                state.append_event(observation)
            seconds.append(time.perf_counter() - began)
        conversation.close()
    return {"seconds": seconds}


def replay(events: int, rounds: int, text: str, directory: str) -> dict[str, Any]:
    """Read a log of so many events whole, and open the conversation it belongs to, each time from the beginning."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        conversation = _conversation(TestLLM.from_messages([]), folder, TOOL)
        conversation.send_message("Continue.")
        with conversation.state as state:
            while len(state.events) < events:
                state.append_event(action := _action(len(state.events)))
                state.append_event(_observation(action, text))
        files = conversation.state.persistence_dir
        conversation_id = conversation.id
        conversation.close()
        read, opened = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            assert len(list(EventLog(LocalFileStore(files)))) >= events
            read.append(time.perf_counter() - began)
            began = time.perf_counter()
            conversation = _conversation(TestLLM.from_messages([]), folder, TOOL, conversation_id)
            assert len(conversation.state.events) >= events
            opened.append(time.perf_counter() - began)
            conversation.close()
        size = sum(path.stat().st_size for path in Path(files).rglob("*") if path.is_file())
    return {"read": read, "opened": opened, "bytes": size}


def steps(count: int, url: str | None, directory: str) -> dict[str, Any]:
    """Run one conversation of so many steps of the no-op tool; per step: seconds and CPU seconds of this process."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        conversation = _conversation(_model(url, TOOL, "true {}", count), folder, TOOL, max_steps=count + 10)
        _run(conversation)
        executor = conversation.agent.tools_map[TOOL].executor
        conversation.close()
    assert len(executor.wall) == count, f"{len(executor.wall)} steps instead of {count}"
    return {"seconds": _differences(executor.wall), "cpu": _differences(executor.cpu)}


def terminal(count: int, directory: str) -> dict[str, Any]:
    """Run one conversation whose steps run `echo hi` in the SDK's terminal; seconds per step."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        conversation = _conversation(_model(None, TerminalTool.name, "echo hi", count), folder, TerminalTool.name)
        _run(conversation)
        times = [
            datetime.fromisoformat(event.timestamp).timestamp()
            for event in conversation.state.events
            if isinstance(event, ObservationEvent) and event.tool_name == TerminalTool.name
        ]
        conversation.close()
    assert len(times) == count, f"{len(times)} steps instead of {count}"
    return {"seconds": _differences(times)}


def crowd(conversations: int, url: str, directory: str) -> dict[str, Any]:
    """Run conversations at once, a thread each, against the model server."""
    # The first call loads half of litellm.
    _model(url).completion([Message(role="user", content=[TextContent(text="Hello.")])])
    before = time.process_time()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        began = time.perf_counter()
        threads = [threading.Thread(target=_one_of_many, args=(url, folder)) for _ in range(conversations)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu": time.process_time() - before, "rss_kib": _peak_kib()}


def hold(conversations: int, directory: str) -> dict[str, Any]:
    """Run conversations of one step, one after the other, and keep them; KiB of resident memory that each adds."""
    kept = []
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        for number in range(conversations + 5):
            if number == 5:
                before = _resident_kib()
            conversation = _conversation(_model(None, TOOL, "true {}", 1), folder, TOOL)
            _run(conversation)
            kept.append(conversation)
        added = (_resident_kib() - before) / conversations
        for conversation in kept:
            conversation.close()
    return {"kib": [added]}


def _one_of_many(url: str, folder: str) -> None:
    conversation = _conversation(_model(url), folder, TOOL)
    _run(conversation)
    conversation.close()


def _run(conversation: LocalConversation) -> None:
    conversation.send_message("Do it.")
    conversation.run()
    assert conversation.state.execution_status.value == "finished", conversation.state.execution_status


def _conversation(
    model: LLM, folder: str, tool: str, conversation_id: uuid.UUID | None = None, *, max_steps: int = 500
) -> LocalConversation:
    return LocalConversation(
        agent=Agent(llm=model, tools=[Tool(name=tool)]),
        workspace=folder,
        persistence_dir=folder,
        conversation_id=conversation_id,
        visualizer=None,
        max_iteration_per_run=max_steps,
    )


def _model(url: str | None, tool: str = TOOL, command: str = "", count: int = 0) -> LLM:
    """The model server at `url`, or a script inside this process: `count` calls of the tool, then the end."""
    if url is not None:
        return LLM(model="openai/scripted", base_url=f"{url}/v1", api_key=SecretStr("none"), usage_id=uuid.uuid4().hex)
    calls = [(tool, {"command": command.format(number)}) for number in range(count)]
    calls.append(("finish", {"message": "Done."}))
    return TestLLM.from_messages(
        [
            Message(role="assistant", content=[TextContent(text=f"Step {number}.")], tool_calls=[_call(number, *call)])
            for number, call in enumerate(calls)
        ]
    )


def _call(number: int, tool: str, arguments: dict[str, str]) -> MessageToolCall:
    return MessageToolCall(id=f"call_{number}", name=tool, arguments=json.dumps(arguments), origin="completion")


def _message(text: str) -> MessageEvent:
    return MessageEvent(source="user", llm_message=Message(role="user", content=[TextContent(text=text)]))


def _action(number: int) -> ActionEvent:
    call = _call(number, TOOL, {"command": f"true {number}"})
    return ActionEvent(
        thought=[TextContent(text=f"Step {number}.")],
        action=NoopAction(command=f"true {number}"),
        tool_name=TOOL,
        tool_call_id=call.id,
        tool_call=call,
        llm_response_id=f"reply-{number}",
    )


def _observation(action: ActionEvent, text: str) -> ObservationEvent:
    return ObservationEvent(
        observation=NoopObservation.from_text(text=text),
        action_id=action.id,
        tool_name=TOOL,
        tool_call_id=action.tool_call_id,
    )


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


WORKS: dict[str, Callable[..., dict[str, Any]]] = {
    work.__name__: work for work in (hello, append, cycle, replay, steps, terminal, crowd, hold)
}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        answer = WORKS[order.pop("work")](**order)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
