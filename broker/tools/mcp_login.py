"""Logins at MCP servers (OAuth 2.1): the tokens in the store, and the flows by the MCP SDK's providers.

Holds: tokens are encrypted in the store with the key of the secrets, each for one server and its address. Requests of a
login go only to the server and to origins that the operator names, even if the server's metadata names others. A worker
never starts a login that needs a user, and never restores a login that was removed. One process at a time refreshes or
replaces a login, so that a refresh token is used once.
Does not: keep the lock of a process that hangs for `LOCK_SECONDS` in the middle of a refresh.
Keys: `deck:{0}:mcp_tokens` (hash: server → its tokens, encrypted; `<server>/lock` → the process that writes them), and
`deck:{0}:mcp_answer:<state>` (the answer that a browser brought to a server, encrypted, for `ANSWER_SECONDS`).
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.runtime import UsageError
from broker.secrets import ONE_KEY, SecretsLocked, decrypt, encrypt
from broker.store import ShardKeys, Store
from broker.tools.custom_tools import ToolFailed
from broker.tools.mcp_config import McpServerSpec, OAuthSpec

if TYPE_CHECKING:
    import httpx2
    from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthToken

CLIENT_NAME = "Deckhands"
LOCK_SECONDS = 60.0
ANSWER_SECONDS = 600
"""How long a login waits for the user."""
LOOK_SECONDS = 0.2
EARLY_SECONDS = 60.0
"""A token is refreshed this long before it expires."""

_STATE = re.compile(r"[A-Za-z0-9_-]{16,128}")

AskPerson = Callable[[str], Awaitable[None]]
ReadAnswer = Callable[[], "Awaitable[AuthorizationCodeResult]"]


class LoginNeeded(ToolFailed):
    """A server needs a user's login."""

    code = "mcp_login_needed"


class _StoredLogin(BaseModel):
    """A login in the store.

    Attributes:
        tokens, client: as the SDK writes them.
        expires_at: Unix time in seconds of the access token's end; None if it is not known.
    """

    model_config = ConfigDict(extra="ignore")

    tokens: dict[str, Any] | None = None
    client: dict[str, Any] | None = None
    expires_at: float | None = None


class McpTokens:
    """The tokens of a store.

    Args:
        key: returns the key of the secrets, 32 bytes, or None while there is none.
    """

    def __init__(self, store: Store, key: Callable[[], bytes | None]) -> None:
        self._store = store
        self._find_key = key
        self._name = ShardKeys(0).mcp_tokens

    async def load(self, server: McpServerSpec) -> _StoredLogin:
        """Return a server's login, as far as it exists.

        Raises:
            SecretsLocked: there is a login, but no key here decrypts it.
        """
        found = await self._store.call("HGET", self._name, server.name)
        if found is None:
            return _StoredLogin()
        try:
            return _StoredLogin.model_validate_json(decrypt(self.require_key(), found, _about(server)))
        except ValidationError:
            return _StoredLogin()
        except ValueError as error:
            text = f"The login at the MCP server {server.name} was encrypted with another key, or for another address."
            raise SecretsLocked(text, remedy=f"Run `deckhands mcp login {server.name}` again. {ONE_KEY}") from error

    async def save(self, server: McpServerSpec, login: _StoredLogin) -> None:
        """Replace a server's login. The caller must hold `lock`. Idempotent."""
        content = login.model_dump_json(exclude_none=True).encode()
        await self._store.call("HSET", self._name, server.name, encrypt(self.require_key(), content, _about(server)))

    async def load_sealed(self, name: str) -> bytes | None:
        """Return a server's login as it is stored, to see whether it has changed."""
        found: bytes | None = await self._store.call("HGET", self._name, name)
        return found

    async def remove(self, name: str) -> bool:
        """Forget a server's login. Returns False if there is none."""
        async with self.lock(name):
            return bool(await self._store.call("HDEL", self._name, name))

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """Hold the lock for writing a server's login. A dead holder's lock expires after `LOCK_SECONDS`."""
        field, own = f"{name}/lock", secrets.token_hex(8).encode()
        loop = asyncio.get_running_loop()
        holder, since = None, loop.time()
        while not await self._store.call("HSETNX", self._name, field, own):
            found = await self._store.call("HGET", self._name, field)
            if found != holder:
                holder, since = found, loop.time()
            elif loop.time() - since > LOCK_SECONDS:
                await self._store.call("HDEL", self._name, field)
                continue
            await asyncio.sleep(LOOK_SECONDS)
        try:
            yield
        finally:
            if await self._store.call("HGET", self._name, field) == own:
                await self._store.call("HDEL", self._name, field)

    async def expect_answer(self, state: str) -> None:
        """Note that a login waits for the answer with this random state, at whichever server the browser arrives."""
        await self._store.call("SET", self._answer(state), self._seal(state, {}), "EX", ANSWER_SECONDS)

    async def store_answer(self, state: str, answer: Mapping[str, str]) -> bool:
        """Store the first answer for the login that waits for it. Returns False if none does."""
        if not _STATE.fullmatch(state) or await self._load_answer(state) != {}:
            return False
        kept = await self._store.call("SET", self._answer(state), self._seal(state, answer), "XX", "EX", ANSWER_SECONDS)
        return kept is not None

    async def wait_for_answer(self, state: str) -> dict[str, str]:
        """Return the answer that a browser brings.

        Raises:
            TimeoutError: it brings none in time.
        """
        async with asyncio.timeout(ANSWER_SECONDS):
            while not (found := await self._load_answer(state)):  # noqa: ASYNC110  (another process may write it)
                await asyncio.sleep(LOOK_SECONDS)
        await self._store.call("DEL", self._answer(state))
        return found

    def _answer(self, state: str) -> str:
        return ShardKeys(0).mcp_answer(state)

    def _seal(self, state: str, answer: Mapping[str, str]) -> bytes:
        return encrypt(self.require_key(), json.dumps(dict(answer)).encode(), f"mcp answer {state}")

    async def _load_answer(self, state: str) -> dict[str, str] | None:
        """Return the stored answer, empty while it is expected; None if it is not."""
        found = await self._store.call("GET", self._answer(state))
        if found is None:
            return None
        try:
            return dict(json.loads(decrypt(self.require_key(), found, f"mcp answer {state}")))
        except ValueError:  # not written with this key
            return None

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._store.clock.now().timestamp()

    def require_key(self) -> bytes:
        """Return the key of the secrets.

        Raises:
            SecretsLocked: there is none here.
        """
        key = self._find_key()
        if key is None:
            raise SecretsLocked("Logins at MCP servers need the key of the secrets.", remedy=ONE_KEY)
        return key


