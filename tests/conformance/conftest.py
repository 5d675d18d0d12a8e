"""Fixtures of tests that run on each kind of store: a worker's readers are closed at the end of its test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from broker.coordination.action_streams import ActionQueue
from broker.limits.ledger import Ledger
from broker.store.store import Store
from tests.broker_parts import enter
from tests.broker_parts import queue as make_queue


@pytest.fixture
async def closing(store: Store) -> AsyncIterator[Callable[[Any], Any]]:
    """Return the argument, and close it at the end."""
    async with AsyncExitStack() as stack:

        def close_later(opened: Any) -> Any:
            stack.push_async_callback(opened.aclose)
            return opened

        yield close_later


@pytest.fixture
def queue(store: Store, closing: Callable[[Any], Any]) -> Callable[..., ActionQueue]:
    """Open what a tool worker reads: t1 on n1, of the pool bash, unless said otherwise."""

    def opened(
        worker_id: str = "t1", node: str = "n1", pools: Sequence[str] = ("bash",), of: Store = store
    ) -> ActionQueue:
        queue: ActionQueue = closing(make_queue(of, worker_id, node=node, pools=pools))
        return queue

    return opened


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    """Return the budgets of a store with two controller workers."""
    for worker in ("w1", "w2"):
        await enter(store, worker)
    return Ledger(store)
