"""What an operator has said of tenants: how much each gets when there is not enough, and how much each may have.

Holds: one table for a cluster; each controller worker that has one puts it in force for everybody when it starts. A
tenant that it does not name belongs to `*`, if it names that: all of them together have its weight and its bounds, so
nobody gains by making up names.
Keys: `deck:{k}:tenants`, see turns.lua and admission.lua.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from broker.contract import NAME_PATTERN
from broker.runtime import UsageError
from broker.store import Argument, Store

OTHERS = "*"
"""All tenants that are not named."""
MEMORY = ":memory"
SETTING = "DECKHANDS_TENANTS"
_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class TenantRule(BaseModel):
    """What is said of one tenant.

    Attributes:
        weight: its share of what is scarce, beside the weights of the others.
        max_open: how many of its conversations may be unsettled at once; None: any number.
        submissions_per_minute: how many may begin in a minute; None: any number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0.001, le=1000)
    max_open: Annotated[int, Field(ge=1)] | None = None
    submissions_per_minute: Annotated[int, Field(ge=1)] | None = None


def _weights_alone(rules: Any) -> Any:
    """Take `acme = 3` for `[tenants.acme] weight = 3`, and refuse what no tenant can be called."""
    if not isinstance(rules, dict):
        return rules
    for name in rules:
        if name != OTHERS and not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"no tenant is called {name!r}")
    return {name: {"weight": rule} if isinstance(rule, int | float) else rule for name, rule in rules.items()}


TenantRules = Annotated[dict[str, TenantRule], BeforeValidator(_weights_alone)]
"""By the names of tenants, as a person writes them."""


class TenantTable(BaseModel):
    """What is said of tenants, by name; `*` stands for those that are not named."""

    model_config = ConfigDict(frozen=True)

    rules: TenantRules = Field(default_factory=dict)

    @classmethod
    def of_setting(cls, setting: str) -> Self:
        """Read what DECKHANDS_TENANTS says: nothing, the path of a file, or the table itself.

        Raises:
            UsageError: the file cannot be read, or the table cannot be used.
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
                    f"The table of tenants cannot be used: there is a {unknown[0]!r} beside [tenants].",
                    remedy="Put what concerns a tenant under [tenants.NAME].",
                )
            return cls(rules=entries.get("tenants", {}))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"The table of tenants is not TOML: {error}.") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:]) or "[tenants]"
            complaint = str(first["msg"]).removeprefix("Value error, ")
            raise UsageError(f"The table of tenants cannot be used: {where}: {complaint}.") from None

    def beside(self, other: TenantTable) -> TenantTable:
        """Return both tables as one.

        Raises:
            UsageError: they say different things of a tenant.
        """
        for name in sorted(self.rules.keys() & other.rules.keys()):
            if self.rules[name] != other.rules[name]:
                raise UsageError(
                    f"DECKHANDS_QUOTAS and {SETTING} say different things of the tenant {name!r}.",
                    remedy="Leave [tenants] out of the quota table, or let both name one file.",
                )
        return TenantTable(rules={**other.rules, **self.rules})

    def share_of(self, tenant: str) -> tuple[str, float]:
        """Return under which name a tenant stands in line, and its weight."""
        if tenant in self.rules:
            return tenant, self.rules[tenant].weight
        if OTHERS in self.rules:
            return OTHERS, self.rules[OTHERS].weight
        return tenant, 1.0


def memory_bound(setting: str) -> float:
    """Read DECKHANDS_ADMIT_MEMORY: up to 1 a share of the server's `maxmemory`, above it bytes, 0 no bound.

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


async def publish(store: Store, table: TenantTable, memory: float | None) -> None:
    """Put a table and a bound of the store's memory in force for everybody. Idempotent.

    Args:
        memory: see `memory_bound`; None: the usual one.
    """
    fields: list[Argument] = []
    for name, rule in table.rules.items():
        # Each shard sees its part of a tenant's beginnings.
        pace = (rule.submissions_per_minute or 0) / store.shards
        fields += [name, f"{rule.weight:.6f} {rule.max_open or 0} {math.floor(pace * 1e6) / 1e6:.6f}"]
    if memory is not None:
        fields += [MEMORY, f"{memory:.6f}"]
    for names in store.all_shards:
        await store.function("deck_set_tenants", (names.root,), *fields)