class _Storage:
    """The tokens of one server, in the form that the SDK's providers expect.

    Args:
        new: a new login, which replaces the stored one when it has its tokens; None: the stored one.
    """

    def __init__(
        self, tokens: McpTokens, server: McpServerSpec, oauth: OAuthSpec, redirect_uri: str, new: _StoredLogin | None
    ) -> None:
        self._tokens = tokens
        self._new = new
        self._server = server
        self._oauth = oauth
        self._redirect_uri = redirect_uri
        self.expires_at: float | None = None

    async def get_tokens(self) -> OAuthToken | None:
        from mcp.shared.auth import OAuthToken

        login = await self._load()
        self.expires_at = login.expires_at
        return OAuthToken.model_validate(login.tokens) if login.tokens else None

    async def set_tokens(self, tokens: OAuthToken) -> None:
        login = await self._load()
        if login.tokens is None and self._is_persons():
            raise make_login_needed(self._server)
        login.tokens = tokens.model_dump(mode="json", exclude_none=True)
        login.expires_at = self._tokens.now() + tokens.expires_in - EARLY_SECONDS if tokens.expires_in else None
        self.expires_at = login.expires_at
        if self._new is None:
            await self._tokens.save(self._server, login)
        else:
            async with self._tokens.lock(self._server.name):
                await self._tokens.save(self._server, login)

    def is_due(self, tokens: OAuthToken | None) -> bool:
        """Return whether the tokens must be read or refreshed before the next request."""
        return tokens is None or (self.expires_at is not None and self._tokens.now() >= self.expires_at)

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        from mcp.shared.auth import OAuthClientInformationFull

        login = await self._load()
        if login.client:
            return OAuthClientInformationFull.model_validate(login.client)
        if not self._oauth.client_id:
            return None
        known: dict[str, Any] = {"client_id": self._oauth.client_id, "redirect_uris": [self._redirect_uri]}
        known["token_endpoint_auth_method"] = "client_secret_basic" if self._oauth.client_secret else "none"
        return OAuthClientInformationFull.model_validate(
            known | {"client_secret": self._oauth.client_secret or None, "issuer": self._oauth.issuer}
        )

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        login = await self._load()
        if self._is_persons():
            raise make_login_needed(self._server)
        login.client = client_info.model_dump(mode="json", exclude_none=True)
        if self._new is None:
            await self._tokens.save(self._server, login)

    async def _load(self) -> _StoredLogin:
        return self._new or await self._tokens.load(self._server)

    def _is_persons(self) -> bool:
        """Return whether the record to write may be created only by a user's login."""
        return self._new is None and self._oauth.needs_person


async def require_login(server: McpServerSpec, tokens: McpTokens | None) -> None:
    """Check that a server can be used without a user.

    Raises:
        LoginNeeded: a user has to log in first.
    """
    if server.oauth is None or not server.oauth.needs_person:
        return
    if tokens is None or (await tokens.load(server)).tokens is None:
        raise make_login_needed(server)


