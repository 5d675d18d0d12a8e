"""What a directory out of a workspace becomes on this machine; an agent may have chosen its names and links."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from deckhands.client.remote.remote_files import TAR, _put


def packed(*members: tuple[str, str, str]) -> bytes:
    """A tar file of members: name, content, and what a link leads to."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = (
                (tarfile.SYMTYPE, link, 0) if link else (tarfile.REGTYPE, "", len(text))
            )
            archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def test_directory_is_written_into_an_existing_or_new_one(tmp_path: Path) -> None:
    content = packed(("made/a", "1", ""), ("made/inner/b", "2", ""), ("made/link", "", "inner/b"))
    _put(content, TAR, "some/made", tmp_path)
    _put(content, TAR, "some/made", tmp_path / "named")
    for folder in (tmp_path / "made", tmp_path / "named"):
        assert ((folder / "a").read_text(), (folder / "link").read_text()) == ("1", "2")


def test_nothing_is_written_beside_the_directory(tmp_path: Path) -> None:
    (tmp_path / "neighbour").mkdir()
    hostile = (
        *(("made/good", "1", ""), ("made/out", "", "../neighbour"), ("made/out/evil", "x", "")),
        *(("made/../neighbour/evil", "x", ""), ("neighbour/evil", "x", ""), ("/tmp/evil", "x", "")),
    )
    _put(packed(*hostile), TAR, "made", tmp_path / "copy")
    assert (tmp_path / "copy" / "good").read_text() == "1"
    assert list((tmp_path / "neighbour").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "neighbour"]
