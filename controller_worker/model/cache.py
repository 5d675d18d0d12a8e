"""Caches replies by exact request, for evaluations that run again.

Each reply is one file, named after the SHA-256 of the provider's whole input. The files are in a directory or in an
object store that fsspec can reach. A location that all workers share serves a whole cluster.

Holds: a file is complete or absent. Only complete replies are kept, never errors. No API key is in a file or a file
name. A cached reply costs nothing.
Does not: match similar requests. One more character in a prompt, another parameter or another `cache_scope` makes
another request. Does not delete files: a reply older than `cache_ttl_seconds` is requested again and overwritten.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from broker.runtime import Clock, new_key
from controller_worker.providers import (
    LLM,
    CallUsage,
    Completion,
    Delta,
    LLMConfig,
    ModelRequest,
    ToolCall,
    count_prompt_tokens,
)

FORMAT_VERSION = 1
_NOT_PART_OF_A_REQUEST = frozenset({
    *("api_key", "aws_access_key_id", "aws_secret_access_key", "num_retries", "retry_multiplier", "retry_min_wait"),
    *("retry_max_wait", "timeout", "connect_timeout", "first_byte_timeout", "read_timeout", "fallbacks", "router"),
    *("max_message_chars", "input_cost_per_token", "output_cost_per_token", "backend", "cache_dir", "batch"),
    *("cache_ttl_seconds", "openrouter_site_url", "openrouter_app_name", "count_tokens", "tenants", "scripts_dir"),
    *("rollout_api", "session_header", "own_endpoints"),
})  # fmt: skip

_log = logging.getLogger(__name__)


class CachedLLM:
    """A model that answers repeated requests from the cache."""

    def __init__(self, inner: LLM, config: LLMConfig, clock: Clock) -> None:
        assert config.cache_dir is not None
        self._inner = inner
        self._clock = clock
        self._shelf: _ReplyStore = (
            _ObjectStore(config.cache_dir, self._clock)
            if "://" in config.cache_dir
            else _Directory(Path(config.cache_dir).expanduser())
        )
        self._ttl_seconds = config.cache_ttl_seconds
        # Newer settings are part of a name only if they change a request. This keeps older cached replies valid.
        later = {name for name in ("strict_tools", "structured_output") if getattr(config, name) == "off"}
        self._settings = config.model_dump(mode="json", exclude={*_NOT_PART_OF_A_REQUEST, *later})

    async def complete(self, request: ModelRequest) -> Completion:
        """Answer from the cache, or call the model once. See `LLM.complete`."""
        if request.rollout is not None:  # a sample that repeats teaches nothing, and files keep no tokens
            return await self._inner.complete(request)
        began = self._clock.monotonic()
        name = await asyncio.to_thread(self._name, request)
        kept = await asyncio.to_thread(self._read, name)
        if kept is not None:
            if request.on_delta is not None and kept.text:
                request.on_delta(Delta("text", kept.text))
            return replace(kept, cost_usd=0.0, latency_seconds=self._clock.monotonic() - began)
        completion = await self._inner.complete(request)
        await asyncio.to_thread(self._write, name, completion)
        return completion

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """See `count_prompt_tokens`."""
        return await count_prompt_tokens(self._inner, request)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()

    def _name(self, request: ModelRequest) -> str:
        asked: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "settings": self._settings,
            "messages": [asdict(message) for message in request.messages],
            "tools": [[tool.name, tool.description, tool.parameters] for tool in request.tools],
            "temperature": request.temperature,
            "stop": request.stop,
        }
        if request.output_schema is not None:
            asked["output_schema"] = request.output_schema
        name = hashlib.sha256(json.dumps(asked, sort_keys=True, default=_to_plain).encode()).hexdigest()
        return f"{name[:2]}/{name}.json"

    def _read(self, name: str) -> Completion | None:
        try:
            content, kept_at = self._shelf.read(name)
            age = self._clock.now().timestamp() - kept_at
            return _to_completion(json.loads(content)) if age <= self._ttl_seconds else None
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  (every kind of store has its own errors)
            _log.warning("cannot use the cached reply %s: %r", name, error)
            return None

    def _write(self, name: str, completion: Completion) -> None:
        """Store a reply. If the disk is full or the store is unavailable, the call still succeeds."""
        try:
            content = json.dumps(asdict(completion), default=_to_plain).encode("utf-8", errors="replace")
            self._shelf.write(name, content)
        except Exception as error:  # noqa: BLE001  (every kind of store has its own errors)
            _log.warning("cannot cache a reply as %s: %s", name, error)


class _ReplyStore(Protocol):
    """The place where replies are stored."""

    def read(self, name: str) -> tuple[bytes, float]:
        """Return a file and its write time in epoch seconds. Raise FileNotFoundError if there is none."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        ...


class _Directory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> tuple[bytes, float]:
        path = self._folder / name
        return path.read_bytes(), path.stat().st_mtime

    def write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        beside = path.with_suffix(f".{new_key()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(content)
            os.replace(beside, path)  # noqa: PTH105  (one step: a reader sees the old file or the new one)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


class _ObjectStore:
    """Stores files through fsspec. Object stores write atomically; the write time is stored in front of the reply."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url.rstrip("/")
        self._clock = clock

    def read(self, name: str) -> tuple[bytes, float]:
        files, path = self._open(name)
        head, _, content = files.cat_file(path).partition(b"\n")
        return content, float(head)

    def write(self, name: str, content: bytes) -> None:
        files, path = self._open(name)
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, b"%.3f\n%b" % (self._clock.now().timestamp(), content))

    def _open(self, name: str) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        files, path = fsspec.core.url_to_fs(f"{self._url}/{name}")
        return files, path


def _to_completion(fields: Mapping[str, Any]) -> Completion:
    return Completion(
        **dict(fields)
        | {
            "tool_calls": tuple(ToolCall(**call) for call in fields["tool_calls"]),
            "thinking_blocks": tuple(fields["thinking_blocks"]),
            "usage": CallUsage(**fields["usage"]),
        }
    )


def _to_plain(value: Any) -> Any:
    """Convert one of our values to a value that JSON can hold."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a request cannot contain a {type(value).__name__}")
