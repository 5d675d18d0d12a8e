"""`RemoteRolloutRun`: a rollout run at a server, with the methods of `RolloutRun`.

Holds: a request takes effect once, even if replies are lost. A restarted program continues after its last
acknowledgement.
Does not: drive the run; `deckhands rollouts attach` does, on a machine of the operator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Self

from broker.runtime import new_key
from deckhands.client import ServerCalls
from deckhands.rollouts.record import RunState
from deckhands.rollouts.run import Group
from deckhands.rollouts.spec import RolloutSpec

WAIT_SECONDS = 30.0
LONG_SECONDS = 600.0
"""The time limit for a group with all its tokens, and for a pause."""
PAGE = 500
NEXT_HEADER = "Next-After"
"""The header with the cursor of the next page of a list."""
DEFAULT_REASON = "asked for by a program"


class RemoteRolloutRun:
    """A rollout run that the key of a server may see.

    Attributes:
        name: its name, which the server chose.
    """

    def __init__(self, url: str, api_key: str, name: str) -> None:
        self.name = name
        self._calls = ServerCalls(url, api_key)

    @classmethod
    async def start(cls, url: str, api_key: str, spec: RolloutSpec, *, idempotency_key: str | None = None) -> Self:
        """Start a run. Idempotent with a key, for a day.

        Raises:
            UsageError: the specification cannot be used, or names files, code or engines of the driver's machine.
            ServerUnavailable: the server does not answer.
        """
        spec.require_served()
        run = cls(url, api_key, "")
        try:
            body = spec.model_dump(mode="json", exclude_unset=True)
            answer = await run._calls.ask("POST", "/rollouts", body=body, key=idempotency_key or new_key())
        except BaseException:
            await run.aclose()
            raise
        run.name = answer.json()["name"]
        return run

    @staticmethod
    async def list_all(url: str, api_key: str, *, page_size: int = PAGE) -> list[dict[str, Any]]:
        """Return the runs that the key may see, the latest change first, as `describe` without events.

        Args:
            page_size: how many to request at once.
        """
        calls = ServerCalls(url, api_key)
        try:
            rows: dict[str, dict[str, Any]] = {}
            after, seen = "", set[str]()
            while after not in seen:  # a server that repeats a page must not keep the program
                seen.add(after)
                query = {"limit": page_size} | ({"after": after} if after else {})
                answer = await calls.ask("GET", "/rollouts", query=query)
                page = {row["name"]: row for row in answer.json()}
                is_known = bool(page) and page.keys() <= rows.keys()
                rows |= {name: row for name, row in page.items() if name not in rows}
                after = answer.headers.get(NEXT_HEADER, "")
                if not after or is_known:
                    break
            return list(rows.values())
        finally:
            await calls.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._calls.aclose()

    async def describe(self) -> dict[str, Any]:
        """Return its state and its numbers, with its last events."""
        found: dict[str, Any] = (await self._calls.ask("GET", f"/rollouts/{self.name}")).json()
        return found

    async def load_state(self) -> RunState:
        """Return its state and the version of its policy."""
        about = await self.describe()
        return RunState(about["state"], about["version"], about["is_driven"])

    async def groups(self, *, consumer: str = "trainer", is_following: bool = True) -> AsyncGenerator[Group]:
        """Yield the finished groups with their tokens; see `RolloutRun.groups`.

        Args:
            consumer: the name of this reader. A program that dies continues under the same name.
            is_following: False to end after the groups that exist now.
        """
        after = 0
        while True:
            timeout = WAIT_SECONDS if is_following else 0.0
            body = {"consumer": consumer, "after": after, "timeout_seconds": timeout}
            path = f"/rollouts/{self.name}/groups"
            found = (await self._calls.ask("POST", path, body=body, read_seconds=LONG_SECONDS)).json()
            if found["group"] is not None:
                group = Group.from_json(found["group"], self.acknowledge)
                after = group.number
                yield group
            elif found["is_over"] or not is_following:
                return

    async def acknowledge(self, number: int) -> None:
        """Acknowledge the group of a delivery, so that it is not delivered again. Idempotent."""
        await self._calls.ask("POST", f"/rollouts/{self.name}/groups/{number}/ack")

    async def weights_changed(self, version: int) -> None:
        """Record that the engines have the weights of a version from now on. Idempotent.

        Raises:
            UsageError: the version is older than an earlier recorded one.
        """
        await self._calls.ask("POST", f"/rollouts/{self.name}/weights", body={"version": version})

    async def pause(self, reason: str = DEFAULT_REASON) -> None:
        """Pause the whole run: no trajectory starts or takes a further step."""
        await self._steer("pause", reason)

    async def resume(self, reason: str = DEFAULT_REASON) -> None:
        """Continue a paused run."""
        await self._steer("resume", reason)

    async def abort(self, reason: str = DEFAULT_REASON) -> None:
        """End the run: no further group is delivered, and its conversations are cancelled. Idempotent."""
        await self._steer("abort", reason)

    async def _steer(self, verb: str, reason: str) -> None:
        path = f"/rollouts/{self.name}/{verb}"
        await self._calls.ask("POST", path, body={"reason": reason}, read_seconds=LONG_SECONDS)
