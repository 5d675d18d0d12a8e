"""Many short conversations go through a store that could not hold them, and all of them are in the archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.retiring import measure


@pytest.mark.parametrize(
    ("count", "limit_mb", "backlog"), [(600, 6, 40), pytest.param(20_000, 30, 1_000, marks=pytest.mark.slow)]
)
async def test_none_is_refused_and_all_are_archived(tmp_path: Path, count, limit_mb, backlog, capsys) -> None:
    status = await measure(tmp_path, count, limit_mb, backlog)
    assert status == 0, capsys.readouterr().out
