"""The location, validity and order of archived files, and the retention policy as an operator writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from broker.runtime.errors import UsageError
from deckhands.client.archive.retention import Retention
from deckhands.client.archive.storage import ArchiveStorage, ArchiveUnavailable


@pytest.mark.parametrize("where", ["memory://bucket/place-test", "{folder}/place", "file://{folder}/place/"])
def test_only_files_of_conversations_are_named(where: str, tmp_path: Path) -> None:
    place = ArchiveStorage(where.format(folder=tmp_path))
    assert place.names() == []
    for name in ("abc-1", "abc-2"):
        place.write(name, BytesIO(b"content"))
    assert sorted(place.names()) == ["abc-1", "abc-2"]
    place.remove("abc-1")
    assert place.names() == ["abc-2"]


def test_latest_written_file_comes_first_and_only_it_counts(tmp_path: Path) -> None:
    place = ArchiveStorage(str(tmp_path))
    for number, name in ((2, "later"), (1, "earlier"), (3, "last")):
        place.write(name, BytesIO(b"content"))
        os.utime(place.path(name), (number, number))
    for stray in ("later.zip", "ff/x/later.zip", "ff/..zip", f"{Path(place.path('later')).parent.name}/other.zip"):
        path = tmp_path / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody else's")
    assert place.names() == ["last", "later", "earlier"]


class KeptListings(MemoryFileSystem):  # type: ignore[misc]
    """A file system that keeps each listing, as that of S3 does."""

    protocol = "kept"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **options)
        found = self.dircache[path]
        return found if detail else [about["name"] for about in found]

    def info(self, path: str, **options: Any) -> Any:
        path = self._strip_protocol(path)
        folder = path.rpartition("/")[0]
        if folder not in self.dircache:
            return super().info(path, **options)
        for about in self.dircache[folder]:
            if about["name"] == path:
                return about
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.dircache.clear()
            return
        path = self._strip_protocol(path)
        while path:
            self.dircache.pop(path, None)
            path = path.rpartition("/")[0]


def test_files_of_other_programs_are_seen_where_listings_are_kept() -> None:
    fsspec.register_implementation("kept", KeptListings, clobber=True)
    ours, theirs = ArchiveStorage("kept://bucket/archive"), ArchiveStorage("kept://bucket/archive")
    names = [f"abc-{number}" for number in range(600)]  # several in each folder
    for name in names[:300]:
        theirs.write(name, BytesIO(b"content"))
    assert sorted(ours.names()) == sorted(names[:300])
    for name in names[300:]:
        theirs.write(name, BytesIO(b"content"))
    theirs.write(names[0], BytesIO(b"longer content"))
    assert ours.size(names[300]) == len(b"content")
    assert ours.size(names[0]) == len(b"longer content")
    assert sorted(ours.names()) == sorted(names)
    theirs.remove(names[0])
    assert ours.size(names[0]) is None


def test_leftovers_of_killed_writers_go_and_active_writes_stay(tmp_path: Path) -> None:
    place = ArchiveStorage(str(tmp_path))
    place.sweep(before=datetime.now(UTC))  # nothing was written yet
    place.write("whole", BytesIO(b"content"))
    drafts = tmp_path / ".drafts"
    assert not [*drafts.iterdir()]
    for name, age in (("left", 7200), ("under-way", 0)):
        (drafts / name).write_bytes(b"con")
        os.utime(drafts / name, (datetime.now(UTC).timestamp() - age,) * 2)
    place.sweep(before=datetime.now(UTC) - timedelta(hours=1))
    assert [path.name for path in drafts.iterdir()] == ["under-way"]
    assert place.names() == ["whole"]


def test_two_who_write_one_file_spoil_it_for_neither(tmp_path: Path) -> None:
    place = ArchiveStorage(str(tmp_path))

    class Interrupted(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == 0:
                place.write("one", BytesIO(b"the other's"))
            return super().read(size)

    place.write("one", Interrupted(b"content"))
    with place.reading("one") as file:
        assert file.read() == b"content"


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    place = ArchiveStorage(str(tmp_path))

    class Broken(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("no device")

    with pytest.raises(ArchiveUnavailable, match="no device"):
        place.write("one", Broken())
    assert not [*(tmp_path / ".drafts").iterdir()]


WRITING = """
import io, os, sys
from deckhands.client.archive.storage import ArchiveStorage
place = ArchiveStorage(sys.argv[1])
opened = set()
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and os.path.isdir(arguments[0]):
        opened.add(arguments[0])
