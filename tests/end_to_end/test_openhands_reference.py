"""The same programs on OpenHands' agent server and on a cluster, event by event."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.faults.harness import FaultCluster
from tests.faults.server_process import free_port, server
from tests.model_server.running_server import RunningModelServer
from tests.openhands_program import PARTS, program
from tests.polling import until
from tests.sdk_peer import IS_INSTALLED, PYTHON
from tests.server_parts import add_key

pytest_plugins = ("tests.model_server.fixtures",)
LIMIT = 600.0
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="run benchmarks/peer/setup.sh to install OpenHands' SDK"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(2 * LIMIT),
]
MODEL = "openai/gpt-4o"
UPDATE = "ConversationStateUpdateEvent"
UNKNOWN_FIELDS = frozenset({"activated_path_rules", "agent_state", "blocked_actions", "blocked_messages"})
"""Fields of a state that a cluster does not have."""


def terminal(command: str) -> dict[str, Any]:
    return {"name": "terminal", "arguments": {"command": command}}


def editor(path: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "file_editor", "arguments": {"path": path, **arguments}}


def finish(message: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "finish", "arguments": {"message": message}}]}


def turns_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The replies of the model, with OpenHands' names of tools."""
    match name:
        case "work":
            note = str(folder / "note.txt")
            return [
                {"text": "I look.", "tool_calls": [terminal("echo one; echo two")]},
                {"text": "Two at once.", "tool_calls": [terminal("false"), terminal("pwd")]},
                {"tool_calls": [editor(note, command="create", file_text="a\nb\n")]},
                {"tool_calls": [editor(note, command="str_replace", old_str="b", new_str="c")]},
                {"tool_calls": [editor(note, command="view")]},
                {"tool_calls": [editor(str(folder / "none.txt"), command="view")]},
                {"tool_calls": [{"name": "think", "arguments": {"thought": "Nearly."}}]},
                {
                    "tool_calls": [
                        {
                            "name": "task_tracker",
                            "arguments": {
                                "command": "plan",
                                "task_list": [{"title": "Look", "notes": "", "status": "done"}],
                            },
                        }
                    ]
                },
                finish("Done."),
            ]
        case "talk":
            return [{"text": "Hello."}, finish("Again.")]
        case "ask":
            return [
                {"text": "First.", "tool_calls": [terminal("echo one")]},
                {"text": "Second.", "tool_calls": [terminal("echo two")]},
                finish("Over."),
            ]
        case "wrong":
            return [
                {"tool_calls": [{"name": "no_such_tool", "arguments": {"a": 1}}]},
                {"tool_calls": [{"name": "terminal", "arguments": {"comand": "ls"}}]},
                finish("Over."),
            ]
        case "limit":
            return [{"tool_calls": [terminal(f"echo {number}")]} for number in range(5)]
        case "stuck":
            return [{"tool_calls": [terminal("echo same")]}] * 8
        case "stream":
            return [
                {"text": "One two three four five.", "tool_calls": [terminal("echo one")]},
                {"text": "Six seven eight."},
            ]
        case "refused":
            return [{"error": {"code": "authentication", "times": None}}]
        case "interrupt":
            return [{"text": "Long.", "tool_calls": [terminal("sleep 600")]}, finish("Over.")]
    return []


OUR_NAMES = {"terminal": "execute_bash", "file_editor": "str_replace_editor"}


