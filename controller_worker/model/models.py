"""The models that a worker can call: their settings, and a client for each.

Holds: the same settings share one client; address and key come from the worker's environment, never from a
conversation; what a conversation names is looked up once, by `choose`, and is a reference of ours from then on; a
client is made in its own thread and in a limited time, so that one that never gets made holds nothing else up.
Does not: call them; see `model_call`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from pydantic import SecretStr

from broker.contract.events import LLMSpec
from broker.contract.offered_models import ModelTable
from broker.limits.quotas import QuotaTable
from broker.runtime.clock import Clock
from broker.runtime.errors import UsageError
from controller_worker.memory.conversation_memory import MAX_MESSAGE_CHARS
from controller_worker.model.registry import create_llm, takes_images
from controller_worker.model.router import RouterLLM, router_of
from controller_worker.providers.choices import PRIMARY
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.limited_threads import LimitedThreads
from controller_worker.providers.llm import LLM, ModelRequest
from controller_worker.providers.profiles import Profiles, address_of
from controller_worker.providers.silent import MODEL as SILENT_MODEL

ROUTED = "#routed"
"""After a reference: the profile's own model, whatever its router would choose."""
CREATION_SECONDS = 120.0
"""How long a client may take; the first one imports its provider's library, on a busy machine for half a minute."""


class ClientMissing(Exception):
    """A router is to choose whose client has to be made first."""

    def __init__(self, spec: LLMSpec) -> None:
        super().__init__(spec)
        self.spec = spec


