"""Tasks of inspect_ai as instances: our agents attempt its dataset, and its scorer judges their final messages.

    inspect:FILE.py@TASK

Source: inspect_ai 0.3. The package is imported late, in the evaluating program; no worker needs it.
Holds: the task's `epochs` and its limits on messages, turns, time and cost are the defaults of the evaluation. Other
settings that would change an attempt are named in `left_out`. A sample is used only if nothing of it is lost: its input
is a text, and its files are texts or paths.
Does not: run solvers of the task, since our agent is the solver; support scorers that look into a sandbox.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.runtime import UsageError
from deckhands.evaluation.datasets.file_trees import MemoryFiles, TreeFile
from deckhands.evaluation.datasets.human_eval import make_command_script
from deckhands.evaluation.datasets.instances import MAX_ID_CHARS, DatasetDefaults, Instance, Judge, ScorerFailed
from deckhands.evaluation.datasets.repositories import is_safe
from deckhands.evaluation.rewards import Rewards

INSPECT = "inspect"
EXTRA = "deckhands[inspect]"
KEPT = (
    ("epochs", "attempts", 1.0),
    ("message_limit", "max_iterations", 0.5),
    ("turn_limit", "max_iterations", 1.0),
    ("time_limit", "max_seconds", 1.0),
    ("cost_limit", "max_budget", 1.0),
)
"""Settings of a task, their names here, and the factor between them."""
IGNORED = {
    "token_limit": "attempts are limited by steps, time and cost",
    "working_limit": "attempts are limited by steps, time and cost",
    "epochs_reducer": "the attempts at an instance are averaged",
    "metrics": "the figures are those of the report",
    "model": "--model names the model",
    "model_roles": "--model names the model",
    "approval": "the agent's own rules apply",
    "setup": "no solver of the task runs",
    "cleanup": "no solver of the task runs",
    "early_stopping": "use --until",
    "fail_on_error": "an attempt is repeated after a failure of the infrastructure",
}
"""Settings of a task that attempts do not have, and the reason."""


def inspect_instances(argument: str, *, is_scored: bool = False) -> list[Instance]:
    """Return the samples of a task as instances.

    Args:
        argument: `FILE.py@TASK`, or `FILE.py` if the file has one task.
        is_scored: whether a scorer or a critic decides a task without a scorer.

    Raises:
        UsageError: inspect_ai is not installed, the task cannot be loaded, or some of its samples are unusable.
    """
    _require_inspect()
    path, _, name = argument.partition("@")
    task = _task(Path(path).resolve(), name)
    ignored = list_ignored(task)
    if not task.scorer and not is_scored:
        raise UsageError(f"The task of {path} has no scorer.", remedy="Give it one: Task(scorer=…).")
    found: dict[str, Instance] = {}
    wrong: list[str] = []
    for number, sample in enumerate(task.dataset, 1):
        try:
            instance = _instance(sample, number, task.scorer, ignored)
            if instance.id in found:
                raise ValueError(f"another sample has the id {instance.id!r}, as it is written here")  # noqa: TRY301
            found[instance.id] = instance
        except ValueError as error:
            wrong.append(f"sample {number}: {error}")
    if wrong or not found:
        raise UsageError(
            f"The task of {path} cannot be used: {'; '.join(wrong[:10]) or 'it has no samples'}.",
            remedy="Correct it; nothing was started.",
        )
    return list(found.values())


def _require_inspect() -> None:
    if importlib.util.find_spec("inspect_ai") is None:
        raise UsageError("inspect_ai is not installed.", remedy=f"Install it: pip install '{EXTRA}'.")


def _task(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"deckhands_inspect_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"There is no task file {path}.", remedy="Name it as inspect:FILE.py@TASK.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        tasks = {key: value for key, value in vars(module).items() if _is_task(value)}
        if not name and len(tasks) == 1:
            name = next(iter(tasks))
        if name not in tasks:
            names = ", ".join(sorted(tasks)) or "none"
            remedy = f"Its tasks: {names}. Write inspect:FILE.py@TASK."
            raise UsageError(f"{path} has no task {name!r}.", remedy=remedy)  # noqa: TRY301
        return tasks[name]()
    except UsageError:
        raise
    except Exception as error:  # any error of the file
        raise UsageError(f"The task file {path} fails: {type(error).__name__}: {str(error)[:300]}.") from error


def _is_task(value: Any) -> bool:
    from inspect_ai._util.registry import is_registry_object, registry_info

    return callable(value) and is_registry_object(value) and registry_info(value).type == "task"


def inspect_defaults(argument: str) -> DatasetDefaults:
    """Return the settings that a task brings. Raises the errors of `inspect_instances`."""
    _require_inspect()
    path, _, name = argument.partition("@")
    return to_defaults(_task(Path(path).resolve(), name))


def to_defaults(task: Any) -> DatasetDefaults:
    """Return the settings that come with a task.

    A limit of messages counts the agent's replies and the results of its tools, so it is twice the number of steps.
    """
    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, of_ours, scale in KEPT:
        value = getattr(task, name, None)
        if not isinstance(value, int | float) or value <= 0:
            continue
        ours = max(1, int(value * scale)) if of_ours == "max_iterations" else value
        if of_ours not in values or ours < values[of_ours]:
            values[of_ours] = ours
            sources[of_ours] = f"{name}={value:g}"
    return DatasetDefaults(values, sources)


def list_ignored(task: Any) -> list[str]:
    """Return the settings of a task that its attempts do not have."""
    found = [f"{name} of the task is ignored: {why}" for name, why in IGNORED.items() if getattr(task, name, None)]
    if (sandbox := getattr(task, "sandbox", None)) is not None:
        found.append(_describe_sandbox(sandbox))
    return found


def _describe_sandbox(sandbox: Any) -> str:
    config = f" with {sandbox.config}" if getattr(sandbox, "config", None) else ""
    kind = sandbox if isinstance(sandbox, str) else getattr(sandbox, "type", sandbox)
    return f"sandbox {kind}{config} is ignored: the sandbox and its programs are those of the node"


def _instance(sample: Any, number: int, scorers: Any, ignored: Sequence[str]) -> Instance:
    if not isinstance(sample.input, str):
        raise ValueError("its input is a list of messages; only texts are supported")  # noqa: TRY004  (of the sample)
    task = sample.input
    if sample.choices:
        letters = (f"{chr(ord('A') + place)}) {choice}" for place, choice in enumerate(sample.choices))
        task += "\n\n" + "\n".join(letters) + "\n\nEnd your message with: ANSWER: followed by the letter."
    text = re.sub(r"[^A-Za-z0-9._-]", "-", str(sample.id if sample.id is not None else number))[:MAX_ID_CHARS]
    targets = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    return Instance(
        text if text[:1].isalnum() else f"s{text}"[:MAX_ID_CHARS],
        task,
        workspace=MemoryFiles(dict(_files(sample.files or {}))),
        setup=sample.setup,
        judge=_judge(sample, scorers if isinstance(scorers, list | tuple) else [scorers]) if scorers else None,
        tags=tuple(str(value) for value in (sample.metadata or {}).values() if isinstance(value, str))[:10],
        left_out=(*ignored, *([_describe_sandbox(sample.sandbox)] if sample.sandbox is not None else [])),
        turns=make_command_script("true", "".join(targets[:1])),
    )


def _files(files: dict[str, str]) -> Iterable[tuple[str, TreeFile]]:
    for name, content in files.items():
        if not is_safe(name) or ":" in name:
            raise ValueError(f"the file {name!r} is not for the working directory")
        path = Path(content) if len(content) < 1_000 and "\n" not in content else None
        is_path = path is not None and path.is_file()
        yield name, TreeFile(path.read_bytes() if path is not None and is_path else content.encode())


def _judge(sample: Any, scorers: Sequence[Callable[..., Any]]) -> Judge:
    async def judge(said: str) -> Rewards:
        from inspect_ai.model import ChatMessageUser, ModelName, ModelOutput
        from inspect_ai.scorer import Target, value_to_float
        from inspect_ai.solver import TaskState

        target = sample.target if isinstance(sample.target, str) else list(sample.target)
        output = ModelOutput.from_content("deckhands", said)
        state = TaskState(
            model=ModelName("deckhands/agent"),
            sample_id=sample.id or 0,
            epoch=1,
            input=sample.input,
            messages=[ChatMessageUser(content=sample.input), output.message],
            target=Target(target),
            choices=sample.choices,
            output=output,
            completed=True,
            metadata=sample.metadata or {},
        )
        try:
            scores = [await scorer(state, Target(target)) for scorer in scorers]
        except Exception as error:  # any error of a scorer
            raise ScorerFailed(f"{type(error).__name__}: {error}") from error
        reasons = [f"{score.value!r}: {score.explanation or score.answer or ''}" for score in scores]
        values: dict[str, float] = {}
        for number, (scorer, score) in enumerate(zip(scorers, scores, strict=True), 1):
            from inspect_ai._util.registry import is_registry_object, registry_info

            name = registry_info(scorer).name.rpartition("/")[2] if is_registry_object(scorer) else f"scorer{number}"
            if isinstance(score.value, Mapping):
                values |= {f"{name}/{key}": value_to_float()(value) for key, value in score.value.items()}
            elif isinstance(score.value, list | tuple):
                values |= {f"{name}/{at}": value_to_float()(value) for at, value in enumerate(score.value, 1)}
            else:
                values[name] = value_to_float()(score.value)
        return Rewards(
            statistics.fmean(values.values()) if values else 0.0,
            values,
            resolved=bool(values) and all(value >= 1.0 for value in values.values()),
            explanation="\n".join(reasons),
        )

    return judge
