"""Shared parts of a server: its options, its clients of the store, principals, and access checks.

Holds: a conversation of another tenant appears not to exist, with the same error; a key for all tenants sees all. The
log of a conversation names the author of each action on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

from broker.contract import OperatorActed
from broker.runtime import UnknownConversation, is_conversation_id
from broker.store import Store, decode_fields
from broker.tools import McpServerSpec
from deckhands.client import Client
from deckhands.operations import Exposition, History
from deckhands.server.auth.api_keys import EVERY_TENANT, AccessDenied, ApiKey, ApiKeys, Scope
from deckhands.server.auth.idempotency import IdempotentRequests
from deckhands.server.auth.operations import Operations
from deckhands.server.auth.tickets import Tickets
from deckhands.server.auth.uploads import Uploads
from deckhands.server.shares import Held, Turns

DEFAULT_PORT = 8_900
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

Refusal = tuple[str, str]
"""A status, and why the request was refused before it reached the application; empty if it reached it."""


REQUESTS_AT_ONCE = 4
"""How many short requests of a tenant are worked on at the same time; each takes milliseconds."""
REQUESTS_WAITING = 256
"""How many more of them may wait; the server refuses the others with 429."""

SEARCHES_AT_ONCE = 2
"""How many searches work at the same time, at most one of each tenant."""
SEARCHES_WAITING = 8
"""How many more searches of a tenant may wait."""

PROMPTS_AT_ONCE, PROMPTS_PERCENT = 4, 50
"""How many prompts are made at the same time, and how many of a hundred for one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of a server.

    Attributes:
        certificate, certificate_key: files of the TLS certificate; None for no TLS.
        proxies: addresses of proxies whose `X-Forwarded-…` headers are trusted.
        origins: origins of other sites whose pages may call the server.
        head_seconds: time limit for the head of a request; `body_seconds` limits its body, unless it is a file.
        slow_seconds: how long a reader of a stream may read nothing although data is available.
        quiet_seconds: after this time without an event, a stream sends a keep-alive and checks its key again.
        max_streams: how many streams and waiting requests may be open at once.
        max_transfers: how many files may be on their way at once, up or down.
        max_connections: how many connections may be open at once.
        tenant_percent: the percentage of all streams, transfers and connections that one tenant may use.
        mcp_servers: the MCP servers of the operator, of which some need a login.
        openhands: whether the server also offers the API of OpenHands' agent server.
        terminals: whether operators may open terminals in workspaces.
        terminal_idle_seconds: how long a terminal stays open without a key.
        needs_match: whether changes need `If-Match`, so that no client overwrites changes it has not seen.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    certificate: Path | None = None
    certificate_key: Path | None = None
    proxies: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    slow_seconds: float = 30.0
    quiet_seconds: float = 15.0
    max_streams: int = 5_000
    max_transfers: int = 64
    max_connections: int = 10_000
    tenant_percent: int = 50
    needs_match: bool = False
    openhands: bool = False
    terminals: bool = False
    terminal_idle_seconds: float = 1_800.0
    mcp_servers: tuple[McpServerSpec, ...] = ()

    @property
    def is_loopback(self) -> bool:
        """Whether it listens on a loopback address only."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of the API key of a request."""

    key: ApiKey

    @property
    def tenant(self) -> str:
        """The tenant whose conversations it may see; `*` for all tenants."""
        return self.key.tenant

    @property
    def is_for_all_tenants(self) -> bool:
        """Whether it may see the conversations of all tenants."""
        return self.tenant == EVERY_TENANT

    @property
    def author(self) -> str:
        """Its name in logs."""
        return f"key {self.key.id} ({self.key.name})"

    def require(self, scope: Scope) -> None:
        """Check for a scope.

        Raises:
            Refused: the key lacks it.
        """
        if scope not in self.key.scopes:
            has = ", ".join(sorted(self.key.scopes))
            raise AccessDenied(
                "forbidden", f"This needs the scope {scope}; the key has {has}.", remedy="Use another key."
            )

    def require_all(self) -> None:
        """Check for a key for all tenants.

        Raises:
            Refused: the key is for one tenant.
        """
        if not self.is_for_all_tenants:
            raise AccessDenied("other_tenant", "This needs a key for all tenants.", remedy="Ask an operator.")


