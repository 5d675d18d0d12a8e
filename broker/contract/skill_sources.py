"""Sources of skills that a task names, and the rules of the operator for them.

    git+https://HOST/PATH#COMMIT                 a Git repository, pinned by the 40 digits of a commit
    https://HOST/PATH.tar.gz#sha256=DIGEST       an archive (.tar.gz, .tar, .zip), pinned by its digest
    /PATH                                        a folder of the tool workers' machines

A skill in a source is a folder with a `SKILL.md` (AgentSkills).

Holds: an address has one reading: no user name, no query, no escapes and no `..`, so what a rule allows is what is
fetched.
Untrusted: a task may name any source; only `SkillSourceRule.allows` decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from broker.contract.allowed_hosts import parse_authority, render_authority
from broker.contract.skills import SKILL_FOLDERS, check_skill_file

SKILL_SOURCE_PATTERN = (
    r"^(git\+https?://[^\s#]+#[0-9a-fA-F]{40}|https?://[^\s#]+#sha256=[0-9a-fA-F]{64}|/[^\x00-\x1f\x7f]*)$"
)
MAX_SOURCE_CHARS = 1_000
MAX_SKILL_SOURCES = 8
"""Of a task."""
ALL_TENANTS = "*"
_PATH = re.compile(r"(/[A-Za-z0-9._~+@-]+)+/?")
_PORTS = {"https": 443, "http": 80}
_NO_PORT = -1
_SKILL_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FORMS = "write git+https://HOST/PATH#COMMIT, https://HOST/PATH.tar.gz#sha256=DIGEST, or /PATH"


@dataclass(frozen=True, slots=True)
class SkillSource:
    """One source.

    Attributes:
        address: the URL without its pin, or the absolute path of a folder.
        pin: the commit, or the digest of the archive, in lower case; empty for a folder.
        place: the host, with its port unless it is the usual one, and the path, as rules compare them.
    """

    kind: Literal["git", "archive", "folder"]
    address: str
    pin: str
    place: str

    @property
    def authority(self) -> str:
        """The host and the port of an address."""
        parts = urlsplit(self.address)
        return render_authority(*parse_authority(parts.netloc, _PORTS[parts.scheme]))

    @property
    def places(self) -> tuple[str, ...]:
        """The place, and the same with its port."""
        return (self.place, *([] if self.kind == "folder" else [self.authority + _find_path(self.address)]))


def parse_skill_source(text: str) -> SkillSource:
    """Parse a source.

    Raises:
        ValueError: it has another form, or an ambiguous address; the text says what to write.
    """
    if len(text) > MAX_SOURCE_CHARS or not re.fullmatch(SKILL_SOURCE_PATTERN, text):
        raise ValueError(f"{text[:200]!a} is not a source of skills with a pin: {_FORMS}")
    if text.startswith("/"):
        return SkillSource("folder", _parse_folder(text), "", _parse_folder(text))
    address, _, pin = text.removeprefix("git+").partition("#")
    kind: Literal["git", "archive"] = "git" if text.startswith("git+") else "archive"
    place = _parse_place(address, _PORTS[urlsplit(address).scheme])
    return SkillSource(kind, address, pin.removeprefix("sha256=").lower(), place)


@dataclass(frozen=True, slots=True)
class SkillSourceRule:
    """The operator's leave for the sources in one place.

    Attributes:
        tenant: the tenant that may name them; `ALL_TENANTS` for every conversation.
        place: a host, or a host and a path, or a folder; what is below it is meant too. A host without a port means
            the usual one of either scheme.
    """

    tenant: str
    place: str

    @classmethod
    def parse(cls, text: str) -> SkillSourceRule:
        """Parse `PLACE` or `TENANT=PLACE`, such as `acme=git.example.com/acme` or `/srv/skills`.

        Raises:
            ValueError: the rule is invalid; the text says why.
        """
        tenant, mark, place = text.rpartition("=")
        if mark and not tenant:
            raise ValueError(f"{text!r} has no tenant before the `=`")
        place = _parse_folder(place) if place.startswith("/") else _parse_place(f"https://{place}", _NO_PORT)
        return cls(tenant or ALL_TENANTS, place)

    def allows(self, source: SkillSource, tenant: str) -> bool:
        """Return whether a tenant may name a source."""
        below = f"{self.place.rstrip('/')}/"
        is_below = any(place == self.place or place.startswith(below) for place in source.places)
        return is_below and self.tenant in (ALL_TENANTS, tenant)


def find_skill_folders(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders that are skills, each with a slash at its end; the top folder is empty.

    A folder inside a skill belongs to that skill.
    """
    found = sorted(path[: -len("SKILL.md")] for path in paths if path == "SKILL.md" or path.endswith("/SKILL.md"))
    kept: list[str] = []
    for folder in found:
        if not kept or not folder.startswith(kept[-1]):  # sorted, so what is inside a folder follows it
            kept.append(folder)
    return tuple(kept)


def find_skill_name(folder: str, text: str) -> str:
    """Return the name of a skill: that of its folder; the top folder has none, so there `SKILL.md` gives it."""
    found = re.search(r"^name:[ \t]*[\"']?([a-z0-9-]+)", text, re.MULTILINE)
    return PurePosixPath(folder).name or (found[1] if found else "")


def check_skill_folder(name: str, text: str) -> list[str]:
    """Return why a skill from elsewhere cannot be used, as sentences.

    Args:
        text: its `SKILL.md`.
    """
    if not _SKILL_NAME.fullmatch(name):
        return ["its folder has no name of an AgentSkill, of lower-case letters, digits and single hyphens"]
    try:
        return check_skill_file(f"{SKILL_FOLDERS[-1]}/{name}/SKILL.md", text)
    except ValueError as error:
        return [str(error)]


def _parse_folder(text: str) -> str:
    if ".." in text.split("/"):
        raise ValueError(f"{text[:200]!a} has `..` in it")
    return str(PurePosixPath("/" + text.lstrip("/")))


def _parse_place(address: str, usual_port: int) -> str:
    parts = urlsplit(address)
    if (parts.path and not _PATH.fullmatch(parts.path)) or {".", ".."} & set(parts.path.split("/")) or parts.query:
        raise ValueError(
            f"{address[:200]!a} has a path with unusual characters: letters, digits and `._~+@-` between single "
            "slashes are allowed, and no query"
        )
    named = render_authority(*parse_authority(parts.netloc, usual_port)).removesuffix(f":{usual_port}")
    return named + _find_path(address)


def _find_path(address: str) -> str:
    return urlsplit(address).path.rstrip("/")
