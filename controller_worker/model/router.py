"""Another model for each call, by what the call is like: routers, as OpenHands has them (6.9).

A profile with a `router` is one model to everybody else. Its own settings are the `primary`; the others are profiles.

Holds: the same request of the same step is routed to the same model, also when it is made again after a crash or a
failure; only `multimodal` remembers something, and only to stay where it is.
Differs: what is remembered of an overflow is lost when another worker takes the conversation over; it is found out
again by the prompt's length, unless the prompt has been condensed meanwhile, and then the smaller model will do.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from controller_worker.model.without_images import has_images
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
    max_input_tokens,
    prompt_tokens,
)

OVERFLOWS_REMEMBERED = 10_000
SELECTION_SECONDS = 10.0
"""How long an operator's own router may take."""


class Router(Protocol):
    """Chooses a model. An operator's own class is made without arguments."""

    def select_llm(self, request: ModelRequest) -> str:
        """Return `primary` or a profile, within ten seconds; an error fails the call."""
        ...


class RouterLLM:
    """A model that is several."""

    def __init__(self, router: Router, models: Mapping[str, LLM], threads: LimitedThreads | None = None) -> None:
        """Take the models by name, the primary among them.

        Args:
            threads: for a router that may block, an operator's own; None: for one that does not.
        """
        self._router = router
        self._models = models
        self._threads = threads

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask the chosen model once. See `LLM.complete`.

        Raises:
            LLMConfigError: the router has named a model that it was not given.
        """
        return await self._models[await self.select(request)].complete(request)

    async def select(self, request: ModelRequest) -> str:
        """Return which model is to be asked, by name; raises what `complete` does."""
        choose = self._router.select_llm
        if self._threads is None:
            name = choose(request)
        else:
            what = "The choice of the router"
            name = await self._threads.run(choose, request, what=what, limit_seconds=SELECTION_SECONDS)
        if name not in self._models:
            raise LLMConfigError(
                f"The router has chosen {name!r}.", remedy=f"It may choose {', '.join(sorted(self._models))}."
            )
        return name

    async def aclose(self) -> None:
        """Close all connections."""
        for model in self._models.values():
            await model.aclose()


class MultimodalRouter:
    """The primary for images and for prompts that the secondary cannot hold, from then on for good; else it."""

    def __init__(self, secondary: str, max_input_tokens: int | None) -> None:
        self._secondary = secondary
        self._max_input_tokens = max_input_tokens
        self._overflown: dict[str, None] = {}

    def select_llm(self, request: ModelRequest) -> str:
        """See `Router.select_llm`."""
        if any(has_images(message) for message in request.messages) or request.conversation_id in self._overflown:
            return PRIMARY
        if self._max_input_tokens is None or prompt_tokens(request) <= self._max_input_tokens:
            return self._secondary
        if len(self._overflown) >= OVERFLOWS_REMEMBERED:
            del self._overflown[next(iter(self._overflown))]
        self._overflown[request.conversation_id] = None
        return PRIMARY


class RuleRouter:
    """The first rule that holds."""

    def __init__(self, rules: Sequence[RouteRule]) -> None:
        self._rules = rules

    def select_llm(self, request: ModelRequest) -> str:
        """See `Router.select_llm`."""
        return next((rule.use for rule in self._rules if _holds(rule, request)), PRIMARY)


class RandomRouter:
    """By weights; drawn from the step's identity, so that asking again means the same model."""

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


def router_of(spec: RouterSpec, choices: Mapping[str, LLMConfig]) -> Router:
    """Make the router that is specified.

    Args:
        choices: the settings of the profiles that it may choose.

    Raises:
        LLMConfigError: a class cannot be imported or made.
    """
    match spec.kind:
        case "multimodal":
            assert spec.secondary is not None
            return MultimodalRouter(spec.secondary, max_input_tokens(choices[spec.secondary]))
        case "rules":
            return RuleRouter(spec.rules)
        case "random":
            return RandomRouter(spec.weights)
    assert spec.path is not None
    return _own_router(spec.path)


def _own_router(path: str) -> Router:
    module, _, name = path.partition(":")
    try:
        router: Router = getattr(importlib.import_module(module), name)()
    except Exception as error:
        # An outer edge: it is the operator's code.
        raise LLMConfigError(
            f"The router {path!r} cannot be made: {error!r}.", remedy="Name a class that takes no arguments."
        ) from error
    return router


def _holds(rule: RouteRule, request: ModelRequest) -> bool:
    return (
        (rule.images is None or rule.images == any(has_images(message) for message in request.messages))
        and (rule.min_tokens is None or prompt_tokens(request) >= rule.min_tokens)
        and (rule.service is None or rule.service == request.service)
    )
