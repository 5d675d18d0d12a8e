"""Skills: Markdown files that tell an agent what to know, always or when a word is mentioned (OpenHands 9.7).

A file is text behind optional front matter in YAML: `name`, `triggers` (words), `inputs` (of a task). Without triggers
and inputs it always counts. `AGENTS.md`, `.cursorrules` and `.openhands_instructions` are such files too.

Holds: a file that cannot be read as a skill is left out with a warning; nothing here makes objects of what it reads.
Differs: one bad file spoils no other, because the original then loads none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from broker.events import replace_surrogates
from broker.specs import Skill

SKILL_FOLDERS = (".openhands/microagents", ".openhands/skills")
"""Beneath a workspace and beneath a person's home; a skill of the later folder takes the place of its namesake."""
INSTRUCTION_FILES = {
    "agents.md": "agents",
    "agent.md": "agents",
    ".cursorrules": "cursorrules",
    ".openhands_instructions": "repo_legacy",
}
"""Files in the top folder of a workspace, in small letters, and the name of the skill that each is."""
FILE_MARK = "deckhands-skill:"
"""Begins a line of a survey: the path of a file and its text follow in base64."""
MAX_SKILL_BYTES = 64 * 1024
MAX_SKILLS = 200
MAX_FRONT_MATTER_CHARS = 16_000
MAX_PERSONAL_CHARS = 16_000
"""A person's skills travel in a conversation's first event, which has to stay whole."""
ASK_FOR_INPUTS = "\n\nIf the person did not provide any of these variables, ask for them before you begin: {names}."

_log = logging.getLogger(__name__)


def skill_of(name: str, text: str) -> Skill:
    """Read a skill.

    Args:
        name: for a file without a name of its own.

    Raises:
        ValueError: the front matter is no YAML or not of the form.
    """
    head, content = _split(text)
    given = head.get("name")
    triggers = _words(head.get("triggers"))
    inputs = head.get("inputs")
    name = given if isinstance(given, str) and given.strip() and given != "default" else name
    if isinstance(inputs, list) and inputs:
        triggers = tuple(dict.fromkeys((*triggers, f"/{name}")))
        names = [str(item["name"]) for item in inputs if isinstance(item, dict) and "name" in item]
        content += ASK_FOR_INPUTS.format(names=", ".join(names)) if names else ""
    return Skill(name=replace_surrogates(name), content=replace_surrogates(content.strip()), triggers=triggers)


def skills_of(files: Iterable[tuple[str, str]]) -> tuple[Skill, ...]:
    """Read skills from the files of a workspace or a home.

    Args:
        files: paths relative to it, and their texts; files that are no skills are passed over.

    Returns:
        In the order of the files; of namesakes the latest.
    """
    found: dict[str, Skill] = {}
    for path, text in files:
        name = _name_of(path)
        if name is None or not text.strip():
            continue
        try:
            skill = skill_of(name, text)
        except ValueError as error:
            _log.warning("%s is no skill: %s", path, error)
            continue
        found.pop(skill.name, None)
        found[skill.name] = skill
    return tuple(found.values())


def skills_in(home: Path) -> tuple[Skill, ...]:
    """Return the skills of a person beneath `home`; what exceeds `MAX_PERSONAL_CHARS` is left out with a warning."""
    files: list[tuple[str, str]] = []
    for folder in SKILL_FOLDERS:
        try:
            paths = sorted((home / folder).rglob("*.md"))[:MAX_SKILLS]
        except OSError as error:
            _log.warning("%s cannot be read: %s", home / folder, error.strerror)
            continue
        for path in paths:
            try:
                with path.open("rb") as file:
                    text = file.read(MAX_SKILL_BYTES).decode(errors="replace")
            except OSError as error:
                _log.warning("%s cannot be read: %s", path, error.strerror)
                continue
            files.append((path.relative_to(home).as_posix(), text))
    found: list[Skill] = []
    for skill in skills_of(files):
        if sum(len(other.content) for other in (*found, skill)) > MAX_PERSONAL_CHARS:
            _log.warning(
                "The skill %s is left out: together they have more than %d characters", skill.name, MAX_PERSONAL_CHARS
            )
            continue
        found.append(skill)
    return tuple(found)


def trigger_in(skill: Skill, text: str) -> str:
    """Return the first of the skill's words that a text contains, in whatever case; empty if it contains none."""
    text = text.lower()
    return next((word for word in skill.triggers if word.lower() in text), "")


def _name_of(path: str) -> str | None:
    """Return the name of the skill in a file: its path within its folder, without the suffix."""
    for folder in SKILL_FOLDERS:
        if path.startswith(folder + "/") and path.lower().endswith(".md"):
            inner = PurePosixPath(path).relative_to(folder)
            return None if inner.name.lower() == "readme.md" else inner.with_suffix("").as_posix()
    return INSTRUCTION_FILES.get(path.lower())


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Return front matter and the text behind it."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        return {}, text
    end = text.find("\n---", 3)
    if end < 0 or end > MAX_FRONT_MATTER_CHARS:
        return {}, text
    try:
        head = yaml.safe_load(text[4:end])
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error).replace("\n", " ")) from error
    if head is not None and not isinstance(head, dict):
        raise ValueError("the front matter names nothing")
    return head or {}, text[end + 4 :].partition("\n")[2]


def _words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("`triggers` is no list")  # noqa: TRY004  (callers collect ValueError)
    return tuple(str(replace_surrogates(word)).strip() for word in value if isinstance(word, str) and word.strip())
