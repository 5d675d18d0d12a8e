"""Routers: choose a model for each call by its content, as in OpenHands (6.9).

To all other code, a profile with a `router` is one model. Its own settings are the `primary`; the others are profiles.

Holds: the same request of the same step goes to the same model, even after a crash or a failure. Only `multimodal`
keeps state, and only to stay with its choice.
Differs: a recorded overflow is lost when another worker takes the conversation over. The length of the prompt shows the
overflow again, unless the prompt was condensed meanwhile; then the smaller model suffices.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from controller_worker.providers import (
    LLM,
    PRIMARY,
    Completion,
    LimitedThreads,
    LLMConfig,
    LLMConfigError,
    ModelRequest,
    RouterSpec,
    RouteRule,
    estimate_prompt_tokens,
    find_max_input_tokens,
    has_images,
)

OVERFLOWS_REMEMBERED = 10_000
SELECTION_SECONDS = 10.0
"""Time limit of an operator's own router."""


class Router(Protocol):
    """Chooses a model. An operator's own class is created without arguments."""

    def select_llm(self, request: ModelRequest) -> str:
        """Return `primary` or a profile within 10 seconds. An error fails the call."""
        ...


class RouterLLM:
    """A model that forwards each call to the model that its router chooses."""

    def __init__(self, router: Router, models: Mapping[str, LLM], threads: LimitedThreads | None = None) -> None:
        """Take the models by name, including the primary.

        Args:
            threads: runs an operator's router, which may block; None for a router that does not block.
        """
        self._router = router
        self._models = models
        self._threads = threads

    async def complete(self, request: ModelRequest) -> Completion:
        """Call the chosen model once. See `LLM.complete`.

        Raises:
            LLMConfigError: the router named an unknown model.
        """
        return await self._models[await self.select(request)].complete(request)

    async def select(self, request: ModelRequest) -> str:
        """Return the name of the chosen model. Raises the same errors as `complete`."""
        choose = self._router.select_llm
        if self._threads is None:
            name = choose(request)
        else:
            what = "The choice of the router"
            name = await self._threads.run(choose, request, what=what, limit_seconds=SELECTION_SECONDS)
        if name not in self._models:
            raise LLMConfigError(
                f"The router chose {name!r}, which it was not given.",
                remedy=f"It may choose {', '.join(sorted(self._models))}.",
            )
        return name

    async def aclose(self) -> None:
        """Close all connections."""
        for model in self._models.values():
            await model.aclose()


class MultimodalRouter:
    """Uses the primary for images and long prompts, and the secondary otherwise.

    A prompt is long if it exceeds the secondary. After the first long prompt, the conversation stays with the primary.
    """

    def __init__(self, secondary: str, max_input_tokens: int | None) -> None:
        self._secondary = secondary
        self._max_input_tokens = max_input_tokens
        self._overflown: dict[str, None] = {}

    def select_llm(self, request: ModelRequest) -> str:
        """See `Router.select_llm`."""
        if any(has_images(message) for message in request.messages) or request.conversation_id in self._overflown:
            return PRIMARY
        if self._max_input_tokens is None or estimate_prompt_tokens(request) <= self._max_input_tokens:
            return self._secondary
        if len(self._overflown) >= OVERFLOWS_REMEMBERED:
            del self._overflown[next(iter(self._overflown))]
        self._overflown[request.conversation_id] = None
        return PRIMARY


class RuleRouter:
    """Uses the first rule that matches."""

    def __init__(self, rules: Sequence[RouteRule]) -> None:
        self._rules = rules

    def select_llm(self, request: ModelRequest) -> str:
        """See `Router.select_llm`."""
        return next((rule.use for rule in self._rules if _matches(rule, request)), PRIMARY)


class RandomRouter:
    """Chooses by weights. The draw is seeded with the step's identity, so a repeated call goes to the same model."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights

    def select_llm(self, request: ModelRequest) -> str:
        """See `Router.select_llm`."""
        drawn = hashlib.sha256(f"{request.conversation_id} {request.iteration}".encode()).digest()
        place = int.from_bytes(drawn[:8], "big") / 2**64 * sum(self._weights.values())
        for name, weight in self._weights.items():
            place -= weight
            if place < 0:
                return name
        return list(self._weights)[-1]


def make_router(spec: RouterSpec, choices: Mapping[str, LLMConfig]) -> Router:
    """Create the specified router.

    Args:
        choices: the settings of the profiles it may choose from.

    Raises:
        LLMConfigError: a class cannot be imported or created.
    """
    match spec.kind:
        case "multimodal":
            assert spec.secondary is not None
            return MultimodalRouter(spec.secondary, find_max_input_tokens(choices[spec.secondary]))
        case "rules":
            return RuleRouter(spec.rules)
        case "random":
            return RandomRouter(spec.weights)
    assert spec.path is not None
    return _load_own_router(spec.path)


def _load_own_router(path: str) -> Router:
    module, _, name = path.partition(":")
    try:
        router: Router = getattr(importlib.import_module(module), name)()
    except Exception as error:
        # An outer edge: this calls the operator's code.
        raise LLMConfigError(
            f"The router {path!r} cannot be created: {error!r}.", remedy="Name a class that takes no arguments."
        ) from error
    return router


def _matches(rule: RouteRule, request: ModelRequest) -> bool:
    return (
        (rule.images is None or rule.images == any(has_images(message) for message in request.messages))
        and (rule.min_tokens is None or estimate_prompt_tokens(request) >= rule.min_tokens)
        and (rule.service is None or rule.service == request.service)
    )
