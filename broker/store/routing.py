"""Routing in a Redis Cluster: URLs of clusters, slots of keys, keys of commands.

    redis+cluster://user:password@host1:6379,host2:6379     rediss+cluster:// with TLS

The hosts are any nodes; the others are learnt from them. User, password and TLS options apply to all nodes.

Holds: the slot of a key is CRC-16 (XMODEM) of its hash tag, or of the whole key without one, modulo 16,384.
Does not: know every command. It knows the commands that Deckhands sends; for any other, it takes the first argument as
the key. Source: the Redis Cluster specification.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from broker.store.sentinel import Host, parse_hosts

SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""The scheme of such a URL, and the one of its nodes' URLs."""
NODE_PORT = 6379
SLOTS = 16_384
CLUSTER_REMEDY = "Use redis+cluster://user:password@host1:6379,host2:6379,host3:6379 with some of its nodes."

_KEYLESS = frozenset(
    {
        *("ACL", "ASKING", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "FUNCTION", "INFO", "PING", "SCAN"),
        *("TIME", "WAIT", "WAITAOF"),
    }
)
_KEY_AFTER_SUBCOMMAND = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY"})
_KEY_AFTER_COUNT = frozenset({"FCALL", "FCALL_RO"})
_KEY_AFTER_STREAMS = frozenset({"XREAD", "XREADGROUP"})


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """The parts of a URL.

    Attributes:
        seeds: hosts and ports of some nodes.
        servers: the URL of a node, with the host and port of the first one.
    """

    seeds: tuple[Host, ...]
    servers: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL.

        Raises:
            ValueError: it cannot be used; the message says why.
        """
        parts = urlsplit(url)
        seeds, netloc = parse_hosts(parts.netloc, NODE_PORT)
        if not seeds:
            raise ValueError("it names no node")
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has no database other than 0")
        return cls(seeds, urlunsplit((SCHEMES[parts.scheme.lower()], netloc, "", parts.query, "")))


def is_cluster_url(url: str) -> bool:
    """Return whether a URL names a cluster."""
    return url.partition("://")[0].lower() in SCHEMES


def find_slot(key: bytes | str) -> int:
    """Return the slot of a key."""
    name = key.encode() if isinstance(key, str) else key
    start = name.find(b"{") + 1
    if start:
        end = name.find(b"}", start)
        if end > start:
            name = name[start:end]
    return binascii.crc_hqx(name, 0) % SLOTS


def find_command_slot(command: Sequence[bytes | str | int | float]) -> int | None:
    """Return the slot of a command's first key; None if it has no key."""
    name = command[0]
    if name in _KEYLESS:
        return None
    at = 1
    if name in _KEY_AFTER_COUNT:
        if int(command[2]) == 0:
            return None
        at = 3
    elif name in _KEY_AFTER_STREAMS:
        at = command.index("STREAMS") + 1
    elif name in _KEY_AFTER_SUBCOMMAND:
        at = 2
    key = command[at]
    return find_slot(key if isinstance(key, (bytes, str)) else str(key))


def parse_node(node: Sequence[Any], asked: Host) -> Host:
    """Return a node of a reply to CLUSTER SLOTS; without a host, it is that of the node that has answered."""
    host = (node[0] or b"").decode()
    return (asked[0] if host in ("", "?") else host), int(node[1])


def find_replicas(ranges: Sequence[Sequence[Any]], node_id: bytes | None, place: Host) -> int | None:
    """Return how many replicas a primary has that have not failed; None if it serves no slot.

    Args:
        ranges: its own reply to CLUSTER SLOTS.
        node_id: its id, if that is known; it may know itself by another address than others.
    """
    for _, _, node, *others in ranges:
        if node[2] == node_id or parse_node(node, place) == place:
            return len(others)
    return None
