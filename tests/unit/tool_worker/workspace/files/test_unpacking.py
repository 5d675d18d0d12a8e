"""Archives made by ordinary users and by attackers."""

from __future__ import annotations

import gzip
import io
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.errors import FileUnfit, WorkspaceTooLarge
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.unpacking import MAX_HEADER_BYTES, Unpacking, UnpackResult

ROOT = Path(__file__).resolve().parents[5]
LIMITS = TreeLimits(files=100, bytes=1_000_000)


def member(name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, target: str = ""):
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.linkname, header.size = kind, mode, target, len(content)
    return header, content


def tar(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        for header, content in members:
            archive.addfile(header, io.BytesIO(content))
    return target.getvalue()


def unpack(folder: Path, content: bytes, form: str = "tar", **options: object) -> UnpackResult:
    with Directory(folder) as directory:
        return Unpacking(directory, LIMITS, **options).unpack(content, form)


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = f"-> {path.readlink()}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return found


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_file_in_every_compression(tmp_path: Path, mode: str) -> None:
    content = tar(
        member("./src/", kind=tarfile.DIRTYPE, mode=0o555),
        member("src/main.py", b"pass\n", mode=0o4755),
        member("src/again", kind=tarfile.LNKTYPE, target="src/main.py"),
        member("link", kind=tarfile.SYMTYPE, target="/etc/passwd"),
        member("src/main.py", b"twice\n"),
        mode=mode,
    )
    done = unpack(tmp_path, content)
    assert tree(tmp_path) == {"link": "-> /etc/passwd", "src": "/", "src/again": "pass\n", "src/main.py": "twice\n"}
    assert (done.files, done.size_bytes) == (5, 11)
    assert stat.S_IMODE((tmp_path / "src/again").stat().st_mode) == 0o755


def test_a_zip_file(tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", "text")
        link = zipfile.ZipInfo("a/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "b.txt")
    unpack(tmp_path, target.getvalue(), "zip")
    assert tree(tmp_path) == {"a": "/", "a/b.txt": "text", "a/link": "-> b.txt"}


@pytest.mark.parametrize(("renamed", "names"), [("new", {"new", "new/x"}), ("", {"x"}), (None, {"old", "old/x"})])
def test_the_first_part_of_the_names_can_be_another(tmp_path: Path, renamed: str | None, names: set[str]) -> None:
    content = tar(member("old", kind=tarfile.DIRTYPE), member("old/x", b"1"))
    unpack(tmp_path, content, rename_first=renamed)
    assert set(tree(tmp_path)) == names


OUTSIDE = [
    [member("../out", b"x")],
    [member("/out", b"x")],
    [member("a/../../out", b"x")],
    [member("link", kind=tarfile.SYMTYPE, target=".."), member("link/out", b"x")],
    [member("link", kind=tarfile.SYMTYPE, target="/tmp"), member("link/deckhands-out", b"x")],
    [member("a", kind=tarfile.SYMTYPE, target="."), member("a/b", kind=tarfile.DIRTYPE)],
    [member("hard", kind=tarfile.LNKTYPE, target="../secret")],
    [member("link", kind=tarfile.SYMTYPE, target="../secret"), member("hard", kind=tarfile.LNKTYPE, target="link")],
    [member("fifo", kind=tarfile.FIFOTYPE)],
    [member("device", kind=tarfile.CHRTYPE)],
    [member("long/" + "x" * 300, b"x")],
]


@pytest.mark.parametrize("members", OUTSIDE)
def test_paths_that_lead_out_are_refused(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises((FileUnfit, OSError)):
        unpack(inside, tar(*members))
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "secret"}
    assert not Path("/tmp/deckhands-out").exists()
    assert "secret" not in "".join(tree(inside).values()).replace("-> ../secret", "")


def bomb() -> bytes:
    return tar(member("zeros", bytes(LIMITS.bytes + 1)))


def many() -> bytes:
    return tar(*(member(f"{n}", b"") for n in range(LIMITS.files + 1)))


def deep() -> bytes:
    return tar(member("/".join("d" * (LIMITS.files + 1)), b""))


@pytest.mark.parametrize("made", [bomb, many, deep])
def test_bombs_end_at_the_limits(tmp_path: Path, made: Callable[[], bytes]) -> None:
    with pytest.raises(WorkspaceTooLarge):
        unpack(tmp_path, made())
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= LIMITS.bytes


def test_a_zip_bomb_ends_at_the_limits(tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(LIMITS.bytes + 1))
    with pytest.raises(WorkspaceTooLarge):
        unpack(tmp_path, target.getvalue(), "zip")


def test_header_claiming_a_huge_size_is_not_loaded(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, MAX_HEADER_BYTES * 100
    content = gzip.compress(header.tobuf() + bytes(MAX_HEADER_BYTES * 2))
    with pytest.raises(FileUnfit, match="damaged"):
        unpack(tmp_path, content)


@given(
    st.binary(max_size=600), st.sampled_from(["tar", "zip"]), st.sampled_from([b"", b"\x1f\x8b", b"BZh9", b"PK\3\4"])
)
def test_any_bytes_are_an_archive_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, form: str, magic: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with suppress(FileUnfit, WorkspaceTooLarge, OSError):
        unpack(folder, magic + content, form)


UNPACK_THE_FILE = """
import sys
from pathlib import Path
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.files.unpacking import Unpacking
content = Path(sys.argv[1]).read_bytes()
with Directory(Path(sys.argv[2])) as directory:
    print("begins", flush=True)
    Unpacking(directory, TreeLimits(files=9, bytes=2**30)).unpack(content, "tar")
"""


def test_nothing_is_left_of_a_file_whose_unpacking_is_killed(tmp_path: Path) -> None:
    (archive := tmp_path / "a.tar.gz").write_bytes(tar(member("large", bytes(300_000_000))))
    (folder := tmp_path / "folder").mkdir()
    (folder / "large").write_text("as before")
    command = [sys.executable, "-c", UNPACK_THE_FILE, archive, folder]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout.readline() == b"begins\n"
        with pytest.raises(subprocess.TimeoutExpired):
            unpacking.wait(0.1)
        unpacking.kill()
    assert tree(folder) == {"large": "as before"}


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 2**20, 3 * 2**20 + 1])
def test_a_stream_that_only_goes_onward_is_unpacked(tmp_path: Path, size: int) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a", "é" * 120):
            header = tarfile.TarInfo(name)
            header.size = size
            archive.addfile(header, io.BytesIO(b"x" * size))
    packed = io.BytesIO(zstandard.ZstdCompressor().compress(plain.getvalue()))
    with Directory(tmp_path) as directory, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        done = Unpacking(directory, TreeLimits()).unpack_stream(stream)
    assert (done.files, done.size_bytes) == (2, 2 * size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(("a", "é" * 120), b"x" * size)


def test_decompression_bomb_is_not_read_to_its_end(tmp_path: Path) -> None:
    header = tarfile.TarInfo("zeros")
    header.size = 2**40
    compressor = zstandard.ZstdCompressor().compressobj()
    packed = compressor.compress(header.tobuf()) + b"".join(compressor.compress(bytes(2**20)) for _ in range(20))
    with Directory(tmp_path) as directory, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        unpacking = Unpacking(directory, TreeLimits(bytes=10 * 2**20))
        with pytest.raises(WorkspaceTooLarge):
            unpacking.unpack_stream(stream)
    assert list(tmp_path.iterdir()) == []
