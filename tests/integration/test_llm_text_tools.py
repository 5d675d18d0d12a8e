"""Models without function calling, through every real client: requests and replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import EventSource, ModelReply
from broker.contract.observations import ErrorObservation
from broker.contract.tool_specs import ToolSpec
from controller_worker.agents.tool_calls import parse_reply
from controller_worker.model.model_call import to_model_reply
from controller_worker.providers.llm import Completion, ModelRequest
from controller_worker.providers.messages.fn_call_prompt import add_example, render_system_suffix
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall
from tests.integration.llm_requests import opened
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

CALL = "<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>"
RUN = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = ToolSpec("execute_bash", "Run a command.", RUN)
SCRIPT = {
    "turns": [
        {"text": f"I look.\n{CALL}"},
        {"text": "<function=execute_bash>\n<parameter=comand>ls</parameter>\n</function>"},
        {"text": "<function=execute_bash>\n<parameter=command>ls", "stop_reason": "length"},
        {"text": "Done, without a call."},
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "ls"}}]},
        {"text": "<function=execute_bash>\n<parameter=command>ls</parameter>\n", "stop_reason": "length"},
        {"text": "<function=execute_bash>\n<parameter=command>ls</parameter>\n"},
    ]
}
HISTORY = (
    Message("system", (TextPart("Be good."),)),
    Message("user", (TextPart("Do it."), ImagePart("data:image/png;base64,AAAA"))),
    Message(
        "assistant",
        (TextPart("Two at once."),),
        (ToolCall("a", "execute_bash", '{"command": "ls"}'), ToolCall("b", "execute_bash", '{"command": "l')),
    ),
    Message("tool", (TextPart("a.txt"),), tool_call_id="a", name="execute_bash"),
    Message("tool", (TextPart("That was no JSON."),), tool_call_id="b", name="execute_bash"),
)
BACKENDS = {
    "anthropic": ("claude-2.1", "", "anthropic", False),
    "openai": ("openai/my-own", "/v1", "auto", None),
    "litellm": ("openai/my-own", "/v1", "litellm", None),
}


@pytest.fixture(scope="module")
def server(
    shared_model_server: Callable[..., RunningModelServer], tmp_path_factory: pytest.TempPathFactory
) -> RunningModelServer:
    path = tmp_path_factory.mktemp("scripts") / "text.json"
    path.write_text(json.dumps(SCRIPT))
    return shared_model_server("--script", str(path))


async def ask(server: RunningModelServer, backend: str, turn: int, **settings: Any) -> Completion:
    """The turn is the number of replies in the history."""
    model, path, name, native = BACKENDS[backend]
    server.clear()
    config: dict[str, Any] = {"model": model, "backend": name, "base_url": server.url + path, "api_key": "k"}
    spoken = [message for _ in range(turn) for message in (Message("assistant", (TextPart("x"),)), HISTORY[1])]
    async with opened(**config | {"native_tool_calling": native} | settings) as llm:
        return await llm.complete(ModelRequest((*HISTORY[:2], *spoken), (TOOL,), "c1", turn, "/w"))


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_call_in_text_is_a_call(server: RunningModelServer, backend: str) -> None:
    reply = await ask(server, backend, 0)
    assert (reply.text, reply.stop_reason) == ("I look.", "tool_calls")
    assert reply.tool_calls == (ToolCall("toolu_01_01", "execute_bash", '{"command": "ls"}'),)
    body = server.requests()[0]["body"]
    assert "tools" not in body
    assert (body.get("stop") or body.get("stop_sequences")) == ["</function"]
    assert (await ask(server, backend, 3)).tool_calls == ()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("turn", "problem"), [(1, "Parameter 'comand' is not allowed"), (2, "is cut off: parameter")])
async def test_a_bad_call_is_told_to_the_model(
    server: RunningModelServer, backend: str, turn: int, problem: str
) -> None:
    reply = await ask(server, backend, turn)
    (call,) = reply.tool_calls
    assert problem in call.problem
    event = to_model_reply(reply, iteration=1, seen_id=4, event_id=5)
    (answer,) = parse_reply(ModelReply.model_validate(event.model_dump()), [CmdRunAction.tool_spec])
    assert answer == ErrorObservation(
        content=call.problem, source=EventSource.AGENT, tool_call_metadata=answer.tool_call_metadata
    )


@pytest.mark.parametrize("backend", BACKENDS)
async def test_call_cut_at_the_length_limit_is_not_whole(server: RunningModelServer, backend: str) -> None:
    (cut,) = (await ask(server, backend, 5)).tool_calls
    assert cut.problem.startswith("The call of function 'execute_bash' is cut off")
    (stopped,) = (await ask(server, backend, 6)).tool_calls
    assert (stopped.arguments, stopped.problem) == ('{"command": "ls"}', "")


async def test_calls_parsed_by_the_server_are_accepted(server: RunningModelServer) -> None:
    reply = await ask(server, "openai", 4)
    assert reply.tool_calls == (ToolCall("call_0005_0", "execute_bash", '{"command": "ls"}'),)


async def sent(server: RunningModelServer, *tools: ToolSpec) -> Any:
    server.clear()
    async with opened(model="my-own", base_url=server.url + "/v1", disable_vision=False) as llm:
        await llm.complete(ModelRequest(HISTORY, tools, "c1", 1, "/w"))
    return server.requests()[0]["body"]["messages"]


async def test_a_whole_request(server: RunningModelServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    calls = f'Two at once.\n\n{CALL}\n\n<function=execute_bash>\n{{"command": "l\n</function>'
    assert await sent(server, TOOL) == [
        {"role": "system", "content": "Be good." + render_system_suffix([TOOL])},
        {"role": "user", "content": [{"type": "text", "text": add_example("Do it.", [TOOL])}, image]},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": "EXECUTION RESULT of [execute_bash]:\na.txt"},
        {"role": "user", "content": "EXECUTION RESULT of [execute_bash]:\nThat was no JSON."},
    ]
    without_tools = await sent(server)
    assert [message["role"] for message in without_tools] == ["system", "user", "assistant", "user", "user"]
    assert without_tools[0]["content"] == "Be good."


@pytest.mark.parametrize(
    ("settings", "has_stop", "has_example"),
    [
        ({}, True, True),
        ({"disable_stop_word": True}, False, True),
        ({"model": "grok-code-fast-1", "native_tool_calling": False}, False, True),
        ({"model": "my-devstral"}, True, False),
    ],
)
async def test_stop_words_and_examples(
    server: RunningModelServer, settings: dict[str, Any], has_stop: bool, has_example: bool
) -> None:
    await ask(server, "openai", 0, **settings)
    body = server.requests()[0]["body"]
    assert ("stop" in body, "START OF EXAMPLE" in str(body["messages"])) == (has_stop, has_example)


@pytest.mark.parametrize(
    ("model", "native", "is_native"),
    [("gpt-4o", None, True), ("gpt-4o", False, False), ("my-own", None, False), ("my-own", True, True)],
)
async def test_which_models_get_their_tools_as_text(
    server: RunningModelServer, model: str, native: bool | None, is_native: bool
) -> None:
    await ask(server, "openai", 0, model=model, native_tool_calling=native)
    assert ("tools" in server.requests()[0]["body"]) is is_native


async def test_a_scripted_model_can_speak_text_too(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    async with opened(model=f"scripted/{path}", native_tool_calling=False) as llm:
        reply = await llm.complete(ModelRequest(HISTORY, (TOOL,), "c1", 0, "/w"))
    assert [call.name for call in reply.tool_calls] == ["execute_bash"]
