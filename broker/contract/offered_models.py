"""Which models a controller worker offers, and which of them a conversation of a tenant may name.

Holds: one judgement for the entrances, which know what workers report, and for the workers, which decide; a name that
is refused is refused with the names that this tenant may use and with no others.
Does not: hold an address, a key or a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.contract.llm_spec import LLMSpec
from broker.contract.policies import LoopPolicy
from broker.runtime import UsageError

SCRIPT_PREFIXES = ("scripted/", "replay/")
"""Models that are files of the operator."""
OFFERED_MODELS = "offered_models"
"""What a worker says of itself holds its table under this name."""
PATTERN_END = "/*"
"""How the name of an entry ends that stands for all models of a provider."""
SHOWN_NAMES = 50
SHOWN_CHARS = 100

_REST = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._:@+-]*(/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*\Z")
"""What may stand for the `*` of a pattern: names and versions of models, nothing that a host or a query begins with."""
MAX_NAME_CHARS = 300


class ModelNotOffered(UsageError):
    """A conversation names a model that its cluster does not offer to it."""

    code = "model_not_offered"


class OfferedModel(BaseModel):
    """One entry.

    Attributes:
        name: as a conversation names it; one that ends with `/*` stands for all names that begin so.
        tenants: whose conversations may name it; None: those of all.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    tenants: tuple[str, ...] | None = None

    def is_for(self, tenant: str) -> bool:
        """Return whether a tenant may use it; the empty name is that of conversations without one."""
        return self.tenants is None or tenant in self.tenants

    def matches(self, name: str) -> bool:
        """Return whether a conversation that says `name` means this entry."""
        if not self.name.endswith(PATTERN_END):
            return name == self.name
        beginning = self.name.removesuffix("*")
        return name.startswith(beginning) and len(name) <= MAX_NAME_CHARS and bool(_REST.match(name[len(beginning) :]))


class ModelTable(BaseModel):
    """What one controller worker offers.

    Attributes:
        has_scripts: a conversation may name scripts and recordings below the operator's directory.
        is_open: a conversation may name anything: the cluster is private to the person who started it.
    """

    model_config = ConfigDict(frozen=True)

    entries: tuple[OfferedModel, ...] = ()
    has_scripts: bool = False
    is_open: bool = False

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what a worker reports; None if it cannot be read."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def offers(self, name: str, tenant: str) -> bool:
        """Return whether a conversation of a tenant may name a model."""
        if self.is_open or (self.has_scripts and name.startswith(SCRIPT_PREFIXES)):
            return True
        return any(entry.is_for(tenant) and entry.matches(name) for entry in self.entries)

    def names(self, tenant: str | None) -> list[str]:
        """Return what a conversation of a tenant may name, in the operator's order; None: of any tenant."""
        names = [entry.name for entry in self.entries if tenant is None or entry.is_for(tenant)]
        return list(dict.fromkeys([*names, *(f"{prefix}FILE" for prefix in SCRIPT_PREFIXES if self.has_scripts)]))


def check_offered(names: Iterable[str], tenant: str, tables: Iterable[ModelTable]) -> None:
    """Refuse a model that none of the tables offers to a tenant.

    Raises:
        ModelNotOffered: names those that the tenant may use.
    """
    known = list(tables)
    for name in names:
        if not any(table.offers(name, tenant) for table in known):
            raise not_offered(name, tenant, known)


def not_offered(name: str, tenant: str, tables: Iterable[ModelTable]) -> ModelNotOffered:
    """Return the error that says that a model is not offered to a tenant, with the list of those that are."""
    offered = sorted({name for table in tables for name in table.names(tenant)})
    more = f" and {len(offered) - SHOWN_NAMES} more" if len(offered) > SHOWN_NAMES else ""
    return ModelNotOffered(
        f"The model {_shown(name)} is not offered here." if name else "There is no default model here for this tenant.",
        remedy=f"Offered models: {', '.join(offered[:SHOWN_NAMES]) + more if offered else 'none'}.",
    )


def named_models(spec: Any) -> Iterator[str]:
    """Yield the name of every model that a specification names, in each of its parts."""
    if isinstance(spec, LLMSpec):
        if spec.model is not None:
            yield spec.model
    elif isinstance(spec, LoopPolicy):
        if spec.fallback_model is not None:
            yield spec.fallback_model
    elif isinstance(spec, BaseModel):
        for field in type(spec).model_fields:
            yield from named_models(getattr(spec, field))
    elif isinstance(spec, dict):
        for value in spec.values():
            yield from named_models(value)
    elif isinstance(spec, list | tuple):
        for value in spec:
            yield from named_models(value)


def _shown(name: str) -> str:
    """Return a name that anybody may have chosen as an error may show it."""
    shown = ascii(name[:SHOWN_CHARS])
    return shown if len(name) <= SHOWN_CHARS else f"{shown[:-1]}…'"
