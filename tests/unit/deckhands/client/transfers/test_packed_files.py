"""Arriving copies are written completely or not at all, and never outside the target."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from broker.runtime.errors import UsageError
from deckhands.client.transfers.packed_files import pack, unpack


def packed(source: Path) -> io.BytesIO:
    target = io.BytesIO()
    assert pack(source, target) == []
    return io.BytesIO(target.getvalue())


def archive_of(*members: tuple[str, str]) -> io.BytesIO:
    """Return a packed tar file of files and of links, `name -> target`."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, link in members:
            header = tarfile.TarInfo(name)
            header.type, header.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
            archive.addfile(header)
    return io.BytesIO(zstandard.ZstdCompressor().compress(plain.getvalue()))


def nothing() -> None:
    return


def refuses() -> None:
    raise UsageError("not what was sent")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("new")
    (folder / "run").write_text("x")
    (folder / "run").chmod(0o755)
    return folder


def test_a_directory_becomes_the_target_or_goes_into_it(source: Path, tmp_path: Path) -> None:
    assert unpack(packed(source), tmp_path / "target", nothing).files == 4
    assert (tmp_path / "target" / "deep" / "file").read_text() == "new"
    assert os.access(tmp_path / "target" / "run", os.X_OK)
    (tmp_path / "target" / "deep" / "file").write_text("old")
    (tmp_path / "target" / "deep" / "kept").write_text("kept")
    (tmp_path / "target").rename(tmp_path / "inside")
    (tmp_path / "outer").mkdir()
    (tmp_path / "inside").rename(tmp_path / "outer" / "source")
    unpack(packed(source), tmp_path / "outer", nothing)
    found = tmp_path / "outer" / "source" / "deep"
    assert ((found / "file").read_text(), (found / "kept").read_text()) == ("new", "kept")


def test_corrupt_copy_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        unpack(packed(source), tmp_path / "target", refuses)
    with pytest.raises(UsageError, match="not a whole tar file"):
        unpack(io.BytesIO(packed(source).getvalue()[:40]), tmp_path / "target", nothing)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_files_and_directories_do_not_replace_each_other(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target" / "source" / "run").mkdir(parents=True)
    with pytest.raises(UsageError, match="run is a directory"):
        unpack(packed(source), tmp_path / "target", nothing)
    (tmp_path / "other").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other" / "source").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="source is not a directory"):
        unpack(packed(source), tmp_path / "other", nothing)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_link_leads_out(tmp_path: Path) -> None:
    hostile = archive_of(("top/out", "/etc"), ("top/up", "../../x"), ("top/out/file", ""), ("../escaped", ""))
    done = unpack(hostile, tmp_path / "target", nothing)
    assert done.skipped == ["top/out", "top/up", "../escaped"]
    assert not (tmp_path / "target" / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_nothing_is_written_beside_the_one_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "target" / "neighbour").mkdir(parents=True)
    hostile = archive_of(
        *(("top/good", ""), ("top/link", "good"), ("top/out", "../neighbour"), ("top/out/evil", "")),
        *(("top/../neighbour/evil", ""), ("neighbour/evil", ""), ("/tmp/evil", "")),
    )
    done = unpack(hostile, tmp_path / "target", nothing)
    assert done.skipped == ["top/out", "top/../neighbour/evil", "neighbour/evil", "/tmp/evil"]
    assert list((tmp_path / "target" / "neighbour").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["neighbour", "top"]


@pytest.mark.parametrize("name", ["", "named"])
def test_hard_links_are_kept(source: Path, tmp_path: Path, name: str) -> None:
    (source / "same").hardlink_to(source / "run")
    target = tmp_path / name if name else tmp_path / "outer"
    if not name:
        target.mkdir()
    assert unpack(packed(source), target, nothing).skipped == []
    made = target if name else target / "source"
    assert (made / "same").read_text() == "x"
    assert (made / "same").samefile(made / "run")
