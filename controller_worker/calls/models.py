"""The models that a worker can call: their settings, and a client for each.

Holds: the same settings share one client; address and key come from the worker's environment, never from a
conversation.
Does not: call them; see `model_call`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from pydantic import SecretStr

from broker.contract.events import LLMSpec
from broker.runtime.clock import Clock
from controller_worker.backends.registry import create_llm, takes_images
from controller_worker.llm.choices import PRIMARY
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import LLMConfigError
from controller_worker.llm.llm import LLM, ModelRequest
from controller_worker.llm.profiles import Profiles
from controller_worker.memory.conversation_memory import MAX_MESSAGE_CHARS
from controller_worker.wrappers.router import RouterLLM, router_of

ROUTED = "#routed"
"""After a profile's name: the profile's own model, whatever its router would choose."""


class Models:
    """The models of one worker.

    A specification's `model` is a profile's name (see `controller_worker.llm.profiles`) or a model's.
    """

    def __init__(self, env: Mapping[str, str], clock: Clock) -> None:
        self._env = env
        self._clock = clock
        self._profiles: Profiles | None = None
        self._sights: dict[LLMSpec, bool] = {}
        self._clients: dict[tuple[LLMSpec, str | None], asyncio.Task[tuple[LLM, LLMConfig]]] = {}

    async def prepare(self) -> None:
        """Create the client of the default model, if there is one, so that no conversation waits for its library."""
        with contextlib.suppress(LLMConfigError):  # which the first call will say
            await self.of(LLMSpec())

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
            client = asyncio.create_task(asyncio.to_thread(self._create, spec, key_env))
            self._clients[spec, key_env] = client
        return await asyncio.shield(client)

    def settings(self, spec: LLMSpec) -> LLMConfig | None:
        """Return how a model is asked; None where the settings cannot be used, which the call will say."""
        client = self._clients.get((spec, None))
        if client is not None and client.done() and client.exception() is None:
            return client.result()[1]
        try:
            return self._config(spec)
        except LLMConfigError:
            return None

    async def routed(self, spec: LLMSpec, request: ModelRequest) -> LLMSpec:
        """Return the specification of the model that a router chooses for a request; another one as it is.

        What quotas, budgets and keys count for is then the model that is really asked. A router that cannot choose is
        asked again by the call, which fails.
        """
        config = self.settings(spec)
        if config is None or config.router is None:
            return spec
        try:
            llm, _ = await self.of(spec)
            assert isinstance(llm, RouterLLM)
            name = llm.select(request)
        except Exception:  # noqa: BLE001  (the outer edge: it may be an operator's code)
            return spec
        chosen = (spec.model or "") if name == PRIMARY else name
        return spec.model_copy(update={"model": chosen + ROUTED})

    @property
    def offered(self) -> list[str]:
        """The names that a conversation can give: the default model, empty if there is none, and the profiles."""
        config = self.settings(LLMSpec())
        names = self._profiles.names if self._profiles is not None else ()
        return [config.model if config is not None else "", *names]

    @property
    def may_batch(self) -> bool:
        """Whether any settings of this worker ask for the provider's batch API."""
        try:
            self._profiles = self._profiles or Profiles.from_env(self._env)
        except LLMConfigError:
            return False  # which the first call will say
        return self._profiles.sets("batch")

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
        except LLMConfigError:
            return True  # which the call will say
        return self._sights[spec]

    async def aclose(self) -> None:
        """Close every client."""
        for client in self._clients.values():
            if client.done() and client.exception() is None:
                await client.result()[0].aclose()

    def _create(self, spec: LLMSpec, key_env: str | None) -> tuple[LLM, LLMConfig]:
        config = self._config(spec)
        if key_env is not None:
            key = self._env.get(key_env, "")
            if not key:
                raise LLMConfigError(f"The quota table names the key {key_env}, which is not set.")
            config = config.model_copy(update={"api_key": SecretStr(key)})
        return self._create_whole(config), config

    def _create_whole(self, config: LLMConfig) -> LLM:
        """Create a model and, if it is a router, those that it may choose."""
        if config.router is None:
            return create_llm(config, self._clock)
        assert self._profiles is not None
        choices = {name: self._profiles.named(name) for name in sorted(config.router.profiles)}
        router = router_of(config.router, choices)
        models = {name: create_llm(of, self._clock) for name, of in ({PRIMARY: config} | choices).items()}
        return RouterLLM(router, models)

    def _config(self, spec: LLMSpec) -> LLMConfig:
        if self._profiles is None:
            self._profiles = Profiles.from_env(self._env)
        name = spec.model
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
