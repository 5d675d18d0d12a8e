"""Servers with known vulnerabilities: refused if the version is certain, reported if it may be patched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.runtime.errors import StoreMisconfigured
from broker.store.connection import Argument
from broker.store.server_checks import find_vulnerability
from broker.store.store import open_store
from broker.testing.memory_store import MemoryConnection, MemoryServer


class Telling(MemoryConnection):
    """A connection to a server that says it has this version."""

    def __init__(self, server: MemoryServer, info: str) -> None:
        super().__init__(server)
        self._info = info

    async def call(self, *sent: Argument) -> Any:
        return self._info.encode() if sent == ("INFO",) else await super().call(*sent)

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        return await super().call_many(commands)


def redis(version: str) -> dict[str, str]:
    return {"redis_version": version}


def valkey(version: str) -> dict[str, str]:
    return {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": version}


@pytest.mark.parametrize(
    ("facts", "fixed_in"),
    [
        (redis("7.2.10"), "7.2.11"),
        (redis("7.4.5"), "7.4.6"),
        (redis("8.0.3"), "8.0.4"),
        (redis("8.2.1"), "8.2.2"),
        (redis("7.0.14"), "7.2.11"),
        (valkey("7.2.10"), "7.2.11"),
        (valkey("8.0.5"), "8.0.6"),
        (valkey("8.1.3"), "8.1.4"),
    ],
)
def test_version_before_the_fix_certainly_has_the_hole(facts: dict[str, str], fixed_in: str) -> None:
    found = find_vulnerability(facts)
    assert found.is_certain
    assert "CVE-2025-49844" in found.text
    assert fixed_in in found.remedy


@pytest.mark.parametrize("facts", [redis("7.0.15"), redis("8.0.2"), valkey("8.1.1"), redis("7.1.0"), redis("x")])
def test_vendor_version_numbers_may_have_the_fix(facts: dict[str, str]) -> None:
    found = find_vulnerability(facts)
    assert not found.is_certain
    assert "CVE-2025-49844" in found.text


@pytest.mark.parametrize("version", ["7.2.11", "7.4.6", "8.0.4", "8.2.2", "8.4.0", "8.6.2"])
def test_blocked_clients_hole_names_the_setting_that_closes_it(version: str) -> None:
    found = find_vulnerability(redis(version))
    assert not found.is_certain
    assert "CVE-2026-23479" in found.text
    assert "maxmemory-clients 0" in found.remedy


@pytest.mark.parametrize(
    "facts",
    [
        redis("8.6.3"),
        redis("9.0.0"),
        valkey("7.2.11"),
        valkey("8.0.6"),
        valkey("8.1.4"),
        valkey("9.0.0"),
        valkey("9.1.2"),
    ],
)
def test_a_version_with_all_fixes_is_not_spoken_of(facts: dict[str, str]) -> None:
    assert find_vulnerability(facts) is None


async def test_store_with_a_hole_is_refused_unless_declared_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "redis_version:7.2.5\r\nmaxmemory:0\r\n"
    with pytest.raises(StoreMisconfigured, match=r"CVE-2025-49844.*7\.2\.11.*DECKHANDS_STORE_PATCHED"):
        await open_store(Telling(MemoryServer(), told))
    monkeypatch.setenv("DECKHANDS_STORE_PATCHED", "1")
    store = await open_store(Telling(MemoryServer(), told))
    assert store.warnings == ()


async def test_store_possibly_with_a_hole_serves_with_a_warning() -> None:
    store = await open_store(Telling(MemoryServer(), "redis_version:7.0.15\r\nmaxmemory:0\r\n"))
    (warning,) = store.warnings
    assert "CVE-2025-49844" in warning
    assert "7.0.15" in warning


@pytest.mark.parametrize("version", ["6.2.20", "6.0.16"])
async def test_a_server_without_functions_is_refused_whatever_its_operator_says(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECKHANDS_STORE_PATCHED", "1")
    with pytest.raises(StoreMisconfigured, match=f"is version {version}"):
        await open_store(Telling(MemoryServer(), f"redis_version:{version}\r\n"))
