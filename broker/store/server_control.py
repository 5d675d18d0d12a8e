"""An operator's actions on the servers of a store: replace a primary, and close the connections of a process.

Both need the rights of an administrator. A process names its connections (`make_connection_name`). A client may choose
any name, but that affects only its own connections.
"""

from __future__ import annotations

import re

from broker.runtime import StoreMisconfigured
from broker.store.cluster import ClusterConnection
from broker.store.connection import Connection, MultiplexedConnection
from broker.store.sentinel import order_fail_over

_CLIENT = re.compile(r"(?:^|\s)(id|addr|name)=(\S*)")


async def replace_primary(connection: Connection, *, share: float) -> str:
    """Replace a live primary by a replica, and return the replica that is being promoted.

    Args:
        share: chooses one of a cluster's primaries; from 0 (inclusive) to 1 (exclusive).

    Raises:
        StoreUnavailable: neither a Sentinel nor a replica answers.
        StoreMisconfigured: the store has no replica to promote, or refuses the order.
    """
    if isinstance(connection, ClusterConnection):
        host, port = await connection.promote_replica(share)
        return f"the cluster's node {host}:{port}"
    sentinels = connection.load_sentinels() if isinstance(connection, MultiplexedConnection) else None
    if sentinels is None:
        raise StoreMisconfigured("the store has no Sentinels, and is no cluster", remedy="Add replicas.")
    url, context = sentinels
    await order_fail_over(url, context)
    return f"a replica of {url.service}"


async def close_connections(connection: Connection, name: str) -> int:
    """Close all connections that have a name, at every primary, and return their number.

    Raises:
        StoreMisconfigured: the login may not do this.
    """
    if isinstance(connection, ClusterConnection):
        lists = list((await connection.call_each("CLIENT", "LIST")).values())
    else:
        lists = [await connection.call("CLIENT", "LIST")]
    closed = 0
    for line in b"\n".join(lists).decode(errors="replace").splitlines():
        fields = dict(_CLIENT.findall(line))
        if fields.get("name") != name:
            continue
        # Each node of a cluster has its own ids, so the address has to match as well.
        order = ("CLIENT", "KILL", "ID", fields["id"], "ADDR", fields["addr"], "SKIPME", "yes")
        if isinstance(connection, ClusterConnection):
            closed += sum((await connection.call_each(*order)).values())
        else:
            closed += await connection.call(*order)
    return closed
