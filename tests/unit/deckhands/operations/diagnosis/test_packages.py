"""Another distribution that installs a package of our names."""

from __future__ import annotations

from pathlib import Path

import pytest

from deckhands.operations.diagnosis.diagnostics import examine_packages


def test_distribution_with_a_package_of_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine_packages() == []
    described = tmp_path / "middleman-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: middleman\nVersion: 1\n")
    (described / "top_level.txt").write_text("broker\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = examine_packages()
    assert (finding.is_good, finding.is_needed) == (False, True)
    assert finding.detail == "broker is also installed by middleman"
