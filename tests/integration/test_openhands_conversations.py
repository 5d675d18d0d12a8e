"""OpenHands' conversations over HTTP and its socket, without its SDK: real workers, one cluster for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from broker.contract.actions import SystemMessageAction
from broker.contract.events import ConversationCreated
from broker.contract.observations import AgentDelegateObservation, CmdOutputObservation
from deckhands.interop import from_uuid
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.openhands.routers import ROUTERS as OPENHANDS_ROUTERS
from tests.integration.command_line import script
from tests.polling import unhurried, until
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served
from tests.turns import bash, call, finish

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_SECONDS = 60.0
PATH = "/api/conversations"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openhands")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Served]:
    (folder / "projects").mkdir()
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(served(folder / "log", environment_with(folder), openhands=True))
        environment = found.environment(folder / "home", DECKHANDS_WORKSPACE_ROOTS=str(folder / "projects"))
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, found.log))
        await found.working()
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with keyed(server, await server.token(requests_per_minute=1_000_000)) as client:
        yield client


def keyed(server: Served, token: str) -> httpx2.AsyncClient:
    client = server.as_()
    client.headers["X-Session-API-Key"] = token
    return client


def start(model: str, **more: Any) -> dict[str, Any]:
    condenser = {"kind": "LLMSummarizingCondenser", "max_size": 80, "keep_first": 4}
    llm = {"model": model, "usage_id": "agent", "api_key": "sk-of-the-client"}
    return {
        "agent": {"kind": "Agent", "llm": llm, "tools": [{"name": "terminal"}], "condenser": condenser},
        "workspace": {"kind": "LocalWorkspace", "working_dir": "workspace/project"},
        **more,
    }


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": words}], **more}


async def created(client: httpx2.AsyncClient, model: str, **more: Any) -> str:
    answer = await client.post(PATH, json=start(model, **more))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def status_of(client: httpx2.AsyncClient, name: str) -> str:
    return str((await client.get(f"{PATH}/{name}")).json()["execution_status"])


async def reached(client: httpx2.AsyncClient, name: str, status: str) -> None:
    async def is_so() -> bool:
        found = await status_of(client, name)
        assert status == "error" or found != "error", await events_of(client, name)
        return found == status

    await until(is_so, limit=LIMIT_SECONDS, what=f"the status {status}")


async def events_of(client: httpx2.AsyncClient, name: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    page: str | None = None
    while True:
        answer = await client.get(
            f"{PATH}/{name}/events/search", params={**query, **({"page_id": page} if page else {})}
        )
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        page = answer.json()["next_page_id"]
        if page is None:
            return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["kind"] for event in events if event["kind"] != "ConversationStateUpdateEvent"]


async def test_message_waits_until_the_run_is_asked_for(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    name = await created(client, script(tmp_path / "m.json", bash("echo hello"), finish("It is done.")))
    assert await status_of(client, name) == "idle"
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 400
    assert (await client.post(f"{PATH}/{name}/events", json=text("Do it."))).json() == {"success": True}
    assert await status_of(client, name) == "idle"
    assert kinds(await events_of(client, name))[:2] == ["SystemPromptEvent", "MessageEvent"]
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 200
    await reached(client, name, "finished")
    events = await events_of(client, name)
    wanted = ["ActionEvent", "ObservationEvent", "ActionEvent", "ObservationEvent"]
    assert kinds(events)[-4:] == wanted
    assert (await client.get(f"{PATH}/{name}/agent_final_response")).json() == {"response": "It is done."}
    info = (await client.get(f"{PATH}/{name}")).json()
    assert info["leaf_event_id"] in {event["id"] for event in events}
    assert info["title"] == "Do it."
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 200, "it has finished, which is no error"


async def test_conversation_that_waits_for_its_run_can_be_paused(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    name = await created(client, script(tmp_path / "m.json", finish("It is done.")))
    await client.post(f"{PATH}/{name}/events", json=text("Do it."))
    assert (await client.post(f"{PATH}/{name}/pause")).json() == {"success": True}
    assert await status_of(client, name) == "paused"
    assert "PauseEvent" in kinds(await events_of(client, name))
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 200
    await reached(client, name, "finished")


async def test_initial_message_starts_the_agent_at_once(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", {"text": "Hello."})
    name = await created(client, model, initial_message=text("Greet me."), tags={"team": "billing"})
    await reached(client, name, "finished")
    assert (await client.get(f"{PATH}/{name}")).json()["tags"] == {"team": "billing"}


async def test_plain_text_is_content_of_every_message(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    sent = {"role": "user", "content": "Do it."}
    model = script(tmp_path / "m.json", finish("Over."))
    name = await created(client, model, initial_message=sent)
    await reached(client, name, "finished")
    assert (await client.post(f"{PATH}/{name}/events", json=sent)).status_code == 200


async def test_events_are_paged_filtered_and_counted(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    name = await created(client, script(tmp_path / "m.json", finish("Over.")), initial_message=text("Finish NOW."))
    await reached(client, name, "finished")
    whole = await events_of(client, name)
    assert await events_of(client, name, limit=1) == whole
    assert await events_of(client, name, limit=2, sort_order="TIMESTAMP_DESC") == whole[::-1]
    assert kinds(await events_of(client, name, kind="ActionEvent")) == ["ActionEvent"]
    assert {event["source"] for event in await events_of(client, name, source="user")} == {"user"}
    assert len(await events_of(client, name, body="finish now")) == 1
    second = whole[1]["timestamp"]
    later = await events_of(client, name, timestamp__gte=second)
    assert later == [event for event in whole if event["timestamp"] >= second]
    count = await client.get(f"{PATH}/{name}/events/count", params={"timestamp__lt": second})
    assert count.json() == len(whole) - len(later)
    one = await client.get(f"{PATH}/{name}/events/{whole[0]['id']}")
    assert one.json() == whole[0]
    both = await client.get(f"{PATH}/{name}/events", params={"event_ids": [whole[1]["id"], "x"]})
    assert both.json() == [whole[1], None]
    assert (await client.get(f"{PATH}/{name}/events/x")).status_code == 404


async def test_unknown_page_is_refused(client: httpx2.AsyncClient) -> None:
    name = await created(client, "scripted/none")
    for route in (f"{name}/events/search", "search", "search?sort_order=CREATED_AT"):
        answer = await client.get(f"{PATH}/{route}{'&' if '?' in route else '?'}page_id=x")
        assert (answer.status_code, answer.json()["code"]) == (400, "unknown_page"), route


async def test_agent_with_tools_of_its_program_answers_no_question(client: httpx2.AsyncClient) -> None:
    agent = {"kind": "ACPAgent", "acp_command": ["true"]}
    answer = await client.post(PATH, json=start("scripted/none", agent=agent))
    assert answer.status_code == 201, answer.text
    asked = await client.post(f"{PATH}/{answer.json()['id']}/ask_agent", json={"question": "What do you do?"})
    assert (asked.status_code, asked.json()["code"]) == (501, "not_on_a_cluster"), asked.text


async def test_pending_action_is_confirmed_and_rejected(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", bash("echo one"), bash("echo two"), finish("Over."))
    policy = {"kind": "AlwaysConfirm"}
    name = await created(client, model, confirmation_policy=policy, initial_message=text("Run two commands."))
    await reached(client, name, "waiting_for_confirmation")
    assert (await client.get(f"{PATH}/{name}")).json()["confirmation_policy"] == policy
    reply = f"{PATH}/{name}/events/respond_to_confirmation"
    first = len(kinds(await events_of(client, name, kind="ActionEvent")))
    assert (await client.post(reply, json={"accept": True})).status_code == 200

    async def asks_again() -> bool:
        found = len(kinds(await events_of(client, name, kind="ActionEvent")))
        return found > first and await status_of(client, name) == "waiting_for_confirmation"

    await until(asks_again, limit=LIMIT_SECONDS, what="the second question")
    assert (await client.post(reply, json={"accept": False, "reason": "not two"})).status_code == 200
    never = {"policy": {"kind": "NeverConfirm"}}
    assert (await client.post(f"{PATH}/{name}/confirmation_policy", json=never)).status_code == 200

    async def rejected() -> bool:
        return "UserRejectObservation" in kinds(await events_of(client, name))

    await until(rejected, limit=LIMIT_SECONDS, what="the rejection")
    if await status_of(client, name) == "waiting_for_confirmation":  # the finish, asked about before the change
        await client.post(reply, json={"accept": True})
    await reached(client, name, "finished")


async def test_running_agent_is_interrupted_and_continued(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", bash("sleep 1000"), finish("Over."))
    name = await created(client, model, initial_message=text("Wait."))

    async def runs() -> bool:
        return "ActionEvent" in kinds(await events_of(client, name))

    await until(runs, limit=LIMIT_SECONDS, what="the command")
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 409
    assert (await client.post(f"{PATH}/{name}/interrupt")).status_code == 200
    await reached(client, name, "paused")
    assert (await client.post(f"{PATH}/{name}/pause")).status_code == 200, "it is paused already"
    assert (await client.post(f"{PATH}/{name}/run")).status_code == 200
    await reached(client, name, "finished")
    assert (await client.delete(f"{PATH}/{name}")).status_code == 200
    assert (await client.get(f"{PATH}/{name}")).status_code == 404


async def test_fork_waits_and_has_no_costs_of_its_origin(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    name = await created(client, script(tmp_path / "m.json", finish("Over.")), initial_message=text("Finish."))
    await reached(client, name, "finished")
    first = (await events_of(client, name, kind="MessageEvent"))[0]
    chosen = str(uuid4())
    asked = {"id": chosen, "title": "Again", "from_event_id": first["id"], "tags": {"try": "2"}}
    answer = await client.post(f"{PATH}/{name}/fork", json=asked)
    assert answer.status_code == 201, answer.text
    fork = answer.json()
    assert (fork["id"], fork["title"], fork["tags"]) == (chosen, "Again", {"try": "2"})
    assert (fork["execution_status"], fork["forked_from_conversation_id"]) == ("idle", name)
    usage = fork["stats"]["usage_to_metrics"].get("agent", {})
    assert not usage.get("token_usages")
    assert (await client.post(f"{PATH}/{name}/fork", json=asked)).status_code == 409
    assert (await client.post(f"{PATH}/{name}/fork", json={"from_event_id": "x"})).status_code == 404
    assert (await client.post(f"{PATH}/{chosen}/run")).status_code == 200
    await reached(client, chosen, "finished")


async def test_hook_of_a_stop_refuses_a_finish(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    command = 'read -r event; echo "$event" > event; [ -e done ] && exit 0; echo not yet; exit 2'
    hooks = {"stop": [{"matcher": "*", "hooks": [{"command": command}, {"command": "exit 1"}]}]}
    turns = [bash("true"), finish("Too early."), bash("cat event; touch done"), finish("Over.")]
    model = script(tmp_path / "m.json", *turns)
    name = await created(client, model, hook_config=hooks, initial_message=text("Do it."))
    await reached(client, name, "finished")
    seen = [event["observation"] for event in await events_of(client, name, kind="ObservationEvent")]
    assert [one.get("is_error", False) for one in seen if one["kind"] == "FinishObservation"] == [True, False]
    assert "not yet" in json.dumps(seen)
    assert "Stop" in json.dumps(seen)


async def test_agent_hands_a_task_to_a_definition_of_its_client(
    client: httpx2.AsyncClient, server: Served, tmp_path: Path
) -> None:
    theirs = script(tmp_path / "theirs.json", bash("echo looked"), finish("Nothing is wrong."))
    model = script(tmp_path / "m.json", call("delegate", agent="reviewer", task="Review it."), finish("Over."))
    started = start(model, initial_message=text("Do it."), confirmation_policy={"kind": "NeverConfirm"})
    started["agent"]["tools"] += [{"name": "file_editor"}, {"name": "task_tool_set"}]
    skills = [{"name": name, "content": f"Of {name}."} for name in ("style", "other")]
    started["agent"]["agent_context"] = {"skills": skills, "system_message_suffix": "Be brief."}
    definition = {"name": "reviewer", "description": "Reviews a diff.", "system_prompt": "You are a reviewer."}
    more = {"tools": ["terminal", "browser_tool_set"], "model": theirs, "skills": ["style"], "color": "blue"}
    started["agent_definitions"] = [{**definition, **more, "permission_mode": "never_confirm"}]
    answer = await client.post(PATH, json=started)
    assert answer.status_code == 201, answer.text
    name = answer.json()["id"]
    await reached(client, name, "finished")
    events = await server.client.events(from_uuid(UUID(name)))
    assert "reviewer (Reviews a diff.)" in next(one.content for one in events if isinstance(one, SystemMessageAction))
    (report,) = [one for one in events if isinstance(one, AgentDelegateObservation)]
    assert "Nothing is wrong." in report.content
    created, *rest = await server.client.events(report.conversation_id)
    assert isinstance(created, ConversationCreated)
    agent = created.agent
    assert (agent.enable_cmd, agent.enable_editor, agent.enable_browsing) == (True, False, False)
    assert [skill.name for skill in agent.skills] == ["style"]
    assert agent.system_prompt_suffix == "Be brief.\n\nYou are a reviewer."
    assert not agent.enable_delegation
    assert any(isinstance(one, CmdOutputObservation) and "looked" in one.content for one in rest)


async def test_definition_gives_no_right_that_its_parent_has_not(client: httpx2.AsyncClient, server: Served) -> None:
    started = start("scripted/none", confirmation_policy={"kind": "AlwaysConfirm"})
    started["agent"]["tools"] = [{"name": "task_tool_set"}]
    tools = ["terminal", "file_editor", "browser_tool_set", "task_tool_set", "secret/*"]
    started["agent_definitions"] = [{"name": "a", "tools": tools, "permission_mode": "never_confirm"}]
    answer = await client.post(PATH, json=started)
    assert answer.status_code == 201, answer.text
    created, *_ = await server.client.events(from_uuid(UUID(answer.json()["id"])))
    assert isinstance(created, ConversationCreated)
    agent = created.agent.delegates["a"]
    assert agent.confirmation.mode == "always"
    assert not any((agent.enable_cmd, agent.enable_editor, agent.enable_browsing, agent.enable_delegation))
    assert agent.tools == ()


async def test_definitions_mean_nothing_to_an_agent_without_delegates(client: httpx2.AsyncClient) -> None:
    """The SDK sends all agents that its program has registered, whether the agent can use them or not."""
    unusable = {"name": "a", "max_budget_per_run": 1, "system_prompt": "x" * 16_001}
    answer = await client.post(PATH, json=start("scripted/none", agent_definitions=[unusable]))
    assert answer.status_code == 201, answer.text


async def test_question_is_answered_beside_the_conversation(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    model = script(tmp_path / "m.json", finish("Over."), {"text": "I have finished."})
    name = await created(client, model, initial_message=text("Finish."))
    await reached(client, name, "finished")
    before = await events_of(client, name)
    listed = (await client.get(f"{PATH}/count")).json()
    answer = await client.post(f"{PATH}/{name}/ask_agent", json={"question": "What do you do?"})
    assert (answer.status_code, answer.json()) == (200, {"response": "I have finished."}), answer.text
    assert await events_of(client, name) == before
    assert (await client.get(f"{PATH}/count")).json() == listed


async def test_settings_of_a_conversation_are_changed(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    name = await created(client, script(tmp_path / "m.json", finish("Over.")))
    other = script(tmp_path / "n.json", {"text": "As the other model."})
    requests: list[tuple[str, dict[str, Any]]] = [
        ("secrets", {"secrets": {"TOKEN": "abc-123-def", "OTHER": {"kind": "StaticSecret", "value": "ghi-456-jkl"}}}),
        ("security_analyzer", {"security_analyzer": {"kind": "LLMSecurityAnalyzer"}}),
        ("confirmation_policy", {"policy": {"kind": "ConfirmRisky", "threshold": "LOW"}}),
        ("switch_llm", {"llm": {"model": other, "api_key": "sk-mine", "base_url": "http://mine"}}),
        ("condense", {}),
    ]
    for route, body in requests:
        answer = await client.post(f"{PATH}/{name}/{route}", json=body)
        assert (answer.status_code, answer.json()) == (200, {"success": True}), (route, answer.text)
    assert (await client.patch(f"{PATH}/{name}", json={"title": "Named", "tags": {"a": "b"}})).status_code == 200
    info = (await client.get(f"{PATH}/{name}")).json()
    assert (info["title"], info["tags"], info["agent"]["llm"]["model"]) == ("Named", {"a": "b"}, other)
    assert info["confirmation_policy"]["threshold"] == "LOW"
    assert "sk-mine" not in json.dumps(info)
    assert "abc-123" not in json.dumps(await events_of(client, name))
    listed = (await client.get(f"{PATH}/search", params={"limit": 1})).json()["items"][0]
    assert (listed["id"], listed["title"], listed["execution_status"]) == (name, "Named", "idle")


async def test_conversations_are_listed_counted_and_got_together(client: httpx2.AsyncClient, server: Served) -> None:
    async with keyed(server, await server.token("lists")) as client:
        names = [await created(client, "scripted/none") for _ in range(3)]
        pages: list[str] = []
        page: dict[str, Any] = {"next_page_id": ""}
        while page["next_page_id"] is not None:
            query = {"limit": 2, **({"page_id": page["next_page_id"]} if page["next_page_id"] else {})}
            page = (await client.get(f"{PATH}/search", params=query)).json()
            pages += [item["id"] for item in page["items"]]
        assert pages == names[::-1]
        oldest = (await client.get(f"{PATH}/search", params={"sort_order": "CREATED_AT"})).json()["items"]
        assert [item["id"] for item in oldest] == names
        for status, number in (("idle", 3), ("paused", 0), ("finished", 0), (None, 3)):
            query = {} if status is None else {"status": status}
            assert (await client.get(f"{PATH}/count", params=query)).json() == number, status
        unknown = str(uuid4())
        both = (await client.get(PATH, params={"ids": [names[0], unknown]})).json()
        assert (both[0]["id"], both[1]) == (names[0], None)


async def test_conversation_created_otherwise_is_reached_by_its_uuid(
    client: httpx2.AsyncClient, server: Served
) -> None:
    for chosen in ("my-task_01", "a-conversation-with-a-long-name-of-its-user"):
        own = await server.client.submit("do it", conversation_id=chosen, model="scripted/none", tenant="acme")
        listed = (await client.get(f"{PATH}/search", params={"limit": 1})).json()["items"][0]["id"]
        assert (await client.get(f"{PATH}/{listed}")).json()["id"] == listed
        assert (await client.get(f"{PATH}/{own}")).json()["id"] == listed


async def test_own_uuid_is_kept_and_creates_one_conversation(client: httpx2.AsyncClient, server: Served) -> None:
    chosen = str(uuid4())
    first = await client.post(PATH, json=start("scripted/none", conversation_id=chosen))
    again = await client.post(PATH, json=start("scripted/none", conversation_id=chosen))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"] == chosen
    async with keyed(server, await server.token("other")) as other:
        taken = await other.post(PATH, json=start("scripted/none", conversation_id=chosen))
        assert taken.status_code == 409


def defining(*definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a request of an agent that may hand tasks to others, with definitions of them."""
    skills = [{"name": "long", "content": "x" * 50_000}]
    tools = [{"name": "task"}, {"name": "stock"}]
    agent = {"llm": {"model": "scripted/none"}, "tools": tools, "agent_context": {"skills": skills}}
    return {"agent": agent, "agent_definitions": [{"name": "a", **definition} for definition in definitions]}


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"hook_config": {"pre_tool_use": [{"matcher": "*", "hooks": []}]}}, 501, "hook_config"),
        ({"plugins": [{"source": "x"}]}, 501, "plugins"),
        ({"agent_definitions": [{"name": "a"}] * 33}, 422, "agent_definitions"),
        (defining({"hooks": {"stop": [{"hooks": []}]}}), 501, "hooks"),
        (defining({"max_budget_per_run": 1}), 501, "max_budget_per_run"),
        (defining({"name": "a b"}), 422, "agent_definitions"),
        (defining({"permission_mode": "mine"}), 422, "permission_mode"),
        (defining({"system_prompt": "x" * 16_001}), 422, "16,000"),
        (defining({"model": "unknown/model"}), 422, "not offered"),
        (defining({"skills": ["other"]}), 422, "no skill 'other'"),
        (defining({"tools": ["stock"]}), 501, "the tool 'stock'"),
        (defining({}, {}), 422, "same name"),
        (defining(*({"name": f"a{n}", "skills": ["long"]} for n in range(32))), 422, "1,048,576"),
        ({"client_tools": [{"name": "x"}]}, 501, "client_tools"),
        ({"agent_profile_id": "019a4b0f-c3a1-4c1f-9c51-2c3d4e5f6071"}, 501, "agent_profile_id"),
        ({"secrets": {"A": {"kind": "LookupSecret", "url": "http://x"}}}, 501, "secrets"),
        ({"confirmation_policy": {"kind": "Mine"}}, 501, "confirmation policy"),
        ({"agent": None}, 422, "agent"),
        ({"tags": {"a": "two words"}}, 422, "label"),
        ({"initial_message": {"role": "assistant", "content": [{"type": "text", "text": "x"}]}}, 422, "role"),
        ({"agent": {"llm": {"model": "scripted/none"}, "mcp_config": {"a": {"url": "http://x"}}}}, 501, "mcp_config"),
        ({"agent": {"kind": "Other", "llm": {"model": "scripted/none"}}}, 501, "kind"),
        ({"agent": {"llm": {"model": "unknown/model"}}}, 422, "not offered"),
        ({"agent": {"agent_context": {"skills": [{"name": "a", "trigger": {"keywords": 5}}]}}}, 422, "keywords"),
        ({"agent": {"kind": "ACPAgent", "acp_command": ["a\nb"]}}, 422, "command"),
    ],
)
async def test_impossible_request_is_refused_by_its_field(
    client: httpx2.AsyncClient, more: dict[str, Any], status: int, words: str
) -> None:
    answer = await client.post(PATH, json=start("scripted/none") | more)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_actions_without_meaning_are_refused_with_a_sentence(client: httpx2.AsyncClient) -> None:
    name = await created(client, "scripted/none")
    for action in ("navigate", "goal", "load_plugin", "children", "runtime/reprovision"):
        answer = await client.post(f"{PATH}/{name}/{action}", json={})
        assert (answer.status_code, answer.json()["code"]) == (501, "not_on_a_cluster"), action
    assert (await client.post(f"{PATH}/{name}/nothing", json={})).status_code == 404