@dataclass(frozen=True)
class Gateway:
    """The state of one server.

    Attributes:
        client: for requests; it does not wait long for the store.
        follower: for streams; it waits until the store is back.
        exposition: the metrics of the cluster and of this server.
        history: the recent figures of the cluster.
        streams: the open streams and long-polling requests, with their keys.
        turns: those of short requests.
        searches: the turns of a tenant's searches; `search_slots` are for all tenants.
        prompts: the prompts that are made at the moment, see `prompts`.
        transfers: the files in transfer; `connections` are those with an authenticated request.
        refusals: the number of requests answered with an error, by status and reason.
        is_stopping: set when the server starts to shut down.
    """

    store: Store
    archive: str = ""
    options: ServerOptions = field(default_factory=ServerOptions)
    client: Client = field(init=False)
    follower: Client = field(init=False)
    keys: ApiKeys = field(init=False)
    tickets: Tickets = field(init=False)
    repeated: IdempotentRequests = field(init=False)
    operations: Operations = field(init=False)
    uploads: Uploads = field(init=False)
    exposition: Exposition = field(init=False)
    history: History = field(init=False)
    streams: dict[object, ApiKey] = field(init=False, default_factory=dict)
    prompts: Held = field(init=False, default_factory=lambda: Held("prompts", PROMPTS_AT_ONCE, PROMPTS_PERCENT))
    transfers: Held = field(init=False)
    connections: Held = field(init=False)
    turns: Turns = field(init=False, default_factory=lambda: Turns(REQUESTS_AT_ONCE, REQUESTS_WAITING))
    searches: Turns = field(init=False, default_factory=lambda: Turns(1, SEARCHES_WAITING))
    search_slots: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(SEARCHES_AT_ONCE))
    refusals: Counter[Refusal] = field(init=False, default_factory=Counter)
    is_stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        made = {
            "client": Client(self.store, self.archive),
            "follower": Client(replace(self.store, patience_seconds=None), self.archive),
            "keys": ApiKeys(self.store),
            "tickets": Tickets(self.store),
            "repeated": IdempotentRequests(self.store),
            "operations": Operations(self.store),
            "uploads": Uploads(self.store),
            "transfers": Held("transfers", self.options.max_transfers, self.options.tenant_percent),
            "connections": Held("connections", self.options.max_connections, self.options.tenant_percent),
            "exposition": Exposition(self.store, own=self._figures, sees_inbox=False),
        }
        for name, part in made.items():
            object.__setattr__(self, name, part)
        object.__setattr__(self, "history", History(self.store, self.exposition))

    async def authenticate(self, token: str) -> Principal:
        """Return the principal of a token, and count a request. Raises the errors of `ApiKeys.check` and `count`.

        Args:
            token: the token of a request, or empty.
        """
        if not token:
            raise AccessDenied(
                "unauthorized",
                "The request has no API key.",
                remedy="Send `Authorization: Bearer dh_…`. `deckhands key add` makes a key, also for this machine.",
            )
        return Principal(await self.keys.admit(token))

    async def recheck(self, principal: Principal) -> None:
        """Check that the key of an open stream is still valid. Raises the errors of `authenticate`."""
        await self.keys.check_id(principal.key.id)

    async def require_visible(self, principal: Principal, conversation_id: str) -> str:
        """Return the id of a conversation that the principal may see.

        Raises:
            UnknownConversation: the conversation does not exist, or belongs to another tenant.
        """
        if not is_conversation_id(conversation_id):
            raise UnknownConversation(conversation_id)
        tenant = await self.tenant_of(conversation_id)
        if not principal.is_for_all_tenants and tenant != principal.tenant:
            raise UnknownConversation(conversation_id)
        return conversation_id

    async def tenant_of(self, conversation_id: str) -> str:
        """Return the tenant of a conversation in the store or the archive; empty if it has none.

        Raises:
            UnknownConversation: there is no such conversation.
        """
        key = (await self.store.locate(conversation_id)).meta
        meta = decode_fields(await self.store.call("HGETALL", key))
        if "last_id" in meta:
            return meta.get("tenant", "")
        manifest = await self.client.archive.manifest(conversation_id) if self.client.archive is not None else None
        if manifest is None:
            raise UnknownConversation(conversation_id)
        return manifest.tenant

    def client_for(self, principal: Principal, action: str, reason: str, *, key: str | None = None) -> Client:
        """Return a client that records the author and the reason of its next call in the log.

        Args:
            key: the idempotency key of the request.
        """
        return self.client.as_operator(OperatorActed(author=principal.author, action=action, reason=reason), key=key)

    async def record(self, principal: Principal, action: str, target: str, reason: str) -> None:
        """Record an operation before it is performed."""
        await self.operations.record(principal.author, principal.tenant, action, target, reason)

    def _figures(self) -> dict[str, dict[str, float]]:
        refusals = {f"{status} {reason}": float(count) for (status, reason), count in self.refusals.items()}
        return {"streams": {"": float(len(self.streams))}, "http_refusals": refusals}

    async def aclose(self) -> None:
        """Close the connection to the store."""
        await self.store.aclose()
