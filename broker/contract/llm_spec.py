"""The model of a conversation, and the base class of values inside events.

It also has the table of models that a controller worker offers, and decides which of them a tenant may use.

Holds: the ingress and the workers apply the same rule. An error lists only the models that this tenant may use.
Does not: contain addresses, keys or files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.contract.deferred_models import DeferredModel
from broker.contract.policies import LoopPolicy
from broker.runtime import UsageError


class EventValue(BaseModel, metaclass=DeferredModel):
    """A value inside an event."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class LLMSpec(EventValue):
    """The model of a conversation. Its address and key belong to the controller, never to the conversation.

    Attributes:
        model: a profile or a model; None for LLM_MODEL of the controller workers. Other fields that are None use the
            workers' values.
        stream: whether programs for OpenHands' SDK get replies as they are written; other clients ask for `deltas`.
    """

    model: str | None = None
    temperature: float | None = None
    max_output_tokens: int | None = None
    caching_prompt: bool | None = None
    stream: bool | None = None


SCRIPT_PREFIXES = ("scripted/", "replay/")
"""The prefixes of models that are files of the operator."""
OFFERED_MODELS = "offered_models"
"""The field of a worker's report that holds its table."""
UNPRICED_MODELS = "unpriced_models"
"""The field of a worker's report that holds the names whose price is unknown to it, a line each."""
PATTERN_END = "/*"
"""The suffix of an entry that stands for all models of a provider."""
SHOWN_NAMES = 50
SHOWN_CHARS = 100

_REST = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._:@+-]*(/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*\Z")
"""Matches the text that `*` may stand for: names and versions of models, but no start of a host or a query."""
MAX_NAME_CHARS = 300


class ModelNotOffered(UsageError):
    """A conversation requests a model that its cluster does not offer to it."""

    code = "model_not_offered"


class OfferedModel(BaseModel):
    """An entry of the table.

    Attributes:
        name: the name that conversations use; a name that ends with `/*` matches all names with that prefix.
        tenants: the tenants that may use it; None for all.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    tenants: tuple[str, ...] | None = None

    def is_for(self, tenant: str) -> bool:
        """Return whether a tenant may use it; the empty name means conversations without a tenant."""
        return self.tenants is None or tenant in self.tenants

    def matches(self, name: str) -> bool:
        """Return whether this entry matches the name that a conversation requests."""
        if not self.name.endswith(PATTERN_END):
            return name == self.name
        beginning = self.name.removesuffix("*")
        return name.startswith(beginning) and len(name) <= MAX_NAME_CHARS and bool(_REST.match(name[len(beginning) :]))


class ModelTable(BaseModel):
    """The models that one controller worker offers.

    Attributes:
        has_scripts: conversations may use scripts and recordings below the operator's directory.
        is_open: conversations may use any model: the cluster is private to the user who started it.
    """

    model_config = ConfigDict(frozen=True)

    entries: tuple[OfferedModel, ...] = ()
    has_scripts: bool = False
    is_open: bool = False

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a worker's report; None if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def offers(self, name: str, tenant: str) -> bool:
        """Return whether a tenant's conversations may use a model."""
        if self.is_open or (self.has_scripts and name.startswith(SCRIPT_PREFIXES)):
            return True
        return any(entry.is_for(tenant) and entry.matches(name) for entry in self.entries)

    def list_names(self, tenant: str | None) -> list[str]:
        """Return the models that a tenant's conversations may use, in the operator's order; None for all tenants."""
        names = [entry.name for entry in self.entries if tenant is None or entry.is_for(tenant)]
        return list(dict.fromkeys([*names, *(f"{prefix}FILE" for prefix in SCRIPT_PREFIXES if self.has_scripts)]))


def check_offered(names: Iterable[str], tenant: str, tables: Iterable[ModelTable]) -> None:
    """Check that one of the tables offers each model to a tenant.

    Raises:
        ModelNotOffered: lists the models that the tenant may use.
    """
    known = list(tables)
    for name in names:
        if not any(table.offers(name, tenant) for table in known):
            raise not_offered_error(name, tenant, known)


def not_offered_error(name: str, tenant: str, tables: Iterable[ModelTable]) -> ModelNotOffered:
    """Return the error for a model that is not offered to a tenant, with the list of offered models."""
    offered = sorted({name for table in tables for name in table.list_names(tenant)})
    more = f" and {len(offered) - SHOWN_NAMES} more" if len(offered) > SHOWN_NAMES else ""
    return ModelNotOffered(
        f"The model {_render_name(name)} is not offered here."
        if name
        else "There is no default model here for this tenant.",
        remedy=f"Offered models: {', '.join(offered[:SHOWN_NAMES]) + more if offered else 'none'}.",
    )


def find_model_names(spec: Any) -> Iterator[str]:
    """Yield all model names in a specification, including nested ones."""
    if isinstance(spec, LLMSpec):
        if spec.model is not None:
            yield spec.model
    elif isinstance(spec, LoopPolicy):
        if spec.fallback_model is not None:
            yield spec.fallback_model
    elif isinstance(spec, BaseModel):
        for field in type(spec).model_fields:
            yield from find_model_names(getattr(spec, field))
    elif isinstance(spec, dict):
        for value in spec.values():
            yield from find_model_names(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from find_model_names(value)


def _render_name(name: str) -> str:
    """Render an untrusted name for an error message."""
    shown = ascii(name[:SHOWN_CHARS])
    return shown if len(name) <= SHOWN_CHARS else f"{shown[:-1]}…'"
