"""The quota table: the limits of each provider, and the replicas of each model, written by an operator in TOML.

Holds: an invalid table is refused when it is read, with the place of the error. A model without an entry has no quota
and adds no cost. Addresses come from this file alone: the store has names of replicas only.
Does not: hold API keys, only the names of their environment variables.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from broker.contract import NAME_PATTERN
from broker.limits.tenants import TenantRules, TenantTable
from broker.runtime import UsageError

OWN_KEY = "own"
"""The name of an entry without `key_env`: the worker's default key."""

REPLICA_PREFIX = "at_"
_FLAT = re.compile(r"[^A-Za-z0-9_.-]+")

MAX_TENANTS = 1_000
Amount = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class QuotaKey:
    """How a call under a quota differs from the settings of its model.

    Attributes:
        env: the environment variable with the key; None for the configured key.
        base_url: the address of the replica; None for the configured address.
    """

    env: str | None = None
    base_url: str | None = None


class Quota(BaseModel):
    """The limits of one key of one model, or of one replica. None means no limit.

    Attributes:
        model: its name in conversations. `*` and `?` match; all models that match share one quota.
        tenants: the tenants whose calls it applies to; empty for all tenants without a quota of their own.
        key_env: the environment variable of controller workers that holds the key; None for their default key.
        base_url: the address of a replica of the model, which the entry is for; None for the model's own address.
        cache_tokens: how many tokens the replica's prefix cache holds; None for what the replica reports.
        tokens_per_minute: input and output together, for providers that count both.
        requests_per_day, tokens_per_day: from `day_starts_hour_utc` to the same hour of the next day.
        burst_seconds: how many seconds' worth may be used at once after a quiet time.
        cached_input_counts: whether tokens read from the provider's cache count as input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    tenants: tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...] = Field(default=(), max_length=MAX_TENANTS)
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    base_url: str | None = None
    cache_tokens: Amount | None = None
    requests_per_minute: Amount | None = None
    input_tokens_per_minute: Amount | None = None
    output_tokens_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrency: Amount | None = None
    requests_per_day: Amount | None = None
    tokens_per_day: Amount | None = None
    day_starts_hour_utc: int = Field(default=0, ge=0, le=23)
    burst_seconds: float = Field(default=1.0, gt=0, le=60)
    cached_input_counts: bool = True

    @field_validator("base_url")
    @classmethod
    def _is_plain_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a bad port or bad brackets
            is_plain = False
        if not is_plain or "@" in parts.netloc or re.search(r"\s", value):
            raise ValueError("it is not an address; write one such as http://host:8000/v1")  # its text may be a key
        return value.rstrip("/")

    @model_validator(mode="after")
    def _belongs_to_one_model(self) -> Self:
        if self.base_url is not None and set(self.model) & set("*?["):
            raise ValueError(f"a replica needs the exact name of its model, not {self.model!r}")
        if self.cache_tokens is not None and self.base_url is None:
            raise ValueError("cache_tokens is for replicas; write base_url, too")
        return self

    @property
    def key(self) -> str:
        """The name of its key, or of the replica."""
        if self.base_url is None:
            return self.key_env or OWN_KEY
        return REPLICA_PREFIX + re.sub(r"[^A-Za-z0-9]+", "_", self.base_url.partition("://")[2])

    @property
    def call_key(self) -> QuotaKey | None:
        """How its calls differ from the model's settings; None if they do not."""
        found = QuotaKey(self.key_env, self.base_url)
        return None if found == QuotaKey() else found

    @property
    def per_minute(self) -> Mapping[str, int | None]:
        """The limits per minute, by their names in providers' headers: `requests`, `input`, `output`, `tokens`."""
        return {
            "requests": self.requests_per_minute,
            "input": self.input_tokens_per_minute,
            "output": self.output_tokens_per_minute,
            "tokens": self.tokens_per_minute,
        }

    def is_below_burst(self, left: Mapping[str, int]) -> bool:
        """Return whether a remaining amount is below the burst size, so that it must be applied."""
        limits = self.per_minute
        return any((limits.get(what) or 0) * self.burst_seconds / 60 > amount for what, amount in left.items())

    def render_limits(self) -> str:
        """Return the limits in the format of the store's functions."""
        values = {
            **self.per_minute,
            "concurrency": self.concurrency,
            "day_requests": self.requests_per_day,
            "day_tokens": self.tokens_per_day,
            "day_start": self.day_starts_hour_utc * 3600,
            "burst": f"{self.burst_seconds:.6f}",
            "replica": None if self.base_url is None else 1,
            "cache": self.cache_tokens,
        }
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


