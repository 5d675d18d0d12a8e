"""The models that a worker can call: their settings and one client for each.

Holds: equal settings share one client, and the number of clients is bounded. Address and key come from the worker's
environment, and from a conversation only for an endpoint that the operator's table allows. `choose` resolves a
conversation's model name once, to an internal reference.
A client is created in its own thread with a time limit, so one that hangs blocks nothing else.
Does not: call the models; see `explain_model_call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from pydantic import SecretStr

from broker.contract import LLMSpec, ModelTable
from broker.limits import QuotaKey, QuotaTable
from broker.runtime import Clock, UsageError
from broker.secrets import OwnEndpoint
from controller_worker.memory import MAX_MESSAGE_CHARS
from controller_worker.model.registry import accepts_images, check_own_endpoints, create_llm
from controller_worker.model.router import RouterLLM, make_router
from controller_worker.providers import (
    LLM,
    PRIMARY,
    SILENT_MODEL,
    LimitedThreads,
    LLMConfig,
    LLMConfigError,
    ModelRequest,
    Profiles,
    find_address,
)

ROUTED = "#routed"
"""Suffix of a reference: use the profile's own model and bypass its router."""
CREATION_SECONDS = 120.0
"""Time limit for creating a client. The first one imports its provider's library: up to 30 s on a busy machine."""


CLIENTS_LIMIT = 128
"""Per worker; clients in use, and new ones that wait for their first call, may exceed it. A client holds about 1 MB of
certificates, and its connections.
"""
MOST_CLIENTS = 4 * CLIENTS_LIMIT
"""Above it, new clients are closed like others."""
UNUSED_KEPT_SECONDS = 60.0
"""How long a new client is kept for the call that it was created for. Otherwise, when conversations use more clients in
turn than the limit, each would lose its client before its call starts, and none would make progress."""
SIGHTS_LIMIT = 1_000
CHOICES_LIMIT = 1_000
"""Resolved models that are kept. Equal ones are then one object, which is found without a comparison of its fields."""


@dataclass(slots=True)
class _Client:
    """A client, or the task that creates it.

    Attributes:
        kept_until: it is not closed before this monotonic time, because its first call may not have started.
        users: the number of calls in progress.
    """

    made: asyncio.Task[tuple[LLM, LLMConfig]]
    kept_until: float = 0.0
    users: int = 0

    @property
    def is_ready(self) -> bool:
        return self.made.done() and not self.made.cancelled() and self.made.exception() is None


class ClientMissing(Exception):
    """Raised when a router must choose but its client does not exist yet."""

    def __init__(self, spec: LLMSpec) -> None:
        super().__init__(spec)
        self.spec = spec


