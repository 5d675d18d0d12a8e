"""Many conversations that ask one model on a local provider, with real controller workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.contract.events import AgentSpec, Event, LLMSpec, Tenancy
from tests.faults.harness import FaultCluster
from tests.model_server.running_server import RunningModelServer

THINK = {"tool_calls": [{"name": "think", "arguments": {"thought": "hm"}}]}


class Crowd(FaultCluster):
    """Conversations that ask one model on a local provider."""

    def __init__(self, root: Path, provider: RunningModelServer) -> None:
        super().__init__(root)
        self.provider = provider

    def start(self, name: str, quota: str = "", **environment: str) -> None:
        """Start a controller worker that keeps a quota of the provider's model."""
        table = f'[[quota]]\nmodel = "openai/*"\n{quota}' if quota else ""
        self.start_controller(
            name,
            DECKHANDS_QUOTAS=table,
            LLM_BASE_URL=f"{self.provider.url}/v1",
            LLM_API_KEY="secret-key",
            LLM_BACKEND="openai",
            **environment,
        )

    async def begin(self, count: int, *, headless: bool = True, **tenancy: Any) -> list[str]:
        agent = AgentSpec(llm=LLMSpec(model="openai/large"), enable_stuck_detection=False)
        told = Tenancy(**tenancy) if tenancy else None
        return list(
            await asyncio.gather(
                *(self.client.submit("task", agent=agent, headless=headless, tenancy=told) for _ in range(count))
            )
        )

    async def logs(self, ids: Sequence[str]) -> list[list[Event]]:
        return [await self.client.events(cid) for cid in ids]

    async def until_replies(self, ids: Sequence[str], count: int, *, limit: float = 40.0) -> None:
        async def there() -> bool:
            rows = [await self.client.row(cid) for cid in ids]
            return sum(int(row.fields.get("iterations", 0)) for row in rows) >= count

        await self.until(there, limit=limit, what=f"{count} replies")


def script(root: Path, turns: int, *, prompt_tokens: int = 1_000) -> str:
    """A script of `turns` thoughts and a finish, of which each reply is so many tokens in and 100 out."""
    usage = {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 100}}
    path = root / "provider.json"
    finish = {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}], **usage}
    path.write_text(json.dumps({"turns": [THINK | usage] * turns + [finish]}))
    return str(path)
