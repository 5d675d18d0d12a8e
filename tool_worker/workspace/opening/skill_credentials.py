"""The operator's credentials for private sources of skills: a TOML table by the rules of `DECKHANDS_SKILL_SOURCES`.

    ["acme=git.example.com/acme"]
    user = "deploy"
    password_file = "/run/secrets/acme-git"

    ["files.example.com:8443/skills"]
    password = "${FILES_TOKEN}"

Holds: a credential is sent to the host of its rule alone, for sources that the rule allows to the tenant, and over
`https` unless its entry allows otherwise. No error contains it, nor the path of its file.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from broker.contract import ALL_TENANTS, SkillSource, SkillSourceRule
from broker.runtime import VARIABLE, UsageError
from tool_worker.errors import SkillsUnavailable

MAX_TABLE_BYTES = 2**20
MAX_PASSWORD_BYTES = 16_384
DEFAULT_USER = "x-access-token"
"""What forges take beside a token."""
_UNFIT = re.compile(r"[\x00-\x1f\x7f]")
"""In a name or a password; a line end would be a further field of Git's credential protocol."""


class SkillCredential(BaseModel):
    """One entry of the table.

    Attributes:
        rule: the place, and the tenant, as in `DECKHANDS_SKILL_SOURCES`.
        user: the name of HTTP's basic authentication.
        password: a password or token; `${NAME}` is replaced by an environment variable.
        password_file: the absolute path of a file with it, read for each fetch.
        allows_http: whether it may be sent unencrypted, if a task names the source by `http`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    rule: SkillSourceRule
    user: Annotated[str, Field(pattern=r"^[^:\x00-\x1f\x7f]+$", max_length=200)] = DEFAULT_USER
    password: Annotated[str, Field(max_length=MAX_PASSWORD_BYTES)] = Field(default="", repr=False)
    password_file: Path | None = None
    allows_http: bool = False

    @model_validator(mode="after")
    def _is_one_password(self) -> Self:
        if bool(self.password) == (self.password_file is not None):
            raise ValueError("give exactly one of password and password_file")
        if _UNFIT.search(self.password):
            raise ValueError("password has a control character")
        if self.password_file is not None and not self.password_file.is_absolute():
            raise ValueError("password_file is not an absolute path")
        if self.rule.place.startswith("/"):
            raise ValueError("a folder needs no password")
        return self

    @property
    def scope(self) -> str:
        """The rule as text, which tells content that this credential has fetched from any other."""
        return f"{self.rule.tenant}={self.rule.place}"

    async def load_password(self, source: SkillSource) -> str:
        """Return the password for a source.

        Raises:
            SkillsUnavailable: it may not be sent to this address, or cannot be read.
        """
        if source.address.startswith("http:") and not self.allows_http:
            raise SkillsUnavailable(
                f"{source.address} cannot be fetched: its password is not sent unencrypted.",
                remedy="Name the source by https.",
            )
        if self.password_file is None:
            return self.password
        try:
            return await asyncio.to_thread(_read_password, self.password_file)
        except (OSError, ValueError):
            raise SkillsUnavailable(
                f"{source.address} cannot be fetched: the tool worker cannot read its password.",
                remedy="The operator checks the password_file of this place: one line of text in a regular file.",
            ) from None


def read_skill_credentials(
    path: Path, rules: Sequence[SkillSourceRule], environment: Mapping[str, str]
) -> tuple[SkillCredential, ...]:
    """Read the operator's table, a TOML file.

    Args:
        rules: what tasks may name; each entry is for one of them.

    Raises:
        UsageError: it cannot be read or used; the text names the entry and never a password.
    """
    try:
        with path.open("rb") as file:
            entries = tomllib.loads(file.read(MAX_TABLE_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a table of credentials for skills: {type(error).__name__}.",
            remedy='Write TOML: ["git.example.com/team"] password_file = …',
        ) from None
    return tuple(_parse_credential(name, entry, rules, environment) for name, entry in entries.items())


def choose_credential(
    credentials: Iterable[SkillCredential], source: SkillSource, tenant: str
) -> SkillCredential | None:
    """Return the credential for a source that a tenant names: of several, that of the longest place."""
    fitting = [credential for credential in credentials if credential.rule.allows(source, tenant)]
    return max(fitting, key=lambda one: (len(one.rule.place), one.rule.tenant != ALL_TENANTS), default=None)


def _parse_credential(
    name: str, entry: object, rules: Sequence[SkillSourceRule], environment: Mapping[str, str]
) -> SkillCredential:
    def variable(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise UsageError(
                f"The credential for {name!r} needs the variable {found[1]}, which is not set.",
                remedy=f"Set {found[1]}.",
            )
        return environment[found[1]]

    try:
        rule = SkillSourceRule.parse(name)
        fields: dict[str, Any] = dict(entry) if isinstance(entry, dict) else {"entry": entry}
        if isinstance(fields.get("password"), str):
            fields["password"] = VARIABLE.sub(variable, fields["password"])
        credential = SkillCredential.model_validate({**fields, "rule": rule})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
    except ValueError as error:
        why = str(error)
    else:
        if rule in rules:
            return credential
        why = "DECKHANDS_SKILL_SOURCES has no such place"
    raise UsageError(f"The credential for {name!r} cannot be used: {why}.", remedy="Change its entry.")


def _read_password(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        text = file.read(MAX_PASSWORD_BYTES + 1).decode().rstrip("\r\n")
    if not text or len(text) > MAX_PASSWORD_BYTES or _UNFIT.search(text):
        raise ValueError("no password")
    return text
