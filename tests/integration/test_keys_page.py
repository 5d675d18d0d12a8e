"""The keys of the store: the page and the module list the same, and a real run leaves no other."""

from __future__ import annotations

import re
from pathlib import Path

from broker.contract.specs import Tenancy
from broker.store import keys
from broker.store.connection import Connection
from tests.faults.harness import FaultCluster, steps
from tests.source_code import ROOT

PAGE = ROOT / "docs" / "deployment.md"
ROW = re.compile(r"^\| `(deck:[^`]+)` \| (\w+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def pattern_of(key: str) -> str:
    """Return the expression that matches the keys that a row speaks of."""
    parts = re.split(r"(\{k\}|<\w+>|…)", key)
    return "".join(
        {"{k}": r"\{\d+\}", "…": ".+", "<tenant>": "[^:]*", "<account>": "[^:]+(:[^:]*)?"}.get(
            part, "[^:]+(:[^:]+)?" if part[:1] == "<" else re.escape(part)
        )
        for part in parts
    )


def test_the_page_lists_what_the_module_lists() -> None:
    listed = re.findall(r"^    (deck:\S+) +(\w+) ", keys.__doc__ or "", re.MULTILINE)
    assert len(listed) > 30
    assert ROW.findall(PAGE.read_text("utf-8")) == listed


async def naming(connection: Connection, conversation_id: str) -> list[str]:
    """Return the keys of a conversation, and the sets and hashes that name it.  Streams are trimmed by themselves."""
    wanted = conversation_id.encode()
    _, names = await connection.call("SCAN", "0", "COUNT", "100000")
    found = [name for name in names if wanted in name]
    reads = {b"zset": ("ZRANGE", 0, -1), b"set": ("SMEMBERS",), b"hash": ("HGETALL",)}
    for name in names:
        kind = bytes(await connection.call("TYPE", name))
        if kind in reads:
            command, *rest = reads[kind]
            found += [name] if wanted in await connection.call(command, name, *rest) else []
    return [name.decode() for name in found]


async def test_a_run_leaves_no_other_keys(tmp_path: Path) -> None:
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller()
        cluster.start_tool()
        ids = await cluster.submit(steps(2), tenancy=Tenancy(tenant="acme", experiment="swe"))
        await cluster.settle(ids)
        connection = cluster.client.store.connection
        _, names = await connection.call("SCAN", "0", "COUNT", "100000")
        types = {name.decode(): (await connection.call("TYPE", name)) for name in names}
        types = {name: kind for name, kind in types.items() if kind not in ("none", b"none")}  # deleted in the meantime
        await cluster.client.delete(ids[0])
        assert await naming(connection, ids[0]) == []
    rows = [(re.compile(pattern_of(key)), kind) for key, kind in ROW.findall(PAGE.read_text("utf-8"))]
    assert any(name.endswith(":events") for name in types)
    for name, kind in types.items():
        kinds = [listed for pattern, listed in rows if pattern.fullmatch(name)]
        found = kind.decode() if isinstance(kind, bytes) else str(kind)
        assert found in kinds or "several" in kinds, (name, found, kinds)
