"""The table of all metrics: name, type, labels and meaning. Page, dashboard and alerts are checked against it.

Holds: a label takes values of a fixed set, or at most `MAX_LABEL_VALUES` for the whole cluster: names chosen by users
(models, pools, jobs) count under `other` beyond that. No metric names a conversation or a tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LABEL_VALUES = 50
"""The limit for models, pools and the like, for the whole cluster."""
MAX_WORKERS = 500
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without `_total`, the suffix of a counter's samples.
        figure: the name of its values among the `Figures` of workers, if workers report them.
        labels: a worker's figure is split by the labels after `role` and `worker`, with a space between their values.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    figure: str = ""

    @property
    def sample_name(self) -> str:
        """The name of its samples in queries."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


UP = Family("deckhands_store_up", "gauge", "1 if the store has answered; otherwise most other metrics are missing")
SECONDS = Family("deckhands_scrape_seconds", "gauge", "Time to read these metrics from the store")
FAILURES = Family("deckhands_scrape_failures", "gauge", "Parts of these metrics that could not be read this time")
CONVERSATIONS = Family(
    "deckhands_conversations",
    "gauge",
    "Conversations in the store by agent state and wait reason",
    ("state", "wait_reason"),
)
COUNTED_AGE = Family("deckhands_conversations_age_seconds", "gauge", "Age of the count of conversations")
UNCOUNTED = Family("deckhands_conversations_uncounted", "gauge", "Older conversations that were left out of the count")
QUEUE_ENTRIES = Family(
    "deckhands_queue_entries",
    "gauge",
    "Entries of a queue: waiting to be taken, in line for the queue, or held by a worker",
    ("queue", "standing"),
)
QUEUE_AGE = Family(
    "deckhands_queue_oldest_seconds", "gauge", "Wait of the oldest entry that no worker has taken", ("queue",)
)
UNCLAIMED = Family("deckhands_unclaimed_conversations", "gauge", "Conversations with news that no worker has claimed")
UNCLAIMED_AGE = Family("deckhands_unclaimed_oldest_seconds", "gauge", "Wait of the first of these conversations")
PARKED = Family("deckhands_parked_conversations", "gauge", "Conversations that wait for a time")
DEAD = Family(
    "deckhands_dead_conversations", "gauge", "Conversations that crashed three workers and wait for an operator"
)
TAKEOVERS = Family("deckhands_takeovers", "counter", "Conversations and actions taken over from dead workers")
UNREADABLE = Family("deckhands_unreadable", "counter", "Entries and keys that could not be read")
REFUSED_STARTS = Family(
    "deckhands_refused_beginnings",
    "counter",
    "Conversations that were refused: `open` and `pace` of a tenant, or `memory` of the store",
    ("reason",),
)
WORKERS = Family("deckhands_workers", "gauge", "Workers with a valid heartbeat", ("role",))
LAPSED = Family("deckhands_workers_lapsed", "gauge", "Workers with an expired heartbeat", ("role",))
BEAT_UP = Family("deckhands_beat_up", "gauge", "1 if a beat holds the lock for sending periodic jobs")
MEMORY = Family("deckhands_store_memory_bytes", "gauge", "Memory that the store uses")
MEMORY_LIMIT = Family("deckhands_store_memory_limit_bytes", "gauge", "The store's `maxmemory`; 0: none")

OF_CLUSTER = (
    UP,
    SECONDS,
    FAILURES,
    CONVERSATIONS,
    COUNTED_AGE,
    UNCOUNTED,
    QUEUE_ENTRIES,
    QUEUE_AGE,
    UNCLAIMED,
    UNCLAIMED_AGE,
    PARKED,
    DEAD,
    TAKEOVERS,
    UNREADABLE,
    REFUSED_STARTS,
    WORKERS,
    LAPSED,
    BEAT_UP,
    MEMORY,
    MEMORY_LIMIT,
)


def _worker(name: str, kind: Literal["gauge", "counter"], figure: str, text: str, *labels: str) -> Family:
    return Family(f"deckhands_{name}", kind, text, ("role", "worker", *labels), figure)


OF_WORKERS = (
    _worker("steps", "counter", "steps", "Steps of agents: model replies that made progress"),
    _worker("model_calls", "counter", "model_calls", "Model calls: `answered`, or an error's code", "outcome"),
    _worker("model_seconds", "counter", "model_seconds", "Duration of answered model calls in seconds", "model"),
    _worker("prompt_tokens", "counter", "prompt_tokens", "Tokens of prompts", "model"),
    _worker("completion_tokens", "counter", "completion_tokens", "Tokens of replies", "model"),
    _worker("cache_read_tokens", "counter", "cache_read_tokens", "Tokens of prompts found in a cache", "model"),
    _worker("cost_usd", "counter", "cost_usd", "Cost of model calls in USD, as far as prices are known", "model"),
    _worker("unpriced_calls", "counter", "calls_without_price", "Model calls of unknown price", "model"),
    _worker("refusals", "counter", "refusals", "Model calls that had to wait, by the exhausted limit", "reason"),
    _worker("settled", "counter", "settled", "Conversations that settled, by the agent's state", "state"),
    _worker("held_conversations", "gauge", "conversations", "Conversations that a controller worker holds"),
    _worker("actions", "counter", "actions", "Actions answered, by the observation's kind", "kind"),
    _worker("running", "gauge", "running", "Actions or jobs in progress on the worker"),
    _worker("refused_hosts", "counter", "refused_hosts", "Times that a proxy refused a host to a workspace"),
    _worker("ingress_looks", "counter", "looks", "Polls by an ingress of conversations with waiters"),
    _worker("inbox_entries", "counter", "entries", "Entries that an ingress has taken from the inbox"),
    _worker("jobs", "counter", "jobs", "Jobs that have succeeded", "job"),
    _worker("failed_jobs", "counter", "failed_jobs", "Jobs that have failed or were stopped", "job"),
    _worker("streams", "gauge", "streams", "Streams of events that a server has open, and requests that wait"),
    _worker(
        "http_refusals",
        "counter",
        "http_refusals",
        "Requests answered with an error by a server; with a reason, those that were no request yet",
        "status",
        "reason",
    ),
    _worker("loop_lag_seconds", "gauge", "loop_lag_seconds", "Largest delay of the event loop within 15 seconds"),
    _worker("loop_late_seconds", "counter", "loop_late_seconds", "Total delay of the event loop in seconds"),
    _worker("host_cpu", "gauge", "host_cpu", "The share of the worker's machine's CPU that is busy"),
    _worker("host_memory_free", "gauge", "host_memory_free", "The share of the machine's memory that is available"),
    _worker("host_cpu_stalled", "gauge", "host_cpu_stalled", "The share of time that a process waits for CPU (PSI)"),
    _worker("host_memory_stalled", "gauge", "host_memory_stalled", "The same for memory"),
    _worker("host_io_stalled", "gauge", "host_io_stalled", "The same for disks"),
)

FAMILIES = (*OF_CLUSTER, *OF_WORKERS)
