"""The rights of each role in the store, read from `deploy/store.acl`, and docs/rights.md, which shows them.

Holds: this reads the file without a server. `tests/security/test_role_rights.py` tries each cell with the credentials of
its role on real servers, so that this reader and the page cannot be wrong about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from broker.store.function_library import build_source
from tests.security.hostile_families import PLACEHOLDER, PLACEHOLDERS, Family, families
from tests.source_code import ROOT

ACL = ROOT / "deploy" / "store.acl"
PRODUCER = "producer"
ROLES = ("operator", "gateway", "ingress", "controller", "tool", "jobs", "metrics", PRODUCER)
READS: Mapping[str, tuple[str, ...]] = {
    "hash": ("HGETALL",),
    "zset": ("ZRANGE", "0", "0"),
    "stream": ("XRANGE", "-", "+"),
    "set": ("SMEMBERS",),
    "string": ("GET",),
    "list": ("LRANGE", "0", "0"),
}
"""Commands that read what a key holds. Its length and its type are shown to every role that may use it in any way."""
ADDS: Mapping[str, tuple[str, ...]] = {
    "hash": ("HSET", "f", "v"),
    "zset": ("ZADD", "1", "m"),
    "stream": ("XADD", "*", "f", "v"),
    "set": ("SADD", "m"),
    "string": ("SET", "v"),
    "list": ("RPUSH", "v"),
}
FURTHER = (
    Family("deck:{k}:c:<id>", "deck:{k}:c:<id>", "string"),
    Family("deck:acked", "deck:acked", "string"),
    Family("a key of another program", "other", "string"),
)
"""Keys that the table of `broker/store/keys.py` does not list: a base, which does not exist, and those beside it."""

INTRODUCTION = """# Rights in the store

Each role has its own user in the store of the event logs. `deploy/store.acl` lists its commands, functions and keys, and `deploy/serve-valkey` makes the users. `make docs` writes this page from that file, and a test tries each cell with the password of the role, on Valkey and on Redis.

`admin`, who loads the functions and does everything else, is used by `deckhands setup` alone. No role has EVAL, KEYS, CONFIG, FLUSHALL, SUBSCRIBE or keys of other programs. What a function calls is checked like a command of the user that calls it, so nobody gains a key by a function.

## What a role that was taken over can do

