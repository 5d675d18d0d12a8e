"""An operator's rules for tenants: their shares when capacity is short, and their bounds.

Holds: a cluster has one table; each controller worker with a table puts it into force when it starts. If there is a
rule `*`, all tenants without a rule share its weight and its bounds, so inventing names gains nothing.
Keys: `deck:{k}:tenants`, see turns.lua and admission.lua.
"""

from __future__ import annotations

import asyncio
import math
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from broker.contract import NAME_PATTERN
from broker.runtime import UsageError
from broker.store import Argument, Store, decode_fields

POOL_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
OTHER_TENANTS = "*"
"""All tenants without a rule."""
MEMORY = ":memory"
SETTING = "DECKHANDS_TENANTS"
_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class TenantRule(BaseModel):
    """The rule for one tenant.

    Attributes:
        weight: its share of scarce capacity, relative to other tenants.
        max_open: maximum number of its unsettled conversations; None for any number.
        submissions_per_minute: maximum number of conversations that may start in a minute; None for any number.
        pools: pools of tool workers that its conversations may use; None for any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0.001, le=1000)
    max_open: Annotated[int, Field(ge=1)] | None = None
    submissions_per_minute: Annotated[int, Field(ge=1)] | None = None
    pools: Annotated[tuple[Annotated[str, Field(pattern=POOL_PATTERN)], ...], Field(min_length=1)] | None = None


def _expand_weights(rules: Any) -> Any:
    """Accept `acme = 3` for `[tenants.acme] weight = 3`, and refuse invalid tenant names."""
    if not isinstance(rules, dict):
        return rules
    for name in rules:
        if name != OTHER_TENANTS and not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"invalid tenant name {name!r}")
    return {name: {"weight": rule} if isinstance(rule, int | float) else rule for name, rule in rules.items()}


TenantRules = Annotated[dict[str, TenantRule], BeforeValidator(_expand_weights)]
"""Rules by tenant name, in the format of the operator's file."""


class TenantTable(BaseModel):
    """Rules for tenants, by name. `*` stands for tenants without a rule."""

    model_config = ConfigDict(frozen=True)

    rules: TenantRules = Field(default_factory=dict)

    @classmethod
    def load_setting(cls, setting: str) -> Self:
        """Read the value of DECKHANDS_TENANTS: empty, the path of a file, or the table itself.

        Raises:
            UsageError: the file cannot be read, or the table is invalid.
        """
        text = setting.strip()
        if not text:
            return cls()
        if not re.match(r"\[|tenants\s*[.=]", text):
            try:
                text = Path(text).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"The table of tenants {setting!r} cannot be read: {error}.",
                    remedy=f"{SETTING} is the path of a TOML file with a table [tenants], or the table itself.",
                ) from None
        try:
            entries = tomllib.loads(text)
            if unknown := sorted(entries.keys() - {"tenants", "quota"}):  # one file may hold the quotas too
                raise UsageError(
                    f"The table of tenants cannot be used: {unknown[0]!r} is not allowed next to [tenants].",
                    remedy="Put the rules of a tenant under [tenants.NAME].",
                )
            return cls(rules=entries.get("tenants", {}))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"The table of tenants is not TOML: {error}.") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:]) or "[tenants]"
            complaint = str(first["msg"]).removeprefix("Value error, ")
            raise UsageError(f"The table of tenants cannot be used: {where}: {complaint}.") from None

    def merge(self, other: TenantTable) -> TenantTable:
        """Merge both tables.

        Raises:
            UsageError: they have different rules for a tenant.
        """
        for name in sorted(self.rules.keys() & other.rules.keys()):
            if self.rules[name] != other.rules[name]:
                raise UsageError(
                    f"DECKHANDS_QUOTAS and {SETTING} have different rules for the tenant {name!r}.",
                    remedy="Leave [tenants] out of the quota table, or let both name one file.",
                )
        return TenantTable(rules={**other.rules, **self.rules})

    def find_share(self, tenant: str) -> tuple[str, float]:
        """Return the name of a tenant's share in the fair queue, and its weight."""
        if tenant in self.rules:
            return tenant, self.rules[tenant].weight
        if OTHER_TENANTS in self.rules:
            return OTHER_TENANTS, self.rules[OTHER_TENANTS].weight
        return tenant, 1.0


def parse_memory_bound(setting: str) -> float:
    """Parse DECKHANDS_ADMIT_MEMORY.

    A number up to 1 is a share of the server's `maxmemory`, a larger one counts bytes, and 0 means no bound.

    Raises:
        UsageError: it is none of these.
    """
    text = setting.strip().lower()
    if text == "none":
        return 0.0
    if (share := re.fullmatch(r"(\d{1,3})%", text)) and 1 <= int(share[1]) <= 100:
        return int(share[1]) / 100
    if (size := re.fullmatch(r"(\d{1,15})([kmgt]?)i?b?", text)) and int(size[1]) * _SIZES[size[2]] > 1:
        return float(int(size[1]) * _SIZES[size[2]])
    raise UsageError(
        f"DECKHANDS_ADMIT_MEMORY is {setting!r}.", remedy="Use a share of maxmemory (80%), a size (6GiB), or none."
    )


async def publish_tenants(store: Store, table: TenantTable, memory: float | None) -> None:
    """Put a table and a bound of the store's memory into force for all workers. Idempotent.

    Args:
        memory: see `parse_memory_bound`; None for the default.
    """
    fields: list[Argument] = []
    for name, rule in table.rules.items():
        # Each shard counts only its part of a tenant's starts.
        pace = (rule.submissions_per_minute or 0) / store.shards
        pools = f" {','.join(rule.pools)}" if rule.pools else ""
        fields += [name, f"{rule.weight:.6f} {rule.max_open or 0} {math.floor(pace * 1e6) / 1e6:.6f}{pools}"]
    if memory is not None:
        fields += [MEMORY, f"{memory:.6f}"]
    shards = store.all_shards
    await asyncio.gather(*(store.call_function("deck_set_tenants", (names.root,), *fields) for names in shards))


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """The rule in force for a tenant, or for all without one (`*`), and how many of its conversations are open.

    Attributes:
        pools: the pools of tool workers that it may use; empty for any.
    """

    name: str
    weight: float
    max_open: int | None
    submissions_per_minute: float | None
    pools: tuple[str, ...]
    open: int


async def load_tenants(store: Store) -> list[TenantStatus]:
    """Return the rules in force, by name. Unreadable ones are left out; the store treats them as none."""
    shards = store.all_shards
    flat = await store.call("HGETALL", shards[0].tenants)
    rules = {name: rule for name, rule in decode_fields(flat).items() if name != MEMORY}
    names = sorted(rules)
    commands = [("ZCARD", shard.open_conversations(name)) for name in names for shard in shards]
    counts = await store.call_many(commands) if commands else []
    found = []
    for at, name in enumerate(names):
        parts = rules[name].split(" ")
        with suppress(ValueError, IndexError):
            weight, max_open, pace = float(parts[0]), int(parts[1]), float(parts[2])
            pools = tuple(parts[3].split(",")) if len(parts) > 3 else ()
            open_ones = sum(counts[at * len(shards) : (at + 1) * len(shards)])
            a_minute = round(pace * len(shards), 3) or None
            found.append(TenantStatus(name, weight, max_open or None, a_minute, pools, open_ones))
    return found
