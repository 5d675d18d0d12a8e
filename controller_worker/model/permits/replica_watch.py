"""The health of replicas: asked every few seconds, by one worker for the whole cluster.

An engine answers `/health` at the root of its server. `/metrics`, where an engine has it, tells how many tokens its
prefix cache holds and which part of it replies in flight use (vLLM and SGLang).

Holds: a replica that does not answer gets no calls until it does. Reports are read with limits of size and time; a
number outside of its range counts as not reported.
Does not: follow redirects, or send a key.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import ClientSession

POLL_SECONDS = 3.0
ANSWER_SECONDS = 5.0
MAX_REPORT_BYTES = 4 << 20
MAX_CACHE_TOKENS = 1 << 40
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(?<!\w)(\w{1,100})="((?:[^"\\]|\\.)*)"')  # each part starts at one place: never quadratic
_PREFIXES = ("vllm:", "sglang:")
_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_TOKENS = "sglang:max_total_num_tokens"
_BLOCKS = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica. `cache_tokens` and `use` are None if it does not report them."""

    is_up: bool
    cache_tokens: int | None = None
    use: float | None = None


def parse_metrics(text: str) -> tuple[int | None, float | None]:
    """Return the size of an engine's cache in tokens, and its used part, from its metrics for Prometheus."""
    tokens: list[float] = []
    uses: list[float] = []
    for line in text.splitlines():
        if not line.startswith(_PREFIXES) or not (found := _SAMPLE.match(line)):
            continue
        name, labels, value = found[1], dict(_LABEL.findall(found[2] or "")), _to_number(found[3])
        if name in _USE and value is not None:
            uses.append(value)
        elif name == _TOKENS and value is not None:
            tokens.append(value)
        elif name == _BLOCKS:
            blocks, size = _to_number(labels.get("num_gpu_blocks")), _to_number(labels.get("block_size"))
            tokens += [blocks * size] if blocks and size else []
    size = min((one for one in tokens if 1 <= one <= MAX_CACHE_TOKENS), default=None)
    return None if size is None else int(size), max((one for one in uses if 0 <= one <= 1), default=None)


def _to_number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class ReplicaWatch:
    """Asks replicas for their state. Imports aiohttp with the first request."""

    def __init__(self) -> None:
        self._session: ClientSession | None = None

    async def ask(self, base_url: str) -> ReplicaReport:
        """Ask one replica. Raises nothing but cancellation."""
        parts = urlsplit(base_url)
        root = f"{parts.scheme}://{parts.netloc}"
        status, _ = await self._get(f"{root}/health")
        if status is None or status >= 500:
            return ReplicaReport(is_up=False)
        status, body = await self._get(f"{root}/metrics")
        if status != 200:
            return ReplicaReport(is_up=True)
        return ReplicaReport(True, *parse_metrics(body.decode(errors="replace")))

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, url: str) -> tuple[int | None, bytes]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))
        try:
            async with self._session.get(url, allow_redirects=False) as answer:
                return answer.status, await answer.content.read(MAX_REPORT_BYTES) if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None, b""
