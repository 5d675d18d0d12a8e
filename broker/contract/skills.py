"""Skills: Markdown files with instructions for an agent, shown always or once a word is mentioned (OpenHands 9.7).

A file is text after optional YAML front matter: `name`, `triggers` (words), `inputs` (of a task). A skill without
triggers and inputs is always shown. `AGENTS.md`, `.cursorrules` and `.openhands_instructions` are such files too.

Holds: an invalid skill file is left out and reported with the reason. The cost of reading a file is linear in its
length, see `broker.runtime.front_matter`.
Differs: an invalid file does not affect others; the original then loads none. The front matter may name a skill; if
another file of the folder has that name, the file is named by its path, as all are in the original.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from broker.contract.plain_json import replace_surrogates
from broker.contract.specs import Skill

SKILL_FOLDERS = (".openhands/microagents", ".openhands/skills")
"""Below a workspace and a user's home directory. A skill of a later folder replaces one of the same name."""
INSTRUCTION_FILES = {
    "agents.md": "agents",
    "agent.md": "agents",
    ".cursorrules": "cursorrules",
    ".openhands_instructions": "repo_legacy",
}
"""Files in the top folder of a workspace, in lower case, and the skill name of each."""
FILE_MARK = "deckhands-skill:"
"""The prefix of a survey line that holds the path of a file and its text in base64."""
SETUP_SCRIPT, HOOK_SCRIPT = ".openhands/setup.sh", ".openhands/pre-commit.sh"
"""Scripts of a repository that run before an agent's first step and before each commit (OpenHands 10.1)."""
SCRIPT_MARK = "deckhands-script:"
"""The prefix of a survey line that names one of these scripts."""
MAX_SKILL_BYTES = 64 * 1024
MAX_SKILLS = 200
MAX_TRIGGERS = 100
MAX_UNREADABLE = 20
"""How many invalid skill files are reported."""
MAX_SHOWN_PATH_CHARS = 200
MAX_PERSONAL_CHARS = 16_000
"""The limit for a user's own skills, because they are part of a conversation's first event, which is never
shortened."""
ASK_FOR_INPUTS = "\n\nIf the person did not provide any of these variables, ask for them before you begin: {names}."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SkillFiles:
    """The skills found in files.

    Attributes:
        skills: in the order of the files. If two folders have a skill of the same name, the later one.
        unreadable: the path and the error of each invalid skill file.
    """

    skills: tuple[Skill, ...] = ()
    unreadable: tuple[str, ...] = ()


NO_SKILLS = SkillFiles()


class SkillReader:
    """Collects skills from the files of a workspace or a home directory, one at a time."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Skill]] = {}
        self._unreadable: list[str] = []

    def add(self, path: str, text: str) -> None:
        """Read a file, given its path in the workspace or home directory. Files that are not skills are ignored."""
        name = _name_of(path)
        if name is None or not text.strip():
            return
        folder = next((folder for folder in SKILL_FOLDERS if path.startswith(folder + "/")), "")
        taken = [taken for taken, (other, _) in self._found.items() if other == folder]
        try:
            skill = parse_skill(name, text, path=path, taken=taken)
        except ValueError as error:
            self._unreadable.append(f"{_render_path(path)}: {error}")
            return
        self._found.pop(skill.name, None)
        self._found[skill.name] = (folder, skill)

    def to_skill_files(self) -> SkillFiles:
        """Return the skills found so far."""
        left = len(self._unreadable) - MAX_UNREADABLE
        more = [f"and {left} more files"] if left > 0 else []
        return SkillFiles(
            tuple(skill for _, skill in self._found.values()), (*self._unreadable[:MAX_UNREADABLE], *more)
        )


def parse_skill(name: str, text: str, *, path: str = "", taken: Container[str] = ()) -> Skill:
    """Read a skill.

    Args:
        name: the name if the file does not give one.
        path: the name if both names are taken.
        taken: names used by other files of the same folder.

    Raises:
        ValueError: the front matter is not YAML, or its fields are invalid.
    """
    head, content = _split_front_matter(text)
    given = head.get("name")
    triggers = _parse_triggers(head.get("triggers"))
    inputs = head.get("inputs")
    names = [given, name] if isinstance(given, str) and given.strip() and given != "default" else [name]
    name = next((each for each in names if each not in taken), path or name)
    if isinstance(inputs, list) and inputs:
        triggers = tuple(dict.fromkeys((*triggers, f"/{name}")))
        names = [str(item["name"]) for item in inputs if isinstance(item, dict) and "name" in item]
        content += ASK_FOR_INPUTS.format(names=", ".join(names)) if names else ""
    return Skill(name=replace_surrogates(name), content=replace_surrogates(content.strip()), triggers=triggers)


def parse_skills(files: Iterable[tuple[str, str]]) -> SkillFiles:
    """Read skills from pairs of a path and a text, see `SkillReader`."""
    reader = SkillReader()
    for path, text in files:
        reader.add(path, text)
    return reader.to_skill_files()


def load_skills(home: Path) -> tuple[Skill, ...]:
    """Return a user's own skills below `home`. Skills beyond `MAX_PERSONAL_CHARS` are left out with a warning."""
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
    read = parse_skills(files)
    for unreadable in read.unreadable:
        _log.warning("Left out of the skills in %s: %s", home, unreadable)
    for skill in read.skills:
        if sum(len(other.content) for other in (*found, skill)) > MAX_PERSONAL_CHARS:
            _log.warning(
                "The skill %s is left out: all skills together exceed %d characters", skill.name, MAX_PERSONAL_CHARS
            )
            continue
        found.append(skill)
    return tuple(found)


def find_trigger(words: Iterable[str], text: str) -> str:
    """Return the first of these words that a text contains, ignoring case; empty if there is none.

    Args:
        text: in lower case.
    """
    return next((word for word in words if word.lower() in text), "")


def _name_of(path: str) -> str | None:
    """Return the name of the skill in a file: its path within its folder, without the suffix."""
    for folder in SKILL_FOLDERS:
        if path.startswith(folder + "/") and path.lower().endswith(".md"):
            inner = PurePosixPath(path).relative_to(folder)
            return None if inner.name.lower() == "readme.md" else inner.with_suffix("").as_posix()
    return INSTRUCTION_FILES.get(path.lower())


def _split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Split a file into front matter and text."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        return {}, text
    end = text.find("\n---", 3)
    if end < 0:
        return {}, text
    from broker.runtime import parse_front_matter  # imports YAML

    return parse_front_matter(text[4:end]), text[end + 4 :].partition("\n")[2]


def _parse_triggers(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("`triggers` is not a list")  # noqa: TRY004  (callers collect ValueError)
    words = [replace_surrogates(word).strip() for word in value if isinstance(word, str) and word.strip()]
    if len(words) > MAX_TRIGGERS:
        raise ValueError(f"`triggers` has {len(words)} words; {MAX_TRIGGERS} are allowed")
    return tuple(words)


def _render_path(path: str) -> str:
    """Render an untrusted path on one line, so that it cannot imitate another path."""
    path = replace_surrogates(path)[:MAX_SHOWN_PATH_CHARS]
    return path if path.isprintable() else repr(path)
