"""The same program of OpenHands' SDK against its own agent server and against a cluster, event by event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.faults.server_process import free_port
from tests.model_server.running_server import RunningModelServer
from tests.openhands_program import program
from tests.polling import until
from tests.sdk_peer import IS_INSTALLED, PYTHON
from tests.served_stores import environment_with, worker
from tests.server_parts import served

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="run benchmarks/peer/setup.sh to install OpenHands' SDK"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
LIMIT_SECONDS = 200.0
MODEL = "openai/scripted"
Recordings = dict[str, dict[str, dict[str, Any]]]
KEY = "key-of-the-reference-server"
# Our name of a tool: OpenHands' name.
TOOL_NAMES = {"execute_bash": "terminal", "str_replace_editor": "file_editor"}


@contextlib.asynccontextmanager
async def reference_server(folder: Path) -> AsyncIterator[str]:
    """OpenHands' agent server as a process; the address of it."""
    folder.mkdir()
    port = free_port()
    log = (folder / "log").open("wb")
    running = await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port", str(port)),
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "OH_SESSION_API_KEYS_0": KEY,
            "OH_CONVERSATIONS_PATH": str(folder / "conversations"),
            "OH_BASH_EVENTS_DIR": str(folder / "bash"),
            "OH_ENABLE_VSCODE": "false",
            "OH_ENABLE_VNC": "false",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        cwd=folder,
        stdout=log.fileno(),
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with httpx2.AsyncClient() as client:

            async def answers() -> bool:
                assert running.returncode is None, (folder / "log").read_text()[-4000:]
                with contextlib.suppress(httpx2.HTTPError):
                    return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
                return False

            await until(answers, limit=LIMIT_SECONDS, what="OpenHands' agent server")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()
        log.close()


