"""Copies out of and into a workspace: any names, and concurrent changes by programs."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
import zstandard

from broker.coordination.transfers import TransferAnswer, TransferRequest
from tool_worker.worker import packing
from tool_worker.workspace.files.openat2_paths import Directory

ODD_NAMES = (b"new\nline", b"\xff\xfe", b"n" * 255, "é".encode() * 127, b"-rf", b" ", b"\x1b[31mred", b"back\\slash")


def packed(folder: Path, path: str) -> tuple[TransferAnswer, bytes]:
    target = io.BytesIO()
    with Directory(folder) as root:
        return packing.pack(root, path, target), target.getvalue()


def unpacked(folder: Path, request: TransferRequest, content: bytes, noted: Path) -> None:
    with Directory(folder) as root:
        packing.unpack(root, request, io.BytesIO(content), noted)


def test_odd_names_and_files_arrive_and_special_ones_stay(tmp_path: Path) -> None:
    workspace, target = tmp_path / "workspace", tmp_path / "target"
    for path in (workspace, target):
        path.mkdir()
    for name in ODD_NAMES:
        Path(os.fsdecode(os.fsencode(workspace) + b"/" + name)).write_bytes(name)
    (workspace / "one").write_text("linked")
    (workspace / "two").hardlink_to(workspace / "one")
    (workspace / "loop").symlink_to("loop")
    (workspace / "long").symlink_to("x" * 4000)
    with (workspace / "sparse").open("wb") as sparse:
        sparse.truncate(10_000_000)
    os.utime(workspace / "one", (-5, -5))
    os.mkfifo(workspace / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{workspace}/socket")
    _, content = packed(workspace, ".")
    unpacked(target, TransferRequest(what="upload", path="in"), content, tmp_path / "noted")
    arrived = {os.fsencode(path.name): path for path in (target / "in").iterdir()}
    assert set(arrived) == {*ODD_NAMES, b"one", b"two", b"loop", b"long", b"sparse"}
    assert all(arrived[name].read_bytes() == name for name in ODD_NAMES)
    assert arrived[b"two"].read_text() == "linked"
    assert arrived[b"long"].readlink() == Path("x" * 4000)
    assert arrived[b"sparse"].stat().st_size == 10_000_000


@pytest.mark.parametrize("is_there", [True, False])
def test_killed_workers_unpacking_is_repeated_at_its_target(tmp_path: Path, is_there: bool) -> None:
    source, target, noted = tmp_path / "source", tmp_path / "target", tmp_path / "noted"
    source.mkdir()
    (source / "file").write_text("whole")
    (target / "in").mkdir(parents=True) if is_there else target.mkdir()
    _, content = packed(tmp_path, "source")
    request = TransferRequest(what="upload", path="in")
    unpacked(target, request, content, noted)
    begun = target / "in" / "source" if is_there else target / "in"
    (begun / "file").write_text("ha")  # and then it dies
    unpacked(target, request, content, noted)
    assert [path.relative_to(target) for path in target.rglob("file")] == [(begun / "file").relative_to(target)]
    assert (begun / "file").read_text() == "whole"


def test_shrunken_file_blocks_no_other() -> None:
    # The kernel's settings claim a page each, and hold some bytes.
    done, content = packed(Path("/sys/devices/system/cpu"), "online")
    with tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().decompressobj().decompress(content))) as archive:
        (member,) = archive.getmembers()
        carried = archive.extractfile(member)
        assert carried is not None
        text = Path("/sys/devices/system/cpu/online").read_bytes()
        assert carried.read() == text.ljust(done.size_bytes, b"\0")
    assert done.size_bytes > len(text)