def make_login_needed(server: McpServerSpec) -> LoginNeeded:
    """Return the error for a server that needs a login."""
    return LoginNeeded(
        f"The MCP server {server.name} needs a login.", remedy=f"Run `deckhands mcp login {server.name}`."
    )


def make_auth(
    server: McpServerSpec,
    tokens: McpTokens,
    *,
    redirect_uri: str = "http://127.0.0.1/callback",
    ask: AskPerson | None = None,
    read_answer: ReadAnswer | None = None,
) -> httpx2.Auth:
    """Return the authentication of a server with `oauth`, by a provider of the SDK.

    Args:
        ask: shows an address to the user. None: a login that requires a user raises `LoginNeeded`.
        read_answer: returns the answer that the user's browser brings back.
    """
    from mcp.client.auth import OAuthClientProvider
    from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
    from mcp.shared.auth import OAuthClientMetadata

    oauth = server.oauth
    assert oauth is not None, "the server has no login"
    storage = _Storage(tokens, server, oauth, redirect_uri, _StoredLogin() if ask is not None else None)
    if not oauth.needs_person:
        return ClientCredentialsOAuthProvider(
            server.url, storage, oauth.client_id, oauth.client_secret, scope=oauth.scope or None, issuer=oauth.issuer
        )

    turn = asyncio.Lock()

    class Provider(OAuthClientProvider):
        async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
            if ask is None:
                async with turn:
                    if storage.is_due(self.context.current_tokens):
                        async with tokens.lock(server.name):
                            await self._initialize()  # another process may have refreshed or removed the login
                            if self.context.current_tokens is None:
                                raise make_login_needed(server)
                            if storage.is_due(self.context.current_tokens) and self.context.can_refresh_token():
                                await self._handle_refresh_response((yield await self._refresh_token()))
            self.context.token_expiry_time = None  # otherwise the SDK refreshes without the lock
            flow = super()._auth_flow(request)
            try:
                outgoing = await anext(flow)
                while True:
                    outgoing = await flow.asend((yield outgoing))
            except StopAsyncIteration:
                return
            finally:
                await flow.aclose()

    async def refuse(_: str) -> None:
        raise make_login_needed(server)

    metadata = OAuthClientMetadata.model_validate(
        {
            "client_name": CLIENT_NAME,
            "redirect_uris": [redirect_uri],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "scope": oauth.scope or None,
            "token_endpoint_auth_method": "client_secret_basic" if oauth.client_secret else "none",
        }
    )
    return Provider(server.url, metadata, storage, ask or refuse, read_answer)


async def log_in(
    server: McpServerSpec, tokens: McpTokens, *, redirect_uri: str, ask: AskPerson, read_answer: ReadAnswer
) -> None:
    """Log the tool workers in at a server, by a user with a browser.

    Args:
        redirect_uri: the address to which the browser returns.
        ask: shows an address to the user.
        read_answer: returns the answer that the user's browser brings back.

    Raises:
        UsageError: the server needs no such login, or it or its authorization server refuses.
    """
    import httpx2
    from mcp.client.auth import OAuthFlowError

    if server.oauth is None or not server.oauth.needs_person:
        raise UsageError(f"The MCP server {server.name} needs no login by a person.")
    tokens.require_key()  # before a person logs in for nothing
    before = await tokens.load_sealed(server.name)

    async def check_address(request: httpx2.Request) -> None:
        if not is_allowed(server, str(request.url)):
            where = f"{request.url.scheme}://{request.url.netloc.decode()}"
            raise UsageError(
                f"The MCP server {server.name} leads its login to {where}, which its entry does not name.",
                remedy="If it belongs to the authorization server, add it to `origins` of `oauth`.",
            )

    auth = make_auth(server, tokens, redirect_uri=redirect_uri, ask=ask, read_answer=read_answer)
    hooks = {"request": [check_address]}
    async with httpx2.AsyncClient(auth=auth, headers=dict(server.headers), event_hooks=hooks) as http:
        try:
            response = await http.post(server.url, json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
        except (OAuthFlowError, httpx2.HTTPError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"The login at {server.name} failed: {why}", remedy="Try again.") from error
    if await tokens.load_sealed(server.name) == before:
        raise UsageError(f"The MCP server {server.name} asked for no login (status {response.status_code}).")


def is_allowed(server: McpServerSpec, url: str) -> bool:
    """Return whether a login may send a request to an address: the server, or an issuer or origin of its entry."""
    oauth = server.oauth
    named = (server.url, *((oauth.issuer, *oauth.origins) if oauth is not None else ()))
    return _to_origin(url) in {_to_origin(address) for address in named}


def _to_origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _about(server: McpServerSpec) -> str:
    return f"mcp {server.name} {server.url}"