class Models:
    """The models of one worker.

    A specification's `model` is a reference (see `controller_worker.providers.profiles`) or the name of an entry; only
    `choose` takes what a conversation says.

    Args:
        quotas: whose keys go to no other address than that of their models.
        is_open: whether conversations may name any model, see `Profiles.is_open`.
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
        self._clients: dict[tuple[LLMSpec, str | None], asyncio.Task[tuple[LLM, LLMConfig]]] = {}

    async def prepare(self) -> None:
        """Create the client of the default model, if there is one, so that no conversation waits for its library."""
        with contextlib.suppress(UsageError):  # which the first call will say
            await self.of(LLMSpec())

    def choose(self, spec: LLMSpec, tenant: str) -> LLMSpec:
        """Return the specification, as the other methods take it, of what a conversation of a tenant names.

        Raises:
            ModelNotOffered: no entry for this tenant has the name; lists those that there are.
            LLMConfigError: the table cannot be read.
        """
        return spec.model_copy(update={"model": self._profiles.find(spec.model, tenant) or None})

    async def of(self, spec: LLMSpec, *, key_env: str | None = None) -> tuple[LLM, LLMConfig]:
        """Return the client for a specification, and its settings.

        Args:
            key_env: the environment variable that holds the key to use; None for the configured one.

        Raises:
            LLMConfigError: no model is configured, or a setting cannot be used.
        """
        client = self._clients.get((spec, key_env))
        if client is None or (client.done() and client.exception() is not None):
            # The first client imports its provider's library, for longer than a heartbeat may be late.
            what = f"The client of the model {ascii(spec.model or 'by default')[:100]}"
            making = self._threads.run(self._create, spec, key_env, what=what, limit_seconds=CREATION_SECONDS)
            client = asyncio.create_task(making)
            self._clients[spec, key_env] = client
        return await asyncio.shield(client)

    def is_ready(self, spec: LLMSpec) -> bool:
        """Return whether `of` answers at once."""
        client = self._clients.get((spec, None))
        return client is not None and client.done() and client.exception() is None

    def settings(self, spec: LLMSpec) -> LLMConfig | None:
        """Return how a model is asked; None where the settings cannot be used, which the call will say."""
        client = self._clients.get((spec, None))
        if client is not None and client.done() and client.exception() is None:
            return client.result()[1]
        try:
            return self._config(spec)
        except UsageError:
            return None

    async def routed(self, spec: LLMSpec, request: ModelRequest, tenant: str) -> LLMSpec:
        """Return the specification of the model that a router chooses for a request; another one as it is.

        What quotas, budgets and keys count for is then the model that is really asked. A router that cannot choose is
        asked again by the call, which fails.

        Raises:
            ModelNotOffered: it chooses a profile that is not for the tenant.
            ClientMissing: the router is not made yet.
        """
        config = self.settings(spec)
        if config is None or config.router is None:
            return spec
        if not self.is_ready(spec):
            raise ClientMissing(spec)
        try:
            llm, _ = await self.of(spec)
            assert isinstance(llm, RouterLLM)
            name = await llm.select(request)
        except Exception:  # noqa: BLE001  (the outer edge: it may be an operator's code)
            return spec
        chosen = (spec.model or "") if name == PRIMARY else self._profiles.find(name, tenant)
        return spec.model_copy(update={"model": chosen + ROUTED})

    @property
    def offered(self) -> list[str]:
        """The default model, empty if there is none, and the profiles, as workers of all versions report them."""
        config = self.settings(LLMSpec())
        names = self._loaded.names if self._loaded is not None else ()
        return [config.model if config is not None else "", *names]

    @property
    def table(self) -> ModelTable:
        """What conversations may name; nothing if the table cannot be read, which the first call will say."""
        try:
            return self._profiles.table
        except LLMConfigError:
            return ModelTable()

    @property
    def may_batch(self) -> bool:
        """Whether any settings of this worker ask for the provider's batch API."""
        try:
            return self._profiles.sets("batch")
        except LLMConfigError:
            return False  # which the first call will say

    def max_message_chars(self, spec: LLMSpec) -> int:
        """Return how long a text in a prompt may be; the default where the settings cannot be used."""
        config = self.settings(spec)
        return MAX_MESSAGE_CHARS if config is None else config.max_message_chars

    def structures_output(self, spec: LLMSpec) -> bool:
        """Say whether a model may be held to the schema of a conversation's output."""
        config = self.settings(spec)
        return config is not None and config.structured_output != "off"

    def sees_images(self, spec: LLMSpec) -> bool:
        """Say whether the model, or one that may be asked in its place, takes images."""
        if spec in self._sights:
            return self._sights[spec]
        config = self.settings(spec)
        if config is None:
            return True
        others = [fallback.use for fallback in config.fallbacks]
        others += sorted(config.router.profiles) if config.router is not None else []
        try:
            self._sights[spec] = takes_images(config) or any(
                takes_images(other) for name in others if (other := self.settings(LLMSpec(model=name))) is not None
            )
        except UsageError:
            return True  # which the call will say
        return self._sights[spec]

    async def aclose(self) -> None:
        """Close every client."""
        for client in self._clients.values():
            if client.done() and client.exception() is None:
                await client.result()[0].aclose()

    @property
    def _profiles(self) -> Profiles:
        """What the operator has written; raises `LLMConfigError`."""
        if self._loaded is None:
            self._loaded = Profiles.from_env(self._env, is_open=self._is_open)
        return self._loaded

    def _create(self, spec: LLMSpec, key_env: str | None) -> tuple[LLM, LLMConfig]:
        config = self._config(spec)
        if key_env is not None:
            key = self._env.get(key_env, "")
            if not key:
                raise LLMConfigError(f"The quota table names the key {key_env}, which is not set.")
            self._check_key(key_env, config)
            config = config.model_copy(update={"api_key": SecretStr(key)})
        return self._create_whole(config), config

    def _check_key(self, key_env: str, config: LLMConfig) -> None:
        """Refuse a key of the quota table that two addresses would get.

        Raises:
            LLMConfigError: the entries of its model have different addresses.
        """
        addresses = {address_of(config)}
        for name in ("", *self._profiles.names):
            with contextlib.suppress(UsageError):  # it cannot be used, and so gets no key
                other = self._profiles.config(name)
                pool = self._quotas.pool_of(other.model)
                if pool is not None and any(quota.key_env == key_env for quota in pool.quotas):
                    addresses.add(address_of(other))
        if len(addresses) > 1:
            raise LLMConfigError(
                f"The quota table gives the key {key_env} to models at different addresses.",
                remedy="Name the models so that each of its quotas matches those of one address.",
            )

    def _create_whole(self, config: LLMConfig) -> LLM:
        """Create a model and, if it is a router, those that it may choose."""
        if config.router is None:
            return create_llm(config, self._clock)
        choices = {name: self._profiles.named(name) for name in sorted(config.router.profiles)}
        router = router_of(config.router, choices)
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
        config = self._profiles.config(
            name,
            temperature=spec.temperature,
            max_output_tokens=spec.max_output_tokens,
            caching_prompt=spec.caching_prompt,
        )
        return config.model_copy(update={"router": None}) if is_routed else config
