"""`deckhands doctor`, on this machine and on one that has nothing."""

from __future__ import annotations

from pathlib import Path

from tests.integration.command_line import deckhands, environment
from tests.stores import RealServer


def test_it_says_what_this_machine_can_do(tmp_path: Path) -> None:
    done = deckhands("doctor", "--json", env=environment(tmp_path))
    assert done.code == 0
    found = {finding["name"]: finding for finding in done.json}
    assert list(found) == ["sandbox bwrap", "system call filter", "Landlock", "control groups", "room for sessions"]
    assert found["sandbox bwrap"] == {
        "name": "sandbox bwrap",
        "is_good": True,
        "is_needed": True,
        "detail": "holds: 9 attempts to get out were stopped",
    }
    assert found["system call filter"]["is_good"]


def test_it_is_readable(tmp_path: Path) -> None:
    lines = deckhands("doctor", env=environment(tmp_path)).out.splitlines()
    assert lines[0] == "ok      sandbox bwrap       holds: 9 attempts to get out were stopped"
    assert len(lines) == 5


def test_what_a_pool_needs(tmp_path: Path) -> None:
    env = environment(tmp_path, DECKHANDS_POOLS="bash,browser", DECKHANDS_CHROMIUM=str(tmp_path / "none"))
    done = deckhands("doctor", env=env)
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("missing pool browser")
    assert "which is no program. Install it (on Debian: apt-get install chromium)" in last
    served = deckhands("doctor", env=environment(tmp_path, DECKHANDS_POOLS="bash,browser"))
    assert served.code == 0
    assert served.out.splitlines()[-1].split()[:3] == ["ok", "pool", "browser"]


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    done = deckhands("doctor", env=environment(tmp_path, DECKHANDS_URL=f"unix://{tmp_path}/nobody"))
    assert done.code == 1
    assert done.out.splitlines()[-1].startswith("missing store ")


def test_a_store_that_serves(tmp_path: Path, valkey_server: RealServer) -> None:
    done = deckhands("doctor", env=environment(tmp_path, DECKHANDS_URL=valkey_server.url))
    assert done.code == 0
    assert done.out.splitlines()[-1] == "ok      store               The store serves."