def turn(text: str = "", *calls: tuple[str, Any]) -> dict[str, Any]:
    """A reply of the model, with our names of tools; the arguments of a call are an object, or what the model wrote."""
    return {
        "text": text,
        "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


def for_openhands(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same turns with OpenHands' names of tools."""
    return [
        {
            **one,
            "tool_calls": [
                {**call, "name": TOOL_NAMES.get(call["name"], call["name"])} for call in one.get("tool_calls", ())
            ],
        }
        for one in turns
    ]


@dataclass(frozen=True)
class Walk:
    """What a program does with a conversation, and what the model says there."""

    turns: list[dict[str, Any]]
    steps: list[list[Any]]
    limits: dict[str, Any] = field(default_factory=dict)


FINISH = turn("", ("finish", {"message": "All is done."}))
LIST = ("execute_bash", {"command": "echo one"})
WALKS = {
    "tools": Walk(
        [
            turn("I look.", LIST),
            turn(
                "",
                ("execute_bash", {"command": "echo two; exit_code() { return 3; }; exit_code"}),
                ("think", {"thought": "hm"}),
            ),
            turn(
                "", ("task_tracker", {"command": "plan", "task_list": [{"title": "a", "notes": "", "status": "todo"}]})
            ),
            FINISH,
        ],
        [["send_message", "Walk: tools"], ["run"]],
    ),
    "words": Walk(
        [turn("What do you want?"), turn("I see.", LIST), FINISH],
        [["send_message", "Walk: words"], ["run"], ["send_message", "Go."], ["run"]],
    ),
    "confirmed": Walk(
        [turn("", LIST), turn("", LIST), FINISH],
        [
            ["set_confirmation_policy", "AlwaysConfirm"],
            ["send_message", "Walk: confirmed"],
            ["run"],
            ["reject_pending_actions", "Not this."],
            ["continue"],
            ["run"],
            ["run"],
        ],
    ),
    "limited": Walk([turn("", LIST)] * 5, [["send_message", "Walk: limited"], ["run"]], {"max_iteration_per_run": 2}),
    "unreadable": Walk(
        [turn("", ("execute_bash", "{not json")), turn("", ("no_such_tool", {})), FINISH],
        [["send_message", "Walk: unreadable"], ["run"]],
    ),
    "paused": Walk([turn("", LIST), FINISH], [["send_message", "Walk: paused"], ["pause"], ["run"], ["run"]]),
}


def model_arguments(folder: Path, translate: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> list[str]:
    """The options of a model server that follows the script of the walk which a request is about."""
    folder.mkdir()
    found = []
    for name, walk in WALKS.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({"turns": translate(walk.turns)}))
        found += ["--by-text", f"Walk: {name}", str(file)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same")


async def record(folder: Path, place: Path, **given: Any) -> dict[str, Any]:
    walks = {name: {"steps": walk.steps, "limits": walk.limits} for name, walk in WALKS.items()}
    async with program("record_events", folder, directory=str(place), walks=walks, **given) as sdk:
        return await sdk.result()


async def record_reference(folder: Path, model: str) -> dict[str, Any]:
    async with reference_server(folder / "reference") as url:
        return await record(folder, folder / "theirs", url=url, key=KEY, model=[MODEL, model])


async def record_cluster(folder: Path, model: str) -> dict[str, Any]:
    place = folder / "ours"
    for name in WALKS:
        (place / name).mkdir(parents=True)
    table = folder / "models.toml"
    table.write_text(f'[llm]\nmodel = "{MODEL}"\nbase_url = "{model}"\napi_key = "k"\nnum_retries = 1\n')
    async with served(folder / "log", environment_with(folder), openhands=True) as server:
        environment = server.environment(folder / "home", DECKHANDS_WORKSPACE_ROOTS=str(place), LLM_CONFIG=str(table))
        async with worker("controller_worker", environment, server.log), worker("tool_worker", environment, server.log):
            await server.working()
            return await record(folder, place, url=server.url, key=await server.token(), model=[MODEL, model])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recordings(folder: Path, shared_model_server: Callable[..., RunningModelServer]) -> Recordings:
    """What the program has seen of OpenHands' server, and of a cluster."""
    theirs_model = shared_model_server(*model_arguments(folder / "theirs-turns", for_openhands))
    ours_model = shared_model_server(*model_arguments(folder / "ours-turns", list))
    theirs, ours = await asyncio.gather(
        record_reference(folder, f"{theirs_model.url}/v1"), record_cluster(folder, f"{ours_model.url}/v1")
    )
    return {"theirs": theirs, "ours": ours}


class Events:
    """The events of a recording without what has to differ: times, places, and names that each server makes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The same number for the same name: in the order in which the names were met."""
        return self._numbers.setdefault(name, len(self._numbers))

    def reduce(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """An event as it is compared; None for one of which docs/protocols.md says that it differs."""
        match event:
            case {"kind": "ConversationStateUpdateEvent", "key": "stats" | "full_state" | "execution_status"}:
                return None  # the states are compared for themselves
            case {"kind": "ConversationStateUpdateEvent", "key": "last_user_message_id", "value": name}:
                return {"key": "last_user_message_id", "value": self.number(name)}
            case {"kind": "ConversationStateUpdateEvent", "key": key, "value": value}:
                return {"key": key, "value": value}
            case {"kind": "MessageEvent", "source": "environment", "llm_message": {"content": [{"text": text}]}}:
                if text.startswith("The workspace is "):
                    return None
        found = {name: value for name, value in event.items() if name not in NOT_COMPARED}
        found |= {name: self.number(found[name]) for name in ("id", "action_id", "llm_response_id") if found.get(name)}
        if call := found.get("tool_call"):
            arguments = json.loads(call["arguments"]) if found["action"] else None
            found["tool_call"] = call | {"name": TOOL_NAMES.get(call["name"], call["name"]), "arguments": arguments}
        if observation := found.get("observation"):
            found["observation"] = {name: value for name, value in observation.items() if name not in NOT_COMPARED}
            if metadata := observation.get("metadata"):
                found["observation"]["exit_code"] = metadata["exit_code"]
        return found


NOT_COMPARED = frozenset(
    {
        *("timestamp", "parent_id"),
        *("system_prompt", "dynamic_context", "tools"),  # of the prompt
        *("error", "detail", "rejection_reason", "content"),  # texts of tools and of errors
        *("metadata", "full_output_save_dir"),  # of the machine
    }
)


def reduce_recording(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The events in an order that does not depend on which call of a reply ends first, and on when a change is shown."""
    events = recording["events"]
    places = {event["id"]: place for place, event in enumerate(events)}
    results = [event for event in events if event["kind"] == "ObservationEvent"]
    results.sort(key=lambda event: places[event["action_id"]], reverse=True)
    in_order = [results.pop() if event["kind"] == "ObservationEvent" else event for event in events]
    in_order.sort(key=lambda event: event.get("key") != "confirmation_policy")
    numbers = Events()
    return [one for event in in_order if (one := numbers.reduce(event)) is not None]


def list_statuses(recording: dict[str, Any]) -> list[str]:
    """Each status that the conversation had, from event to event; a run that comes at once after a message hides `idle`."""
    changes = [event["value"] for event in recording["events"] if event.get("key") == "execution_status"]
    return [status for status in changes if status != "idle"]


@pytest.mark.parametrize("walk", WALKS)
async def test_program_sees_the_same_events_of_both_servers(recordings: Recordings, walk: str) -> None:
    theirs, ours = recordings["theirs"][walk], recordings["ours"][walk]
    assert reduce_recording(ours) == reduce_recording(theirs)


@pytest.mark.parametrize("walk", WALKS)
async def test_program_sees_the_same_states_of_both_servers(recordings: Recordings, walk: str) -> None:
    theirs, ours = recordings["theirs"][walk], recordings["ours"][walk]
    continues = walk == "confirmed"  # after a rejection, the agent continues here without a run
    assert ours["states"] == [
        "running"
        if continues and n and theirs["states"][n - 1] == "waiting_for_confirmation" and state == "idle"
        else state
        for n, state in enumerate(theirs["states"])
    ]
    if not continues:
        assert list_statuses(ours) == list_statuses(theirs)