| role | can | cannot |
|---|---|---|
| tool worker | claim any action and report its observation, read actions that wait or run, and the large texts and secrets of conversations, which are encrypted with a key that it has; change what listings show of a conversation, who owns it, or add to its hidden values, which stops it, and which pool and workspace its next actions go to; put entries into the streams of other pools and nodes, which only delays; stop the notices of webhooks of a shard; report a loss of events that did not happen; remove heartbeats and queued work, let workers that live count as dead, and count deaths with an action, of which the answer is then that its outcome is unknown, or hide them; answer a request for a [terminal](serving.md#terminals) in place of the right worker, and so read what its operator types | open a terminal, or type in one; read or write a log, write or remove the deaths that count against a conversation, or name it a dead letter, make another tool worker run what no owner has dispatched, report an observation of an action that was not dispatched or not claimed, stop the creation of conversations, add an event that does not answer the action, delete a conversation, read its snapshot, its callers or the inbox; read or write API keys, budgets, quotas, schedules, webhooks, notes, evaluations and the record of operations |
| controller | decide for any conversation, spend any budget, lower what is left of it, reset what is spent of it | raise the limit of a budget; delete a log other than by trimming; API keys, schedules, webhooks, evaluations, the inbox, the record of operations |
| ingress | start, steer and delete any conversation | API keys, budgets, quotas, schedules, webhooks, notes, the record of operations |
| jobs | delete any conversation; end a schedule's run or a webhook's delivery; change a webhook's definition, because they turn off one whose receiver is gone; shorten the record of operations | define schedules, delete webhooks, limits of budgets, API keys, the inbox; add to the record of operations, or change an entry |
| server | what its API offers, for every tenant | create API keys; change or remove an entry of the record of operations |
| metrics | see the names and states of conversations | write anything, read a log |

A function runs with the rights of its caller. So a tool worker leaves its observation in `results`, and a controller adds it to the log if it has the capability that came with the action, and if the controller can read that it answers this action; see [decision 45](decisions/0045-least-rights-inside.md). Controllers, ingresses, jobs and the server can add to the log of any conversation.
"""


@dataclass(frozen=True)
class Selector:
    """Commands, and the keys that they may be used with. `functions` is None if all may be called."""

    commands: frozenset[str]
    functions: frozenset[str] | None
    readable: tuple[str, ...]
    writable: tuple[str, ...]

    def allows(self, command: str, key: str, *, writes: bool, reads: bool) -> bool:
        return (
            command.lower() in self.commands
            and (not reads or any(fnmatchcase(key, pattern) for pattern in self.readable))
            and (not writes or any(fnmatchcase(key, pattern) for pattern in self.writable))
        )


def parse_selector(rules: str) -> Selector:
    commands, functions, readable, writable = set[str](), set[str](), list[str](), list[str]()
    for rule in rules.split():
        if rule.startswith("+fcall|"):
            functions.add(rule.removeprefix("+fcall|"))
        elif rule.startswith("+"):
            commands.add(rule[1:])
        elif "~" in rule:
            flags, _, pattern = rule.partition("~")
            if "W" not in flags or "R" in flags:
                readable.append(pattern)
            if "R" not in flags or "W" in flags:
                writable.append(pattern)
        else:
            assert rule in ("resetchannels", "-@all", "-@admin", "-@dangerous"), rule
    return Selector(
        frozenset(commands), None if "fcall" in commands else frozenset(functions), tuple(readable), tuple(writable)
    )


@cache
def rights_of(role: str) -> tuple[Selector, ...]:
    """Return the selectors of a role; the first are the rules outside parentheses."""
    rules = " ".join(
        line.partition(" ")[2]
        for line in ACL.read_text(encoding="utf-8").splitlines()
        if re.match("[a-z]", line) and role in line.partition(" ")[0].split(",")
    )
    inner = re.findall(r"\(([^)]*)\)", rules)
    return tuple(map(parse_selector, (re.sub(r"\([^)]*\)", " ", rules), *inner)))


def may_call(role: str, function: str) -> bool:
    return any(one.functions is None or function in one.functions for one in rights_of(role))


def may_read(role: str, family: Family) -> bool:
    key = key_of(family)
    return any(one.allows(READS[family.kind][0], key, writes=False, reads=True) for one in rights_of(role))


def may_add(role: str, family: Family) -> bool:
    command, key = ADDS[family.kind][0], key_of(family)
    return any(one.allows(command, key, writes=True, reads=False) for one in rights_of(role))


def may_remove(role: str, family: Family) -> bool:
    return any(one.allows("DEL", key_of(family), writes=True, reads=False) for one in rights_of(role))


def all_functions() -> list[str]:
    return sorted(set(re.findall(r"register_function\('(\w+)'", build_source())))


def all_families() -> Iterator[Family]:
    yield from families()
    yield from FURTHER


@cache
def key_of(family: Family) -> str:
    """Return a key of a family."""
    return PLACEHOLDER.sub(lambda found: PLACEHOLDERS.get(found[0], ("x",))[-1], family.key)


def rights_page() -> str:
    head = f"| {{}} | {' | '.join(ROLES)} |\n|---|{'---|' * len(ROLES)}\n"
    lines = [INTRODUCTION, "\n## Functions\n\n", head.format("function")]
    for function in all_functions():
        cells = " | ".join("yes" if may_call(role, function) else "" for role in ROLES)
        lines.append(f"| `{function}` | {cells} |\n")
    lines += ["\n## Keys\n\n`r`: read, `a`: add or change, `d`: delete.\n\n", head.format("key")]
    rows: dict[str, dict[str, str]] = {}
    for family in all_families():
        rows.setdefault(family.row, {})[family.key] = " | ".join(
            "".join(
                letter
                for letter, is_allowed in (("r", may_read), ("a", may_add), ("d", may_remove))
                if is_allowed(role, family)
            )
            for role in ROLES
        )
    for row, keys in rows.items():
        shown = {row: next(iter(keys.values()))} if len(set(keys.values())) == 1 else keys
        lines += [f"| `{key}` | {cells} |\n" for key, cells in shown.items()]
    return "".join(lines)