async def test_every_route_hides_conversations_of_other_tenants(client: httpx2.AsyncClient, server: Served) -> None:
    name = await created(client, "scripted/none")
    event = (await events_of(client, name))[0]["id"]
    bodies: dict[str, Any] = {
        "/secrets": {"secrets": {"A": "b"}},
        "/confirmation_policy": {"policy": {"kind": "NeverConfirm"}},
        "/security_analyzer": {"security_analyzer": None},
        "/switch_llm": {"llm": {"model": "scripted/none"}},
        "/switch_profile": {"profile_name": "scripted/none"},
        "/events": text("hello"),
        "/events/respond_to_confirmation": {"accept": True},
        "/ask_agent": {"question": "who?"},
    }
    tried = 0
    async with keyed(server, await server.token("spies")) as spy:
        for router in OPENHANDS_ROUTERS:
            for route in router.routes:
                path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or ()
                if "{conversation_id}" not in path or not methods:
                    continue
                where = path.replace("{conversation_id}", name).replace("{event_id}", event)
                where = where.replace("{action:path}", "goal")
                query = {"event_ids": event} if path.endswith("/events") else {}
                body = bodies.get(path.partition("{conversation_id}")[2], {})
                for method in methods:
                    has_body = method in ("POST", "PATCH", "PUT")
                    answer = await spy.request(method, where, params=query, json=body if has_body else None)
                    assert answer.status_code == 404, (method, path, answer.text)
                    tried += 1
        assert (await spy.get(PATH, params={"ids": [name]})).json() == [None]
        assert name not in (await spy.get(f"{PATH}/search")).text
    assert tried > 15
    assert await status_of(client, name) == "idle"


