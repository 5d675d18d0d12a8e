"""The endpoint for other agents: the Agent2Agent protocol (A2A 1.0), as JSON-RPC at `/a2a`.

Holds: no state between requests, so any server of a cluster can answer; a message has one effect, however often it is
sent; each method needs the same scope as the equivalent route.
Does not: list tasks; `GET /conversations` does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import JSONResponse, Response

from broker.runtime import BrokerSettings, DeckhandsError, UnknownConversation, UsageError
from deckhands.client import to_conversation_id
from deckhands.operations import (
    STATE_CHANGED,
    UnknownWebhook,
    Webhook,
    WebhookRepository,
    parse_networks,
    resolve_address,
)
from deckhands.server.auth.api_keys import AccessDenied, Scope
from deckhands.server.conversations import result_of, submit_task
from deckhands.server.dependencies import GatewayOf, Reader, scoped_key
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.live import SseResponse, wait_until_settled
from deckhands.server.models import ID, ConversationResult
from deckhands.server.protocols.a2a_messages import (
    EXAMPLE,
    PushConfig,
    SendParams,
    TaskParams,
    artifact_of,
    history_of,
    message_json,
    names_of,
    status_json,
    task_json,
)
from deckhands.server.protocols.mcp_route import RpcRequest
from deckhands.server.protocols.progress import describe
from deckhands.server.runs import DEFAULT_SECONDS
from deckhands.server.streams import EventStream, Item, reserve_stream

routes = APIRouter(tags=["a2a"])
CARD_PATH = "/.well-known/agent-card.json"
VERSION = "1.0"
INVALID, UNKNOWN_METHOD, FAILED = -32602, -32601, -32603
NO_TASK, UNSUPPORTED, NOT_CANCELABLE = -32001, -32004, -32002
UNSUPPORTED_METHODS = frozenset({"ListTasks", "GetExtendedAgentCard"})
CARD_EXAMPLE = {"name": "Deckhands", "skills": [{"id": "task", "name": "Work on a task"}]}
STATUS_EXAMPLE = {**names_of(ID, "id"), "status": {"state": "TASK_STATE_SUBMITTED"}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "application/json": {"example": {"jsonrpc": "2.0", "id": 1, "result": {"task": STATUS_EXAMPLE}}},
            "text/event-stream": {"example": 'data: {"jsonrpc":"2.0","id":1,"result":{"statusUpdate":{}}}\n\n'},
        }
    }
}


class A2ARequest(RpcRequest):
    """An A2A request; `params` are those of its method, see docs/serving.md."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": EXAMPLE}}]
        }
    )


@routes.get(
    CARD_PATH,
    summary="Show the agent card (A2A)",
    responses={200: {"content": {"application/json": {"example": CARD_EXAMPLE}}}},
)
async def card(request: Request) -> dict[str, Any]:
    """Return the agent card: the abilities of the agents and how to use them. Needs no key."""
    return {
        "name": "Deckhands",
        "description": "Agents that work on tasks by themselves, with a shell and files.",
        "version": VERSION,
        "supportedInterfaces": [
            {
                "url": f"{str(request.base_url).rstrip('/')}/a2a",
                "protocolBinding": "JSONRPC",
                "protocolVersion": VERSION,
            }
        ],
        "capabilities": {"streaming": True, "pushNotifications": True},
        "securitySchemes": {"key": {"httpAuthSecurityScheme": {"scheme": "bearer", "description": "an API key"}}},
        "securityRequirements": [{"schemes": {"key": {"list": []}}}],
        "defaultInputModes": ["text/plain", "application/json"],
        "defaultOutputModes": ["text/plain", "application/json"],
        "skills": [
            {
                "id": "task",
                "name": "Work on a task",
                "description": "Works on a task in a workspace. `metadata` has further fields of the task, such as "
                "agent, model, workspace, limits and labels.",
                "tags": ["code", "shell", "files"],
                "examples": ["List the files"],
            }
        ],
    }


@routes.post("/a2a", response_class=Response, responses=ANSWERS, summary="Agents for other agents (A2A, JSON-RPC)")
async def call(gateway: GatewayOf, principal: Reader, request: A2ARequest, received: Request) -> Response:
    """Answer an A2A request. Each method needs further scopes; see docs/serving.md."""
    if request.method in UNSUPPORTED_METHODS:
        return _error_response(request, UNSUPPORTED, "Not offered; GET /conversations lists conversations.")
    known = _Methods(gateway, principal, received)
    try:
        if request.method in ("SendStreamingMessage", "SubscribeToTask"):
            return await known.stream(request)
        if (method := known.named.get(request.method)) is None:
            return _error_response(request, UNKNOWN_METHOD, "There is no such method.")
        return JSONResponse({"jsonrpc": "2.0", "id": request.id, "result": await method(request.params or {})})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
        return _error_response(request, INVALID, f"The params cannot be used: {wrong}.")
    except AccessDenied:
        raise
    except DeckhandsError as error:
        return _error_response(request, _code_of(error), f"{error.message} {error.remedy}".strip(), error)


