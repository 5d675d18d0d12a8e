"""TRL's rollout function (`GRPOTrainer(rollout_func=…)`, TRL 1.x), answered by a rollout run.

A call of the trainer is one run: its prompts are groups, its `global_step` is the version of the policy. TRL passes a
prompt once for each of its completions. Each process of a distributed trainer has separate runs.

Holds: the function returns exact tokens, one row for each prompt, in their order. A trainer that died and calls again
at the same step continues the run of this step.
Does not: import TRL; call an engine; train on tokens that the policy has not sampled (`env_mask`). TRL knows sequences
only, so of a trajectory with several segments the last one counts; `segments` has their number.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from broker.runtime import UsageError
from deckhands.client import Client
from deckhands.rollouts.run import Rollout, RolloutRun
from deckhands.rollouts.spec import RolloutSpec, read_rows

RolloutFunction = Callable[[Sequence[Any], Any], dict[str, list[Any]]]


def make_rollout_function(spec: RolloutSpec, *, name: str, url: str | None = None) -> RolloutFunction:
    """Return the function for `GRPOTrainer(rollout_func=…)`.

    Args:
        spec: its prompts are rows of our own format, or a file of them. The trainer's prompts are their tasks. Its
            `group_size` and `epochs` are replaced by those of the call.
        name: the runs are named `NAME-STEP-NUMBER`, and those of other processes than the first one have their number
            behind it. A trainer that continues from a checkpoint uses the same name.
        url: the store; None for DECKHANDS_URL.

    The result has, besides TRL's fields, `reward` (None for a trajectory that is missing), `segments`, and
    `conversation_id`. `get_reward` is the function for `reward_funcs`.

    Raises:
        UsageError: the specification cannot be used.
    """
    rows = read_rows(spec).prompts
    assert not isinstance(rows, str)
    by_task = {str(row.get("task", "")): row for row in rows}
    if len(by_task) < len(rows):
        raise UsageError("prompts: two rows have the same task.", remedy="TRL names a prompt by its text only.")
    calls: Counter[int] = Counter()

    def roll_out(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        step = int(trainer.state.global_step)
        texts = [_find_text(one) for one in prompts]
        process = int(trainer.accelerator.process_index)
        run = f"{name}-{step}-{calls[step]}" + (f"-process{process}" if process else "")
        found = _run_in_thread(lambda: _collect(spec, by_task, texts, run=run, step=step, url=url))
        calls[step] += 1
        return to_fields(texts, found)

    return roll_out


def get_reward(reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the run; for `GRPOTrainer(reward_funcs=[get_reward])`."""
    return list(reward)


async def _collect(
    spec: RolloutSpec,
    by_task: Mapping[str, Mapping[str, Any]],
    texts: Sequence[str],
    *,
    run: str,
    step: int,
    url: str | None,
) -> dict[str, list[Rollout]]:
    """Run the prompts, and return the trajectories of each."""
    counts = Counter(texts)
    unknown = next((text for text in counts if text not in by_task), None)
    if unknown is not None:
        raise UsageError(
            f"No row of the run has the task {unknown[:100]!r}.", remedy="Give the trainer the tasks of the rows."
        )
    found: dict[str, list[Rollout]] = {}
    async with await Client.connect(url) as client:
        for size in sorted(set(counts.values())):
            asked = [text for text in counts if counts[text] == size]
            fields = {"prompts": [dict(by_task[text]) for text in asked], "group_size": size, "epochs": 1}
            part = RolloutSpec.parse({**spec.model_dump(exclude_unset=True), **fields, "smallest_group": 1})
            by_id = {str(row["id"]): text for row, text in zip(part.prompts, asked, strict=True)}  # type: ignore[index]
            started = await RolloutRun.start(client, part, name=f"{run}-{size}")
            await started.weights_changed(step)
            async for group in started.groups():
                found[by_id[group.instance]] = list(group.rollouts)
                await group.ack()
            for one in reversed(await started.list_groups()):  # acknowledged before this program was restarted
                text = by_id[one["instance"]]
                if text not in found:
                    found[text] = await started.load_rollouts(one)
    return found


def to_fields(texts: Sequence[str], found: Mapping[str, Sequence[Rollout]]) -> dict[str, list[Any]]:
    """Return a row for each text. A trajectory that is missing has one token that does not count, and no reward."""
    left = {text: list(rollouts) for text, rollouts in found.items()}
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "segments", "conversation_id")
    fields: dict[str, list[Any]] = {name: [] for name in names}
    if not any(left.values()):
        raise UsageError("No trajectory of this step has tokens.", remedy="`deckhands rollouts show` has the reason.")
    spare = next(one for rollouts in found.values() for one in rollouts)
    for text in texts:
        rollout = left[text].pop(0) if left.get(text) else None
        segment = (rollout or next(iter(found.get(text) or [spare]))).trajectory.segments[-1]
        first = segment.replies[0].start
        tokens, mask = segment.tokens.tolist(), list(segment.mask)
        # TRL leaves the importance of a token as it is if its log-probability is None. At a masked place, it is no use.
        logprobs = [
            (None if math.isnan(one) else one) if is_sampled else 0.0
            for one, is_sampled in zip(segment.logprobs, mask, strict=True)
        ]
        fields["prompt_ids"].append(tokens[:first])
        fields["completion_ids"].append(tokens[first:] if rollout else tokens[first : first + 1])
        fields["logprobs"].append(logprobs[first:] if rollout else [0.0])
        fields["env_mask"].append(mask[first:] if rollout else [0])
        fields["reward"].append(None if rollout is None else rollout.reward)
        fields["segments"].append(len(rollout.trajectory.segments) if rollout else 0)
        fields["conversation_id"].append(rollout.trajectory.conversation_id if rollout else "")
    return fields


def _find_text(prompt: Any) -> str:
    """Return the task of a prompt: a text, or messages with one of a user at their end."""
    if isinstance(prompt, str):
        return prompt
    try:
        content = prompt[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    except (LookupError, TypeError, AttributeError):
        raise UsageError("A prompt is no text and no list of messages.", remedy="See TRL's formats.") from None


def _run_in_thread(act: Callable[[], Any]) -> Any:
    """Run in a thread, because the trainer's own thread may have a running loop, as in a notebook."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(act())).result()