async def test_run_needs_the_operate_scope_and_info_the_read_scope(client: httpx2.AsyncClient, server: Served) -> None:
    chosen = str(uuid4())
    assert (await client.post(PATH, json=start("scripted/none", conversation_id=chosen))).status_code == 201
    async with keyed(server, await server.token(scopes=[Scope.READ, Scope.WRITE])) as writer:
        assert (await writer.post(f"{PATH}/{chosen}/run")).status_code == 403
    async with keyed(server, await server.token(scopes=[Scope.WRITE])) as blind:
        for path, body in ((PATH, start("scripted/none", conversation_id=chosen)), (f"{PATH}/{chosen}/fork", {})):
            answer = await blind.post(path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_pages_of_a_status_leave_none_out(server: Served) -> None:
    async with keyed(server, await server.token("pages")) as client:
        names = [await created(client, "scripted/none") for _ in range(5)]
        for order in ("CREATED_AT_DESC", "CREATED_AT"):
            found: list[str] = []
            query: dict[str, Any] = {"limit": 2, "status": "idle", "sort_order": order}
            while "page_id" not in query or query["page_id"] is not None:
                page = (await client.get(f"{PATH}/search", params=query)).json()
                found += [item["id"] for item in page["items"]]
                query["page_id"] = page["next_page_id"]
            assert found == (names[::-1] if order == "CREATED_AT_DESC" else names)


async def test_key_without_scope_changes_nothing(client: httpx2.AsyncClient, server: Served) -> None:
    name = await created(client, "scripted/none")
    async with keyed(server, await server.token(scopes=[Scope.READ])) as reader:
        assert (await reader.get(f"{PATH}/{name}")).status_code == 200
        assert (await reader.post(f"{PATH}/{name}/events", json=text("hello"))).status_code == 403
        assert (await reader.post(f"{PATH}/{name}/pause")).status_code == 403
        assert (await reader.post(PATH, json=start("scripted/none"))).status_code == 403
    async with server.as_() as nobody:
        assert (await nobody.get(f"{PATH}/{name}")).status_code == 401


def socket_url(server: Served, name: str, query: str = "") -> str:
    return f"ws://127.0.0.1:{server.port}/sockets/events/{name}{query}"


async def received(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(unhurried(LIMIT_SECONDS)):
        found: dict[str, Any] = json.loads(await socket.recv())
        return found


async def until_full_state(socket: ClientConnection) -> list[dict[str, Any]]:
    found = [await received(socket)]
    while found[-1].get("key") != "full_state":
        found.append(await received(socket))
    return found


async def test_socket_sends_state_then_each_event_once(server: Served, tmp_path: Path) -> None:
    token = await server.token()
    async with keyed(server, token) as client:
        name = await created(client, script(tmp_path / "m.json", bash("echo hello"), finish("Over.")))
        async with connect(socket_url(server, name)) as socket:
            await socket.send(json.dumps({"type": "auth", "session_api_key": token}))
            first = await received(socket)
            assert (first["key"], first["value"]["execution_status"]) == ("full_state", "idle")
            await client.post(f"{PATH}/{name}/events", json=text("Do it."))
            await client.post(f"{PATH}/{name}/run")
            live = await until_full_state(socket)
            assert live[-1]["value"]["execution_status"] == "finished"
        past = await events_of(client, name)
        assert [event["id"] for event in live[:-1]] == [event["id"] for event in past[1:]]
        async with connect(socket_url(server, name, f"?session_api_key={token}&resend_mode=all")) as socket:
            await until_full_state(socket)
            assert [await received(socket) for _ in past] == past
        since = past[3]["timestamp"]
        query = f"?resend_mode=since&after_timestamp={since}"
        headers = {"X-Session-API-Key": token}
        async with connect(socket_url(server, name, query), additional_headers=headers) as socket:
            await until_full_state(socket)
            wanted = [event for event in past if event["timestamp"] >= since]
            assert [await received(socket) for _ in wanted] == wanted
            await socket.send(json.dumps(text("")))
            assert (await received(socket))["kind"] == "ServerErrorEvent"
            await socket.send("[")
            assert (await received(socket))["code"] == "malformed_json"


@pytest.mark.parametrize("first", ['{"type": "auth", "session_api_key": "dh_x"}', "{", "{}", '{"type": "auth"}'])
async def test_socket_with_wrong_key_is_closed_for_good(client: httpx2.AsyncClient, server: Served, first: str) -> None:
    name = await created(client, "scripted/none")
    async with connect(socket_url(server, name)) as socket:
        await socket.send(first)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4001


@pytest.mark.parametrize("message", [text("Do it."), {"role": "user", "content": "Do it."}], ids=["parts", "text"])
async def test_message_over_the_socket_starts_the_agent(
    server: Served, tmp_path: Path, message: dict[str, Any]
) -> None:
    token = await server.token()
    async with keyed(server, token) as client:
        name = await created(client, script(tmp_path / "m.json", finish("Over.")))
        async with connect(socket_url(server, name), additional_headers={"X-Session-API-Key": token}) as socket:
            await until_full_state(socket)
            await socket.send(json.dumps(message))
            assert (await until_full_state(socket))[-1]["value"]["execution_status"] == "finished"
            await ApiKeys(server.client.store).revoke(token.split("_")[1])
            await socket.send(json.dumps(text("Do it again.")))
            refused = await received(socket)
            assert (refused["kind"], refused["code"]) == ("ServerErrorEvent", "key_revoked")


async def test_server_without_the_switch_has_none_of_it(tmp_path: Path) -> None:
    async with served(tmp_path / "log", environment_with(tmp_path)) as plain:
        token = await plain.token()
        async with plain.as_(token) as client:
            assert (await client.get(f"{PATH}/search")).status_code == 404
        async with keyed(plain, token) as client:
            assert (await client.get(f"{PATH}/search")).status_code == 401, "the header is not read"


async def test_socket_of_another_tenant_is_closed_as_unknown(client: httpx2.AsyncClient, server: Served) -> None:
    name = await created(client, "scripted/none")
    async with connect(socket_url(server, name)) as socket:
        await socket.send(json.dumps({"type": "auth", "session_api_key": await server.token("spies")}))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4004


async def test_named_directory_is_used_if_tool_workers_take_it(
    client: httpx2.AsyncClient, server: Served, folder: Path, tmp_path: Path
) -> None:
    for place, is_served in ((folder / "projects" / "one", True), (tmp_path / "two", False)):
        place.mkdir()
        model = script(tmp_path / "m.json", bash("pwd"), finish("Over."))
        work = {"working_dir": str(place)}
        name = await created(client, model, workspace=work, initial_message=text("Where are you?"))
        await reached(client, name, "finished")
        seen = json.dumps(await events_of(client, name, kind="ObservationEvent"))
        assert (str(place) in seen) is is_served
        assert (await server.client.row(from_uuid(UUID(name)))).tenant == "acme"
