"""Directories to and from a server: as bounded archives whose names and links lead nowhere."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from broker.coordination.transfers import MAX_COPY_BYTES
from broker.runtime.errors import UsageError
from deckhands.client.remote.remote_files import TAR, _put, pack_directory


def test_equal_files_give_equal_archives_without_owners(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "d").mkdir(parents=True)
    for name, mode in (("a.txt", 0o644), ("d/run", 0o4755), (".hidden", 0o600)):
        (project / name).write_text(name)
        (project / name).chmod(mode)
    (project / "link").symlink_to("d/run")
    (project / "outside").symlink_to("/etc/passwd")
    os.link(project / "a.txt", project / "b.txt")
    os.mkfifo(project / "pipe")
    found, again = pack_directory(project), pack_directory(project)
    assert found is not None
    assert again == found
    assert (found.source.name, found.source.format) == ("project.tar.gz", "tar")
    with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
        members = {member.name: member for member in archive}
    assert sorted(members) == [".", "./.hidden", "./a.txt", "./b.txt", "./d", "./d/run", "./link", "./outside"]
    assert members["./d/run"].mode & 0o7777 == 0o755
    assert members["./outside"].linkname == "/etc/passwd", "a link is a link, and what it leads to stays here"
    assert {(member.uid, member.uname, member.gname) for member in members.values()} == {(0, "", "")}
    assert pack_directory(tmp_path / "none") is None


def test_too_large_or_invalid_workspace_is_refused(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "noise").write_bytes(os.urandom(8_192))
    assert pack_directory(project, limit_bytes=16_384) is not None
    with pytest.raises(UsageError, match="has more than 8,192 bytes when packed"):
        pack_directory(project, limit_bytes=8_192)
    with (project / "sparse").open("wb") as file:
        file.truncate(MAX_COPY_BYTES)
    with pytest.raises(UsageError, match="or 4,294,967,296 bytes"):
        pack_directory(project)
    for directory in (Path("/"), Path("/etc"), Path("/home")):
        with pytest.raises(UsageError, match="may not be a workspace"):
            pack_directory(directory)


def packed(*members: tuple[str, str, str]) -> bytes:
    """A tar file of members: name, content, and the target of a link."""
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
