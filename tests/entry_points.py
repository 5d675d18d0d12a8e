"""Installs a Python package with entry points for one test."""

from __future__ import annotations

from pathlib import Path

import pytest


def install_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, entry_points: dict[str, dict[str, str]]
) -> None:
    """Put a module on the path, with the description of a package that holds it.

    Args:
        folder: where both are written.
        entry_points: the names of each group, and what in the module each stands for.
    """
    (folder / f"{module}.py").write_text(source)
    described = folder / f"{module}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [
        line
        for group, names in entry_points.items()
        for line in (f"[{group}]", *(f"{name} = {module}:{value}" for name, value in names.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
