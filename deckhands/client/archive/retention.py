"""The retention policy: how long conversations stay in the store, written by the operator in TOML.

    [[rule]]
    tenant = "acme"            # optional; several: tenant = ["acme", "shop"]
    labels = {team = "ci"}     # optional; all of them must match
    states = ["finished"]      # optional; see `deckhands ls --state`
    age = "30d"                # since its last event: s, m, h, d or w; "never": keep it
    then = "archive"           # the default; "delete": without an archive, permanently

The first matching rule applies; a conversation that matches none is kept.

Holds: an invalid table is refused when it is read. Nothing is deleted without a file in the archive unless a rule has
`then = "delete"`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from broker.contract import AgentState
from broker.runtime import UsageError

NEVER = "never"
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d{1,6})([smhdw])")


def _parse_age(value: Any) -> Any:
    if value == NEVER:
        return None
    match = _AGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('write a number and s, m, h, d or w, such as "30d", or "never"')
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def _to_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class RetentionRule(BaseModel):
    """A rule for the conversations that match it.

    Attributes:
        tenant: any of these tenants; "" is a conversation without one. None: any.
        states: any of these states; empty: any.
        age: since the last event; None: they are kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: Annotated[tuple[str, ...] | None, BeforeValidator(_to_several)] = None
    labels: dict[str, str] = Field(default_factory=dict)
    states: Annotated[tuple[AgentState, ...], BeforeValidator(_to_several)] = ()
    age: Annotated[timedelta | None, BeforeValidator(_parse_age)]
    then: Literal["archive", "delete"] = "archive"

    def matches(self, *, tenant: str, labels: Mapping[str, str], state: str) -> bool:
        """Return whether a conversation matches."""
        is_tenant = self.tenant is None or tenant in self.tenant
        return is_tenant and self.labels.items() <= labels.items() and (not self.states or state in self.states)


class Retention(BaseModel):
    """All rules, in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: tuple[RetentionRule, ...] = ()

    @classmethod
    def of_setting(cls, path: str) -> Self:
        """Read the file that DECKHANDS_RETENTION names; without one, everything is kept.

        Raises:
            UsageError: it cannot be read or used.
        """
        if not path:
            return cls()
        try:
            return cls.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"The retention rules in {path} cannot be read: {error}.") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UsageError(
                f"The retention rules in {path} cannot be used: {place}: {first['msg']}.", remedy="See docs/archive.md."
            ) from error

    @property
    def youngest(self) -> timedelta | None:
        """The lowest age at which a conversation leaves the store; None if none ever does."""
        return min((rule.age for rule in self.rule if rule.age is not None), default=None)

    def rule_for(self, *, tenant: str, labels: Mapping[str, str], state: str) -> RetentionRule | None:
        """Return the rule that applies to a conversation; None: it is kept."""
        return next((rule for rule in self.rule if rule.matches(tenant=tenant, labels=labels, state=state)), None)

    def warning(self, archive: str) -> str:
        """Return a warning that conversations are deleted permanently, or never leave the store; or empty.

        Args:
            archive: DECKHANDS_ARCHIVE; empty: there is none.
        """
        leaving = [rule.then for rule in self.rule if rule.age is not None]
        if "delete" in leaving:
            number = leaving.count("delete")
            rules = "a retention rule deletes" if number == 1 else f"{number} retention rules delete"
            return f"{rules} conversations permanently, without an archive."
        if "archive" in leaving and not archive:
            return "retention rules archive conversations, but DECKHANDS_ARCHIVE is not set: nothing leaves the store."
        return ""