def with_our_names(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        turn
        | {"tool_calls": [call | {"name": OUR_NAMES.get(call["name"], call["name"])} for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]


def arguments_of(folder: Path, work: Path, *, is_ours: bool) -> list[str]:
    """The options of a model server that follows the scripts of all programs."""
    found: list[str] = []
    for name, (task, _) in PARTS.items():
        turns = turns_of(name, work)
        turns = [turn | {"usage": {"prompt_tokens": 100, "completion_tokens": 10}} for turn in turns]
        path = folder / f"{name}-{'ours' if is_ours else 'theirs'}.json"
        path.write_text(json.dumps({"turns": with_our_names(turns) if is_ours else turns}))
        found += ["--by-text", task, str(path)]
    return found


@contextlib.asynccontextmanager
async def reference_server(home: Path) -> AsyncIterator[tuple[str, str]]:
    """OpenHands' agent server, once it answers."""
    port, key = free_port(), "a-key-of-the-reference"
    home.mkdir()
    with (home / "log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(
            *(PYTHON, "-P", "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port", str(port)),
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "OH_SESSION_API_KEYS_0": key,
                "OH_CONVERSATIONS_PATH": str(home / "conversations"),
                "OH_ENABLE_VSCODE": "0",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "DO_NOT_TRACK": "1",
            },
            cwd=home,
            stdout=log,
            stderr=log,
        )
        try:
            async with httpx2.AsyncClient() as client:

                async def answers() -> bool:
                    assert running.returncode is None, (home / "log").read_text()[-3000:]
                    with contextlib.suppress(httpx2.HTTPError):
                        return (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
                    return False

                await until(answers, limit=LIMIT, what="OpenHands' agent server")
            yield f"http://127.0.0.1:{port}", key
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.terminate()
            await running.wait()


@contextlib.asynccontextmanager
async def our_server(folder: Path, models: RunningModelServer) -> AsyncIterator[tuple[str, str]]:
    """A cluster of real workers, and its server."""
    async with FaultCluster(folder).running() as cluster:
        cluster.start(LLM_MODEL=MODEL, LLM_BASE_URL=f"{models.url}/v1", LLM_API_KEY="sk-of-the-operator")
        port, key = free_port(), await add_key(cluster.client.store, "acme")
        async with server(cluster.store.url, folder / "home", port, options=("--openhands",)):
            yield f"http://127.0.0.1:{port}", key


async def record(url: str, key: str, models: RunningModelServer, place: Path, home: Path) -> dict[str, Any]:
    given = {
        "names": list(PARTS),
        "url": url,
        "key": key,
        "server": f"{models.url}/v1",
        "model": MODEL,
        "directory": str(place),
    }
    async with program("record_programs", home, **given) as sdk, asyncio.timeout(LIMIT):
        return await sdk.result()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(
    tmp_path_factory: pytest.TempPathFactory, shared_model_server: Callable[..., RunningModelServer]
) -> dict[str, tuple[Recording, Recording]]:
    """By program, what it saw of OpenHands' server and of ours."""
    folder = tmp_path_factory.mktemp("o")
    theirs, ours = folder / "theirs", folder / "work" / "ours"
    found: list[dict[str, Any]] = []
    for place in (theirs, ours):
        place.mkdir(parents=True)
        models = shared_model_server(*arguments_of(folder, place, is_ours=place is ours))
        serving = our_server(folder, models) if place is ours else reference_server(folder / "reference")
        async with serving as (url, key):
            found.append(await record(url, key, models, place, folder))
    if kept := os.environ.get("DECKHANDS_KEPT_RECORDINGS"):
        Path(kept).write_text(json.dumps(found, indent=1))
    return {name: (Recording(found[0][name], theirs), Recording(found[1][name], ours)) for name in PARTS}


class Recording:
    """What a program saw of a server.

    Attributes:
        events: the events that are no updates and no pieces of text.
    """

    def __init__(self, found: dict[str, Any], place: Path) -> None:
        self.found = found
        self._place = str(place)
        past = {event["id"] for event in found["log"]}
        self.events = [
            event
            for event in found["frames"]
            if event["kind"] not in (UPDATE, "StreamingDeltaEvent") and event["id"] in past and not is_recall(event)
        ]
        self._actions = [event["id"] for event in self.events if event["kind"] == "ActionEvent"]

    @property
    def statuses(self) -> list[str]:
        """The agent's status, each time that it changed."""
        return [event["value"] for event in self.found["frames"] if event.get("key") == "execution_status"]

    @property
    def state(self) -> dict[str, Any]:
        """The whole state that was sent last."""
        found: dict[str, Any] = [e["value"] for e in self.found["frames"] if e.get("key") == "full_state"][-1]
        return found

    def describe(self) -> list[dict[str, Any]]:
        """Return the events without their ids, their times, and the words that our tools and errors have."""
        return [
            {"kind": event["kind"], "source": event["source"]} | self._replace_place(self._pick(event))
            for event in self.events
        ]

    def _pick(self, event: dict[str, Any]) -> dict[str, Any]:
        call = {name: event[name] for name in ("tool_name", "tool_call_id") if name in event}
        match event["kind"]:
            case "MessageEvent":
                message = event["llm_message"]
                return {"role": message["role"], "text": text_of(message["content"])}
            case "ActionEvent":
                own = {"risk": event["security_risk"]} if event.get("action") is not None else {}
                return (
                    call
                    | own
                    | {
                        "action": (event.get("action") or {}).get("kind"),
                        "arguments": json.loads(event["tool_call"]["arguments"]),
                        "thought": text_of(event["thought"]),
                        "reply": event["llm_response_id"],
                        "summary": event.get("summary"),
                    }
                )
            case "ObservationEvent":
                seen = event["observation"]
                is_terminal = seen["kind"] == "TerminalObservation"
                names = (
                    "exit_code",
                    "command",
                    "timeout",
                    "path",
                    "prev_exist",
                    "old_content",
                    "new_content",
                    "task_list",
                )
                return call | {
                    "answers": self._actions.index(event["action_id"]),
                    "observation": seen["kind"],
                    "is_error": seen.get("is_error", False),
                    "text": text_of(seen["content"]) if is_terminal or seen["kind"] == "FinishObservation" else "",
                    **{name: seen[name] for name in names if seen.get(name) is not None},
                }
            case "UserRejectObservation":
                return call | {"answers": self._actions.index(event["action_id"]), "reason": event["rejection_reason"]}
            case "ConversationErrorEvent":
                return {"code": event["code"]}
        return call

    def _replace_place(self, fields: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(fields).replace(self._place, "PLACE"))
        return found


def is_recall(event: dict[str, Any]) -> bool:
    """Return whether an event tells the model where its workspace is; OpenHands has that in the system prompt."""
    return bool(event["kind"] == "MessageEvent" and event["source"] == "environment")


def text_of(content: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in content if part["type"] == "text")


@pytest.mark.parametrize("name", PARTS)
async def test_program_sees_the_same_events(recorded: dict[str, tuple[Recording, Recording]], name: str) -> None:
    theirs, ours = recorded[name]
    assert ours.describe() == theirs.describe()


@pytest.mark.parametrize("name", PARTS)
async def test_program_sees_the_same_states(recorded: dict[str, tuple[Recording, Recording]], name: str) -> None:
    theirs, ours = recorded[name]
    assert ours.statuses == theirs.statuses
    steps = [[step[:-1] for step in one.found["steps"]] for one in (theirs, ours)]
    assert steps[0] == steps[1]
    assert ours.found["response"] == theirs.found["response"]
    assert ours.state.keys() >= theirs.state.keys() - UNKNOWN_FIELDS
    for field in ("execution_status", "max_iterations", "stuck_detection", "confirmation_policy", "tags"):
        assert ours.state[field] == theirs.state[field], field
    assert tokens_of(ours) == tokens_of(theirs)


def tokens_of(recording: Recording) -> Any:
    usage = recording.state["stats"]["usage_to_metrics"]["agent"]["accumulated_token_usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


async def test_text_of_replies_comes_before_their_events(recorded: dict[str, tuple[Recording, Recording]]) -> None:
    shown = []
    for one in recorded["stream"]:
        assert one.found["pieces"] == "One two three four five.Six seven eight."
        kinds = [frame["kind"] for frame in one.found["frames"] if frame["kind"] != UPDATE and not is_recall(frame)]
        shown.append([kind for kind, _ in itertools.groupby(kinds)])
        assert "StreamingDeltaEvent" not in {event["kind"] for event in one.found["log"]}
    assert shown[0] == shown[1]
    for one in recorded["work"]:
        assert one.found["pieces"] == "", "its model has no `stream`"