class Models:
    """The models of one worker.

    The `model` of a specification is a reference (see `controller_worker.providers.profiles`) or the name of an entry.
    Only `choose` accepts names given by a conversation.

    Args:
        quotas: their keys are sent only to the address of their models.
        is_open: whether conversations may name any model; see `Profiles.is_open`.
    """

    def __init__(
        self, env: Mapping[str, str], clock: Clock, quotas: QuotaTable = QuotaTable(), *, is_open: bool = False
    ) -> None:
        self._env = env
        self._clock = clock
        self._quotas = quotas
        self._is_open = is_open
        self._threads = LimitedThreads()
        self._loaded: Profiles | None = None
        self._sights: dict[LLMSpec, bool] = {}
        self._chosen: dict[tuple[LLMSpec, str], LLMSpec] = {}
        # least recently used first
        self._clients: dict[tuple[LLMSpec, QuotaKey | None, OwnEndpoint | None], _Client] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Create the client of the default model, if any, so that no conversation waits for its import."""
        with contextlib.suppress(UsageError):  # the first call reports the error
            await self.get_client(LLMSpec())

    def choose(self, spec: LLMSpec, tenant: str) -> LLMSpec:
        """Resolve the model that a tenant's conversation names. The other methods take the result.

        Raises:
            ModelNotOffered: no entry with this name is offered to the tenant; the message lists the offered ones.
            LLMConfigError: the table cannot be read.
        """
        chosen = self._chosen.get((spec, tenant))
        if chosen is None:
            model = self._profiles.find_reference(spec.model, tenant) or None
            chosen = spec if model == spec.model else spec.model_copy(update={"model": model})
            if len(self._chosen) >= CHOICES_LIMIT:
                self._chosen.clear()
            self._chosen[spec, tenant] = chosen
        return chosen

    def choose_fallback(self, spec: LLMSpec, name: str, tenant: str) -> LLMSpec:
        """Resolve a fallback that the settings of `spec` name. Raises the same errors as `choose`."""
        reference = (spec.model or "").removesuffix(ROUTED)
        return spec.model_copy(update={"model": self._profiles.find_fallback(reference, name, tenant) or None})

    async def get_client(self, spec: LLMSpec) -> tuple[LLM, LLMConfig]:
        """Return the client and the settings of a specification. To make a call, use `using`.

        Raises:
            LLMConfigError: no model is configured, or a setting cannot be used.
        """
        async with self._hold(self._client(spec, None)) as found:
            return found

    @contextlib.asynccontextmanager
    async def use_client(
        self, spec: LLMSpec, *, key: QuotaKey | None = None, endpoint: OwnEndpoint | None = None
    ) -> AsyncIterator[tuple[LLM, LLMConfig]]:
        """Yield the client and the settings of a specification. The client stays open inside the block.

        Args:
            key: another key or address than the configured ones.
            endpoint: the conversation's own, in place of these.

        Raises:
            LLMConfigError: no model is configured, or a setting cannot be used.
        """
        client = self._client(spec, None if endpoint is not None else key, endpoint)
        async with self._hold(client) as found:
            client.kept_until = 0.0
            yield found

    @contextlib.asynccontextmanager
    async def _hold(self, client: _Client) -> AsyncIterator[tuple[LLM, LLMConfig]]:
        client.users += 1
        try:
            yield client.made.result() if client.made.done() else await asyncio.shield(client.made)
        finally:
            client.users -= 1
            self._close_idle_clients()

    def _client(self, spec: LLMSpec, key: QuotaKey | None, endpoint: OwnEndpoint | None = None) -> _Client:
        client = self._clients.pop((spec, key, endpoint), None)
        if client is None or (client.made.done() and not client.is_ready):
            # The first client imports its provider's library, which takes longer than a heartbeat may be late.
            what = f"The client of the model {ascii(spec.model or 'by default')[:100]}"
            making = self._threads.run(self._create, spec, key, endpoint, what=what, limit_seconds=CREATION_SECONDS)
            client = _Client(asyncio.create_task(making))
            client.made.add_done_callback(partial(self._keep_until_used, client))
        self._clients[spec, key, endpoint] = client
        return client

    def _keep_until_used(self, client: _Client, _: object) -> None:
        if client.is_ready:
            client.kept_until = self._clock.monotonic() + UNUSED_KEPT_SECONDS

    def _close_idle_clients(self) -> None:
        """Close unused clients above the limit, least recently used first."""
        surplus = len(self._clients) - CLIENTS_LIMIT
        if surplus <= 0:
            return
        now = self._clock.monotonic() if len(self._clients) <= MOST_CLIENTS else math.inf
        idle = [
            key
            for key, client in self._clients.items()
            if client.made.done() and not client.users and client.kept_until <= now
        ]
        for key in idle[:surplus]:
            client = self._clients.pop(key)
            if client.is_ready:
                closing = asyncio.create_task(client.made.result()[0].aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def is_ready(self, spec: LLMSpec) -> bool:
        """Return whether `of` returns without waiting."""
        client = self._clients.get((spec, None, None))
        return client is not None and client.is_ready

    def find_settings(self, spec: LLMSpec) -> LLMConfig | None:
        """Return a model's settings; None if they are invalid; the call then reports the error."""
        client = self._clients.get((spec, None, None))
        if client is not None and client.is_ready:
            return client.made.result()[1]
        try:
            return self._config(spec)
        except UsageError:
            return None

    async def route(self, spec: LLMSpec, request: ModelRequest, tenant: str) -> LLMSpec:
        """Return the model that a router chooses for a request. Return any other model unchanged.

        Quotas, budgets and keys then apply to the model that is really called. If a router cannot choose, the call asks
        it again and fails.

        Raises:
            ModelNotOffered: the router chose a profile that is not offered to the tenant.
            ClientMissing: the router does not exist yet.
        """
        config = self.find_settings(spec)
        if config is None or config.router is None:
            return spec
        if not self.is_ready(spec):
            raise ClientMissing(spec)
        try:
            async with self.use_client(spec) as (llm, _):
                assert isinstance(llm, RouterLLM)
                name = await llm.select(request)
        except Exception:  # noqa: BLE001  (the outer edge: it may be an operator's code)
            return spec
        chosen = (spec.model or "") if name == PRIMARY else self._profiles.find_reference(name, tenant)
        return spec.model_copy(update={"model": chosen + ROUTED})

    @property
    def offered(self) -> list[str]:
        """The default model (empty without one) and the profiles, as workers of all versions report them."""
        config = self.find_settings(LLMSpec())
        names = self._loaded.names if self._loaded is not None else ()
        return [config.model if config is not None else "", *names]

    @property
    def table(self) -> ModelTable:
        """The models that conversations may name; empty if the table is unreadable; the first call then reports it."""
        try:
            return self._profiles.table
        except LLMConfigError:
            return ModelTable()

    def list_unpriced(self, further: Iterable[str]) -> list[str]:
        """Return the names whose price is unknown; see `Profiles.list_unpriced`."""
        try:
            return self._profiles.list_unpriced(further)
        except LLMConfigError:
            return []  # the first call reports the error

    @property
    def may_batch(self) -> bool:
        """Whether any settings of this worker ask for a provider's batch API."""
        try:
            return self._profiles.has_field("batch")
        except LLMConfigError:
            return False  # the first call reports the error

    def max_message_chars(self, spec: LLMSpec) -> int:
        """Return the length limit of a text in a prompt; the default if the settings cannot be used."""
        config = self.find_settings(spec)
        return MAX_MESSAGE_CHARS if config is None else config.max_message_chars

    def structures_output(self, spec: LLMSpec) -> bool:
        """Return whether a model's output can be constrained to the conversation's output schema."""
        config = self.find_settings(spec)
        return config is not None and config.structured_output != "off"

    def sees_images(self, spec: LLMSpec) -> bool:
        """Return whether the model, or any model that may replace it, accepts images."""
        if spec in self._sights:
            return self._sights[spec]
        config = self.find_settings(spec)
        if config is None:
            return True
        reference = (spec.model or "").removesuffix(ROUTED)
        if len(self._sights) >= SIGHTS_LIMIT:
            self._sights.clear()
        try:
            others = [self._profiles.find_fallback(reference, fallback.use, None) for fallback in config.fallbacks]
            if config.router is not None:
                others += sorted(config.router.profiles)
            self._sights[spec] = accepts_images(config) or any(
                accepts_images(other)
                for name in others
                if (other := self.find_settings(LLMSpec(model=name))) is not None
            )
        except UsageError:
            return True  # the call reports the error
        return self._sights[spec]

    async def aclose(self) -> None:
        """Close every client."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        for client in self._clients.values():
            if client.is_ready:
                await client.made.result()[0].aclose()

    @property
    def _profiles(self) -> Profiles:
        """The operator's profiles. Raises `LLMConfigError`."""
        if self._loaded is None:
            self._loaded = Profiles.from_env(self._env, is_open=self._is_open)
        return self._loaded

    def _create(self, spec: LLMSpec, key: QuotaKey | None, endpoint: OwnEndpoint | None) -> tuple[LLM, LLMConfig]:
        config = self._config(spec)
        if endpoint is not None:
            config = config.with_endpoint(*endpoint)
        if key is not None:
            self._check_key(key, config)
        if key is not None and key.env is not None:
            value = self._env.get(key.env, "")
            if not value:
                raise LLMConfigError(f"The quota table names the key {key.env}, which is not set.")
            config = config.model_copy(update={"api_key": SecretStr(value)})
        if key is not None and key.base_url is not None:
            config = config.model_copy(update={"base_url": key.base_url})
        return self._create_with_choices(config), config

    def _check_key(self, key: QuotaKey, config: LLMConfig) -> None:
        """Reject a key that would be sent to two addresses, and a replica that would get the keys of two.

        Raises:
            LLMConfigError: the entries of its model have different addresses.
        """
        addresses = {find_address(config)}
        for name in ("", *self._profiles.names):
            with contextlib.suppress(UsageError):  # an unusable entry gets no key
                other = self._profiles.load_config(name)
                if other.model == config.model if key.base_url else self._quotas.has_key(other.model, key.env or ""):
                    addresses.add(find_address(other))
        if len(addresses) > 1:
            what = f"replica {key.base_url}" if key.base_url else f"key {key.env}"
            raise LLMConfigError(
                f"The quota table gives the {what} to models at different addresses.",
                remedy="Name the models so that each of its quotas matches those of one address.",
            )

    def _create_with_choices(self, config: LLMConfig) -> LLM:
        """Create a model and, if it is a router, the models it may choose from."""
        if config.router is None:
            return create_llm(config, self._clock)
        choices = {name: self._profiles.load_profile(name) for name in sorted(config.router.profiles)}
        for name, choice in choices.items():
            if choice.own_endpoints:
                raise LLMConfigError(
                    f"The router chooses {name!r}, an entry with own_endpoints.", remedy="Let conversations name it."
                )
        router = make_router(config.router, choices)
        models = {name: create_llm(of, self._clock) for name, of in ({PRIMARY: config} | choices).items()}
        is_own = config.router.kind == "class"
        return RouterLLM(router, models, self._threads if is_own else None)

    def _config(self, spec: LLMSpec) -> LLMConfig:
        name = spec.model
        if name == SILENT_MODEL:
            name = f"#{SILENT_MODEL}"
        is_routed = name is not None and name.endswith(ROUTED)
        if name is not None and is_routed:
            name = name.removesuffix(ROUTED) or None
        config = self._profiles.load_config(
            name,
            temperature=spec.temperature,
            max_output_tokens=spec.max_output_tokens,
            caching_prompt=spec.caching_prompt,
        )
        if spec.model == SILENT_MODEL:
            config = config.model_copy(update={"own_endpoints": ()})
        check_own_endpoints(config, name or config.model)
        return config.model_copy(update={"router": None}) if is_routed else config