class _Methods:
    """The methods of the protocol, for one principal."""

    def __init__(self, gateway: Gateway, principal: Principal, received: Request) -> None:
        self._gateway, self._principal, self._received = gateway, principal, received
        self.named: dict[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any] | None]]] = {
            "SendMessage": self._send,
            "GetTask": self._get,
            "CancelTask": self._cancel,
            "CreateTaskPushNotificationConfig": self._add_push,
            "GetTaskPushNotificationConfig": self._get_push,
            "ListTaskPushNotificationConfigs": self._list_push,
            "DeleteTaskPushNotificationConfig": self._remove_push,
        }
        self._book = WebhookRepository(gateway.store, gateway.client.secrets)

    async def stream(self, request: A2ARequest) -> Response:
        """Follow a task until it has settled: the task of a message, or an existing one."""
        reserve_stream(self._gateway, self._principal)
        if request.method == "SubscribeToTask":
            conversation_id = await self._visible(TaskParams.model_validate(request.params or {}).id)
            found = await self._result(conversation_id)
            after = int(found.summary["last_event_id"])
            if found.is_settled:
                raise UsageError("The task has settled, so there is nothing to follow.", remedy="Use GetTask.")
        else:
            conversation_id, after = await self._start_or_continue(SendParams.model_validate(request.params or {}))
            found = await self._result(conversation_id)
        events = EventStream(self._gateway, self._principal, conversation_id, after=after, until_settled=True)
        updates = _Updates(request, conversation_id)
        return SseResponse(self._gateway, events, head=updates.first(found), written=updates.of)

    async def _result(self, conversation_id: str) -> ConversationResult:
        return await result_of(self._gateway.client, conversation_id)

    async def _visible(self, conversation_id: str) -> str:
        return await self._gateway.require_visible(self._principal, conversation_id)

    async def _start_or_continue(self, params: SendParams) -> tuple[str, int]:
        """Create or continue a task; returns its id, and the id of the last event before that."""
        self._principal.require(Scope.WRITE)
        gateway = self._gateway
        message = params.message
        after = 0
        own = scoped_key(self._principal, f"a2a:{message.message_id}")
        push = params.configuration.task_push_notification_config
        if message.conversation_id:
            conversation_id = await self._visible(message.conversation_id)
            after = int((await self._result(conversation_id)).summary["last_event_id"])
            if push is not None:
                await self._push(conversation_id, push)
            client = gateway.client_for(self._principal, "message", "", key=own)
            await client.send_message(conversation_id, message.text())
            return conversation_id, after
        task = params.task()
        if push is None:
            return await submit_task(gateway, self._principal, task, own), after
        # Before the conversation starts: an agent may finish before the push is stored, and would then not be notified.
        conversation_id = to_conversation_id(None, own)
        known = await self._hooks(conversation_id)
        hook = await self._push(conversation_id, push, tenant=self._principal.tenant)
        try:
            return await submit_task(gateway, self._principal, task, own), after
        except DeckhandsError:
            try:
                await gateway.client.row(conversation_id)
            except UnknownConversation:
                if hook not in known:  # a concurrent request with the same message may create it
                    await self._book.remove(hook.id)
            raise

    async def _send(self, given: Mapping[str, Any]) -> dict[str, Any]:
        params = SendParams.model_validate(given)
        if not params.configuration.return_immediately:
            reserve_stream(self._gateway, self._principal)
        conversation_id, _ = await self._start_or_continue(params)
        if not params.configuration.return_immediately:
            await wait_until_settled(self._gateway, self._received, conversation_id, timeout_seconds=DEFAULT_SECONDS)
        return {"task": await self._task(conversation_id, params.configuration.history_length)}

    async def _task(self, conversation_id: str, history_length: int = 0) -> dict[str, Any]:
        found = await self._result(conversation_id)
        events = await self._gateway.client.events(conversation_id, is_lenient=True) if history_length else []
        return task_json(found, history_of(conversation_id, events, history_length))

    async def _get(self, given: Mapping[str, Any]) -> dict[str, Any]:
        params = TaskParams.model_validate(given)
        return await self._task(await self._visible(params.id), params.history_length)

    async def _cancel(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._principal.require(Scope.OPERATE)
        conversation_id = await self._visible(TaskParams.model_validate(given).id)
        if (await self._result(conversation_id)).summary["state"] in ("finished", "rejected", "error", "stopped"):
            raise _NotCancelable("The task is over.")
        await self._gateway.client_for(self._principal, "cancel", "asked for by A2A").cancel(conversation_id)
        return await self._task(conversation_id)

    async def _push(self, conversation_id: str, config: PushConfig, *, tenant: str = "") -> Webhook:
        """Store a push configuration for a conversation; without a tenant, the conversation must exist."""
        self._principal.require(Scope.OPERATE)
        if not config.url:
            raise UsageError("url: a push notification needs an address.", remedy="Send one.")
        await resolve_address(config.url, parse_networks(BrokerSettings.from_env().webhook_private))
        await self._gateway.record(self._principal, "webhook.add", config.url[:200], "asked for by A2A")
        tenant = tenant or await self._gateway.tenant_of(conversation_id) or self._principal.tenant
        known = await self._hooks(conversation_id)
        same = next((hook for hook in known if hook.url == config.url), None)
        if same is not None and self._book.load_token(same) == config.token:
            return same
        events = (STATE_CHANGED,)
        hook, _ = await self._book.add(tenant, config.url, events, conversation_id, form="a2a", token=config.token)
        return hook

    async def _hooks(self, conversation_id: str) -> list[Webhook]:
        found = await self._book.all()
        return [hook for hook in found if hook.form == "a2a" and hook.conversation_id == conversation_id]

    async def _add_push(self, given: Mapping[str, Any]) -> dict[str, Any]:
        config = PushConfig.model_validate(given)
        self._principal.require(Scope.OPERATE)
        return _config(await self._push(await self._visible(config.task_id), config))

    async def _find_push(self, given: Mapping[str, Any]) -> Webhook:
        asked = PushConfig.model_validate(given)
        for hook in await self._hooks(await self._visible(asked.task_id)):
            if hook.id == asked.id:
                return hook
        raise UnknownWebhook("The task has no such push notification.")

    async def _get_push(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return _config(await self._find_push(given))

    async def _list_push(self, given: Mapping[str, Any]) -> dict[str, Any]:
        asked = PushConfig.model_validate(given)
        return {"configs": [_config(hook) for hook in await self._hooks(await self._visible(asked.task_id))]}

    async def _remove_push(self, given: Mapping[str, Any]) -> None:
        self._principal.require(Scope.OPERATE)
        hook = await self._find_push(given)
        await self._gateway.record(self._principal, "webhook.remove", hook.id, "asked for by A2A")
        await self._book.remove(hook.id)


class _NotCancelable(UsageError):
    """The task is over."""


class _Updates:
    """The items of a stream, as updates of a task."""

    def __init__(self, request: A2ARequest, conversation_id: str) -> None:
        self._request, self._conversation_id = request, conversation_id

    def first(self, found: ConversationResult) -> bytes:
        """Return the task, the first message of the stream."""
        return self._data({"result": {"task": task_json(found)}})

    def of(self, item: Item) -> bytes:
        """Convert an item to server-sent events."""
        if item.kind == "problem":
            why = f"{item.content['detail']} {item.content['remedy']}".strip()
            return self._data({"error": {"code": FAILED, "message": why, "data": [item.content]}})
        if item.kind == "event" and (said := describe(item.content)):
            status = {"state": "TASK_STATE_WORKING", "message": message_json(self._conversation_id, item.id, said)}
            return self._update("statusUpdate", {"status": status})
        if item.kind != "end":
            return b""
        summary = item.content["summary"]
        result = ConversationResult(conversation_id=self._conversation_id, is_settled=True, summary=summary)
        artifact = artifact_of(summary)
        found = self._update("artifactUpdate", {"artifact": artifact, "lastChunk": True}) if artifact else b""
        return found + self._update("statusUpdate", {"status": status_json(result)})

    def _update(self, kind: str, what: dict[str, Any]) -> bytes:
        return self._data({"result": {kind: names_of(self._conversation_id) | what}})

    def _data(self, content: dict[str, Any]) -> bytes:
        text = json.dumps({"jsonrpc": "2.0", "id": self._request.id, **content}, ensure_ascii=True)
        return f"data: {text}\n\n".encode()


def _config(hook: Webhook) -> dict[str, Any]:
    """Return a push configuration for its client, without the token."""
    return {"taskId": hook.conversation_id, "id": hook.id, "url": hook.url}


def _code_of(error: DeckhandsError) -> int:
    if isinstance(error, UnknownConversation | UnknownWebhook):
        return NO_TASK
    if isinstance(error, _NotCancelable):
        return NOT_CANCELABLE
    return INVALID if isinstance(error, UsageError) else FAILED


def _error_response(request: BaseModel, code: int, message: str, error: DeckhandsError | None = None) -> Response:
    failure: dict[str, Any] = {"code": code, "message": message}
    if error is not None:
        failure["data"] = [{"code": error.code, "retryable": error.retryable}]
    return JSONResponse({"jsonrpc": "2.0", "id": getattr(request, "id", None), "error": failure})