class QuotaPool(BaseModel):
    """The keys of one model, which share one queue; for some tenants, or for all."""

    model_config = ConfigDict(frozen=True)

    model: str
    quotas: tuple[Quota, ...]
    tenants: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name in listings: the model and, after `@`, its tenants."""
        return f"{self.model}@{','.join(self.tenants)}" if self.tenants else self.model

    @property
    def name(self) -> str:
        """The base name of its keys in the store."""
        text = self.title
        for sign, word in (("*", "-any-"), ("?", "-one-"), ("@", "-for-"), (",", "-and-")):
            text = text.replace(sign, word)
        return _FLAT.sub("_", text)

    def serves(self, model: str, tenant: str) -> bool:
        """Return whether this quota applies to a call."""
        return (not self.tenants or tenant in self.tenants) and fnmatch.fnmatchcase(model, self.model)

    @property
    def has_replicas(self) -> bool:
        """Whether its keys are engines at several addresses."""
        return any(quota.base_url is not None for quota in self.quotas)

    def find_quota(self, key: str) -> Quota | None:
        """Return the quota of one of its keys; None if it has no such key."""
        return next((quota for quota in self.quotas if quota.key == key), None)


class QuotaTable(BaseModel):
    """All quotas, and the tenants' shares when capacity is short.

    Attributes:
        pools: the pools in the order of the file; the first one that matches a model applies.
        tenants: their weights, the same as in the table of DECKHANDS_TENANTS.
        path: the file that it was read from; None for a table on one line.
    """

    model_config = ConfigDict(frozen=True)

    pools: tuple[QuotaPool, ...] = ()
    tenants: TenantTable = TenantTable()
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a table.

        Raises:
            UsageError: it is not TOML, or an entry is invalid.
        """
        try:
            entries = _QuotaFile.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"The quota table is not TOML: {error}.") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            complaint = str(first["msg"]).removeprefix("Value error, ")
            raise UsageError(f"The quota table cannot be used: {where}: {complaint}.") from None
        by_model: dict[tuple[str, tuple[str, ...]], list[Quota]] = {}
        for quota in entries.quota:
            by_model.setdefault((quota.model, tuple(sorted(quota.tenants))), []).append(quota)
        pools = tuple(
            QuotaPool(model=model, quotas=tuple(quotas), tenants=tenants)
            for (model, tenants), quotas in by_model.items()
        )
        return cls(pools=pools, tenants=TenantTable(rules=entries.tenants))

    @classmethod
    def load_setting(cls, setting: str) -> Self:
        """Read the value of DECKHANDS_QUOTAS: empty, the path of a file, or the table itself.

        Raises:
            UsageError: the file cannot be read, or the table is invalid.
        """
        if not setting.strip():
            return cls()
        if setting.lstrip().startswith("["):
            return cls.parse(setting)
        try:
            path = Path(setting).expanduser()
            return cls.parse(path.read_text(encoding="utf-8")).model_copy(update={"path": path})
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"The quota table {setting!r} cannot be read: {error}.",
                remedy="DECKHANDS_QUOTAS is the path of a TOML file, or the table itself.",
            ) from None

    def read_again(self) -> Self:
        """Return the table of the file as it is now, with the same tenants.

        Raises:
            UsageError: the file cannot be read, or the table is invalid.
        """
        if self.path is None:
            return self
        return self.load_setting(str(self.path)).model_copy(update={"tenants": self.tenants})

    def find_pool(self, model: str, tenant: str) -> QuotaPool | None:
        """Return the pool of a tenant's calls of a model; None if they have no quota."""
        return next((pool for pool in self.pools if pool.serves(model, tenant)), None)

    def has_key(self, model: str, key_env: str) -> bool:
        """Return whether calls of a model, of any tenant, may be made with a key."""
        tenants = {"", *(tenant for pool in self.pools for tenant in pool.tenants)}
        pools = {pool.name: pool for tenant in tenants if (pool := self.find_pool(model, tenant)) is not None}
        return any(quota.key_env == key_env for pool in pools.values() for quota in pool.quotas)


class _QuotaFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    quota: tuple[Quota, ...] = ()
    tenants: TenantRules = Field(default_factory=dict)

    @field_validator("quota")
    @classmethod
    def _keys_are_named_once(cls, quotas: tuple[Quota, ...]) -> tuple[Quota, ...]:
        named: set[tuple[str, tuple[str, ...], str]] = set()
        kinds: dict[tuple[str, tuple[str, ...]], bool] = {}
        for_all: set[str] = set()
        for quota in quotas:
            one = quota.model, tuple(sorted(quota.tenants)), quota.key
            if one in named:
                what = quota.base_url or quota.key_env or "its usual key"
                raise ValueError(f"{quota.model!r} has two entries for {what}")
            if kinds.setdefault(one[:2], quota.base_url is not None) != (quota.base_url is not None):
                raise ValueError(f"every entry of {quota.model!r} needs a base_url, or none of them")
            if quota.tenants and quota.model in for_all:
                raise ValueError(
                    f"the entry of {quota.model!r} for {', '.join(quota.tenants)} never applies, because one for all "
                    "tenants is before it"
                )
            named.add(one)
            if not quota.tenants:
                for_all.add(quota.model)
        return quotas