sys.addaudithook(note)
place.write("conversation", io.BytesIO(b"content"))
print(*sorted(opened), sep="\\n")
"""


def test_new_folder_names_are_synced_with_a_file(tmp_path: Path) -> None:
    """A directory is opened to be synchronized: its entries are not on the disk before that, whatever is in them."""
    root = tmp_path / "above" / "archive"
    arguments = [sys.executable, "-c", WRITING, str(root)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, env={"PATH": ""}, timeout=60)
    folder = Path(ArchiveStorage(str(root)).path("conversation")).parent
    assert {Path(line) for line in done.stdout.splitlines()} >= {folder, root, root.parent, tmp_path}


def policy(tmp_path, text: str) -> Retention:
    path = tmp_path / "retention.toml"
    path.write_text(text)
    return Retention.of_setting(str(path))


def test_without_a_file_everything_is_kept() -> None:
    assert Retention.of_setting("").youngest is None
    assert Retention().rule_for(tenant="", labels={}, state="finished") is None
    assert Retention().warning("") == ""


def test_the_first_rule_that_fits_counts(tmp_path) -> None:
    found = policy(
        tmp_path,
        """
        [[rule]]
        labels = {keep = "yes"}
        age = "never"
        [[rule]]
        tenant = ["acme", "shop"]
        states = "finished"
        age = "2h"
        then = "delete"
        [[rule]]
        age = "30d"
        """,
    )
    ages = [
        found.rule_for(tenant=tenant, labels=labels, state=state).age
        for tenant, labels, state in [
            ("acme", {"keep": "yes", "x": "y"}, "finished"),
            ("shop", {"x": "y"}, "finished"),
            ("shop", {}, "error"),
            ("", {}, "finished"),
        ]
    ]
    assert ages == [None, timedelta(hours=2), timedelta(days=30), timedelta(days=30)]
    assert found.youngest == timedelta(hours=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nage = "30 days"', "rule.0.age"),
        ('[[rule]]\nage = "-1d"', "rule.0.age"),
        ("[[rule]]\nage = 30", "rule.0.age"),
        ('[[rule]]\ntenant = "acme"', "rule.0.age"),
        ('[[rule]]\nage = "1d"\nlabel = {a = "b"}', "rule.0.label"),
        ('[[rule]]\nage = "1d"\nstates = ["gone"]', "rule.0.states.0"),
        ('[[rule]]\nage = "1d"\nthen = "burn"', "rule.0.then"),
        ("rule = ", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(tmp_path, text, said) -> None:
    with pytest.raises(UsageError, match=said):
        policy(tmp_path, text)
    with pytest.raises(UsageError, match="cannot be read"):
        Retention.of_setting(str(tmp_path / "not-there"))


def test_what_is_deleted_for_good_is_said(tmp_path) -> None:
    archives, deletes = '[[rule]]\nage = "1d"\n', '[[rule]]\nage = "1d"\nthen = "delete"\n'
    assert "nothing leaves the store" in policy(tmp_path, archives).warning("")
    assert policy(tmp_path, archives).warning("/archive") == ""
    assert policy(tmp_path, archives + deletes).warning("/archive").startswith("a retention rule deletes conversations")
    assert policy(tmp_path, deletes * 2).warning("").startswith("2 retention rules delete conversations permanently")
