r"""Python scorers: functions of the operator that score attempts, as `--scorer FILE.py@FUNCTION`.

An installed module is named as `package.module@function`.

    def brevity(attempt):
        return {"metrics": {"lines": attempt.patch.count("\n")}}

`is_same` compares an answer with the expected one: as normalized text, as a number, or as a list.

Holds: a scorer runs in the evaluating process, not on a worker, and sees no hidden file. An error of a scorer does not
count as a result of the agent.
Does not: isolate the scorer. It must not run or import files of an attempt.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from broker.runtime import UsageError
from deckhands.evaluation.datasets.instances import Instance, ScorerFailed
from deckhands.evaluation.exports.dialogue import DialogueTurn
from deckhands.evaluation.rewards import Rewards, parse_rewards

LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class AttemptToScore:
    """An attempt, for a scorer.

    Attributes:
        number: the attempt's number, from 1.
        message: the agent's last message.
        outcome: `resolved` or `unresolved`, by the check or the answer; empty if neither decides.
        reward: the reward from the check; None if it gave none.
        files: the final files of the workspace, without those that do not count.
        turns: the messages, replies, tool calls and results, in order.
    """

    instance: Instance
    model: str
    number: int
    message: str
    outcome: str
    reward: float | None
    patch: str
    files: Mapping[str, bytes]
    turns: Sequence[DialogueTurn]

    @property
    def task(self) -> str:
        """The task of the agent."""
        return self.instance.task

    @property
    def steps(self) -> list[DialogueTurn]:
        """The agent's replies, for which `steps` of rewards are."""
        return [turn for turn in self.turns if turn.role == "assistant"]


@dataclass(frozen=True, slots=True)
class PythonScorer:
    """A scorer; `name` is the name of its function."""

    name: str
    function: Callable[[AttemptToScore], Any]

    async def score(self, attempt: AttemptToScore) -> Rewards:
        """Score an attempt; its reward is also a metric with the scorer's name.

        Raises:
            ScorerFailed: the function fails, takes too long, or does not return rewards.
        """
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                if inspect.iscoroutinefunction(self.function):
                    value = await self.function(attempt)
                else:
                    value = await asyncio.to_thread(self.function, attempt)
            found = parse_rewards(value)
        except Exception as error:  # any error of the function
            raise ScorerFailed(f"The scorer {self.name}: {type(error).__name__}: {error}") from error
        own = {} if found.reward is None else {self.name: found.reward}
        return replace(found, metrics={**found.metrics, **own})


def to_absolute_scorer(name: str) -> str:
    """Return the name of a scorer, independent of the working directory.

    Raises:
        UsageError: the text is not the name of a scorer.
    """
    path, _, function = name.rpartition("@")
    if not path or not function.isidentifier():
        raise UsageError(f"--scorer {name!r} is not a scorer.", remedy="Write FILE.py@FUNCTION.")
    if _is_module(path):
        return name
    return f"{Path(path).resolve()}@{function}"


def load_scorers(names: Sequence[str]) -> list[PythonScorer]:
    """Load scorers by their absolute names.

    Raises:
        UsageError: a file cannot be loaded, or has no such function.
    """
    found = []
    for name in names:
        path, _, function = name.rpartition("@")
        module = _import_module(path) if _is_module(path) else _load_module(Path(path))
        scorer = getattr(module, function, None)
        if not callable(scorer):
            raise UsageError(f"{path} has no function {function!r}.", remedy="Write --scorer FILE.py@FUNCTION.")
        found.append(PythonScorer(function, scorer))
    return found


def _is_module(name: str) -> bool:
    return not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # any error of the module
        raise UsageError(
            f"The scorer {name} cannot be imported: {type(error).__name__}: {str(error)[:300]}.",
            remedy="Write FILE.py@FUNCTION, or the name of an installed module: package.module@function.",
        ) from error


def _load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"deckhands_scorer_{sha256(bytes(path)).hexdigest()[:12]}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"There is no Python file {path}.", remedy="Write --scorer FILE.py@FUNCTION.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # any error of the file
        raise UsageError(f"The scorer {path} fails: {type(error).__name__}: {str(error)[:300]}.") from error
    return module


FINAL = re.compile(r"final answer\s*:", re.IGNORECASE)
_MARKS = "*_` \t\r\n"
"""Characters that Markdown puts around words."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNITS = str.maketrans("", "", "$%,")
_ONE_NUMBER = re.compile(r"[^,]*|\D*\d{1,3}(,\d{3})+(\.\d*)?\D*")
"""A text whose commas, if any, separate thousands."""


def find_answer(message: str) -> str:
    """Return the text after the last `FINAL ANSWER:`, or the whole message."""
    *before, last = FINAL.split(message)
    return last.strip(_MARKS) if before else last.strip()


def is_same(given: str, expected: str) -> bool:
    """Return whether an answer equals the expected one.

    If a number is expected, the answer is compared as a number, without unit signs and thousands separators. A list
    separated by commas or semicolons is compared element by element. Other text is compared without case, articles,
    punctuation and spaces, unless only these remain.
    """
    if _ONE_NUMBER.fullmatch(expected.strip()) and (number := _number(expected)) is not None:
        return _number(given) == number
    if re.search(r"[,;]", expected):
        ours, theirs = re.split(r"[,;]", given), re.split(r"[,;]", expected)
        return len(ours) == len(theirs) and all(is_same(*pair) for pair in zip(ours, theirs, strict=True))
    if _normalize(expected):
        return _normalize(given) == _normalize(expected)
    return _strip_articles(given) == _strip_articles(expected)


def _number(text: str) -> float | None:
    with suppress(ValueError):
        number = float(text.strip().translate(_UNITS))
        return None if math.isnan(number) else number
    return None


def _normalize(text: str) -> str:
    without = _ARTICLES.sub(" ", text.lower())
    return "".join(char for char in without if char not in string.punctuation and not char.isspace())


def _strip_articles(text: str) -> str:
    """Return a text without articles, and without punctuation unless only punctuation remains."""
    lowered = "".join(text.lower().split())
    return "".join(char for char in lowered if char not in string.punctuation) or lowered
