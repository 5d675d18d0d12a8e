"""Evaluations as logs of inspect_ai, which `inspect view` and `read_eval_log` open: one for each model.

Source: the JSON form of its logs, version 2 (inspect_ai 0.3). The package is not needed to write them.
Holds: a sample is an instance, an epoch is an attempt. An attempt with an infrastructure failure or a failed set-up is
a sample with an error, and counts in no metric. A model event contains only messages that no earlier event contains,
because whole prompts would make a log grow with the square of the steps.
Does not: include attempts that were not run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from deckhands.evaluation.exports.dialogue import Dialogue, DialogueCall, DialogueTurn, format_time

SCORER = "deckhands"
LIMITS = {
    "iterations": "message",
    "tokens": "token",
    "time": "time",
    "budget": "cost",
    "evaluation_budget": "cost",
    "evaluation_token_budget": "token",
}
FAILURES = {"infra-abandoned": "The infrastructure failed", "setup_failed": "The set-up failed"}
"""The outcomes that are errors of samples."""
UNSCORED = "unscored"
"""The outcome of a conversation that is no attempt of an evaluation."""
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
Fields = dict[str, Any]
Row = Mapping[str, Any]


def to_inspect_log(name: str, dataset: str, model: str, attempts: Sequence[tuple[Row, Dialogue | None]]) -> Fields:
    """Return the log of one model.

    Args:
        name: the name of the evaluation.
        attempts: rows, with the dialogues of those that were started.
    """
    attempts = [(row, dialogue) for row, dialogue in attempts if row["outcome"] != "not-run"]
    samples = [_sample(row, dialogue) for row, dialogue in attempts]
    counted = [row for row, _ in attempts if row["outcome"] not in FAILURES]
    scored = [row for row in counted if row["outcome"] != UNSCORED]
    scores = [{"name": SCORER, "scorer": SCORER, "metrics": _metrics(scored)}] if scored or not counted else []
    ids = list(dict.fromkeys(str(row["instance"]) for row, _ in attempts))
    moments = [turn.at for _, dialogue in attempts if dialogue for turn in dialogue.turns if turn.at is not None]
    begun, ended = (min(moments), max(moments)) if moments else (NEVER, NEVER)
    usage = _usage([row for row, _ in attempts])
    agent = next((dialogue.agent for _, dialogue in attempts if dialogue is not None), "")
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": f"{name}-{model}",
            "run_id": name,
            "created": format_time(begun),
            "task": dataset,
            "task_id": name,
            "solver": f"deckhands/{agent}",
            "dataset": {"name": dataset, "samples": len(ids), "sample_ids": ids},
            "model": model if "/" in model else f"deckhands/{model}",
            "config": {"epochs": max((int(row["attempt"]) for row, _ in attempts), default=1)},
            "scorers": [{"name": SCORER}] if scores else [],
        },
        "plan": {"name": "plan", "steps": [{"solver": f"deckhands/{agent}", "params": {}}], "config": {}},
        "results": {
            "total_samples": len(attempts),
            "completed_samples": len(counted),
            "scores": scores,
        },
        "stats": {"started_at": format_time(begun), "completed_at": format_time(ended), "model_usage": {model: usage}},
        "samples": samples,
    }


def _metrics(rows: Sequence[Row]) -> Fields:
    by_instance: dict[str, list[float]] = {}
    for row in rows:
        reward = row.get("reward")
        value = float(row["outcome"] == "resolved") if reward is None else float(reward)
        by_instance.setdefault(str(row["instance"]), []).append(value)
    shares = [statistics.fmean(found) for found in by_instance.values()]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    values = {"accuracy": statistics.fmean(shares) if shares else 0.0, "stderr": error}
    return {name: {"name": name, "value": value, "params": {}} for name, value in values.items()}


def _sample(row: Row, dialogue: Dialogue | None) -> Fields:
    turns = dialogue.turns if dialogue is not None else ()
    said = dialogue.last_message if dialogue is not None else ""
    moments = [turn.at for turn in turns if turn.at is not None]
    sample: Fields = {
        "id": row["instance"],
        "epoch": row["attempt"],
        "input": dialogue.task if dialogue is not None else "",
        "target": "",
        "messages": [to_inspect_message(turn) for turn in turns],
        "events": _events(turns),
        "output": {
            "model": row["model"],
            "choices": [
                {"message": {"role": "assistant", "content": said, "source": "generate"}, "stop_reason": "stop"}
            ],
        },
        "metadata": {name: value for name, value in row.items() if name not in ("evidence", "instance", "attempt")},
        "model_usage": {row["model"]: _usage([row])},
        "total_time": row["seconds"],
    }
    if moments:
        sample |= {"started_at": format_time(min(moments)), "completed_at": format_time(max(moments))}
    match row["outcome"]:
        case outcome if outcome in FAILURES:
            text = f"{FAILURES[outcome]}: {row['cause']}."
            sample["error"] = {"message": text, "traceback": text, "traceback_ansi": text}
        case outcome if outcome != UNSCORED:
            reward = row.get("reward")
            is_plain = reward is None or reward == float(outcome == "resolved")
            value = ("C" if outcome == "resolved" else "I") if is_plain else reward
            score = {"value": value, "answer": said[:1_000], "explanation": row["evidence"]}
            sample["scores"] = {SCORER: score}
            sample["events"].append(_event("score", moments, max(moments, default=NEVER), score=score, scorer=SCORER))
            if outcome == "limit":
                sample["limit"] = {"type": LIMITS.get(str(row["cause"]), "custom"), "limit": 0}
    return sample


def _events(turns: Sequence[DialogueTurn]) -> list[Fields]:
    """Return the events of a sample's transcript: model calls and tool calls.

    For a sample without events, `inspect view` reports that they were too large.
    """
    moments = [turn.at for turn in turns if turn.at is not None]
    asked: dict[str, tuple[DialogueCall, datetime]] = {}
    unseen: list[Fields] = []
    events: list[Fields] = []
    for turn in turns:
        at = turn.at or NEVER
        message = to_inspect_message(turn)
        if turn.role == "assistant" and turn.reply is not None:
            reply = turn.reply
            output: Fields = {
                "model": reply.model,
                "choices": [{"message": message, "stop_reason": "tool_calls" if turn.calls else "stop"}],
            }
            sent, made = reply.usage.prompt_tokens, reply.usage.completion_tokens
            output["usage"] = {"input_tokens": sent, "output_tokens": made, "total_tokens": sent + made}
            begun = at - timedelta(seconds=reply.latency_seconds)
            fields = {"model": reply.model, "input": unseen, "output": output, "completed": format_time(at)}
            events.append(
                _event("model", moments, begun, **fields, tools=[], tool_choice="auto", config={})
                | {"working_time": reply.latency_seconds}
            )
            asked |= {call.id: (call, at) for call in turn.calls}
            unseen = []
            continue
        unseen.append(message)
        if turn.role == "tool" and turn.call_id in asked:
            call, begun = asked[turn.call_id]
            fields = {"id": call.id, "function": call.name, "arguments": call.arguments, "result": turn.content}
            events.append(_event("tool", moments, begun, **fields, completed=format_time(at)))
    return events


def _event(kind: str, moments: Sequence[datetime], at: datetime, **fields: Any) -> Fields:
    begun = min(moments, default=at)
    return {
        "event": kind,
        "timestamp": format_time(at),
        "working_start": max(0.0, (at - begun).total_seconds()),
        **fields,
    }


def to_inspect_message(turn: DialogueTurn) -> Fields:
    """Return a turn as a message of inspect_ai."""
    message: Fields = {"role": turn.role, "content": turn.content}
    if turn.images:
        message["content"] = [
            {"type": "text", "text": turn.content},
            *({"type": "image", "image": url} for url in turn.images),
        ]
    match turn.role:
        case "user":
            message["source"] = "input"
        case "tool":
            message |= {"tool_call_id": turn.call_id, "function": turn.name}
        case "assistant":
            message |= {"source": "generate", "model": turn.reply.model if turn.reply is not None else None}
            if turn.thinking:
                message["content"] = [
                    {"type": "reasoning", "reasoning": turn.thinking},
                    {"type": "text", "text": turn.content},
                ]
            if turn.calls:
                message["tool_calls"] = [
                    {"id": call.id, "function": call.name, "arguments": call.arguments, "type": "function"}
                    for call in turn.calls
                ]
    return message


def _usage(rows: Sequence[Row]) -> Fields:
    sent, made = (sum(int(row[name]) for row in rows) for name in ("prompt_tokens", "completion_tokens"))
    return {"input_tokens": sent, "output_tokens": made, "total_tokens": sent + made}
