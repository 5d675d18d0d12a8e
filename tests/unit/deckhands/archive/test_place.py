"""Where archived files are: which files there count, and in which order."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest

from deckhands.archive.place import ArchivePlace


@pytest.mark.parametrize("where", ["memory://bucket/place-test", "{folder}/place", "file://{folder}/place/"])
def test_only_files_of_conversations_are_named(where: str, tmp_path: Path) -> None:
    place = ArchivePlace(where.format(folder=tmp_path))
    assert place.names() == []
    for name in ("abc-1", "abc-2"):
        place.write(name, BytesIO(b"content"))
    assert sorted(place.names()) == ["abc-1", "abc-2"]
    place.remove("abc-1")
    assert place.names() == ["abc-2"]


def test_the_file_that_was_written_last_comes_first_and_no_other_counts(tmp_path: Path) -> None:
    place = ArchivePlace(str(tmp_path))
    for number, name in ((2, "later"), (1, "earlier"), (3, "last")):
        place.write(name, BytesIO(b"content"))
        os.utime(place.path(name), (number, number))
    for stray in ("later.zip", "ff/x/later.zip", "ff/..zip", f"{Path(place.path('later')).parent.name}/other.zip"):
        path = tmp_path / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody else's")
    assert place.names() == ["last", "later", "earlier"]
