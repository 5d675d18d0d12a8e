"""The file editor on disk: preserved attributes of a file, and file systems that refuse."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.editor_parts import run
from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.text_files.versioned_files import VersionedFiles

ROOT = Path(__file__).resolve().parents[5]
NOBODY = 65534
BINARY = "File appears to be binary and this file type cannot be read or edited by this tool."


@pytest.fixture
def plain_user() -> Iterator[Path]:
    """A directory of the user that the test then runs as: permissions do not hold root back."""
    with tempfile.TemporaryDirectory() as directory:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(directory, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            if is_root:
                os.seteuid(0)


def replace(editor: FileEditor, path: Path, old_str: str, new_str: str) -> str:
    return run(editor, "str_replace", path, old_str=old_str, new_str=new_str)["content"]


class TestEncoding:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b"gr\xc3\xbcn\n", b"bl\xc3\xa4u\n"),
            (b"\xef\xbb\xbfgr\xc3\xbcn\n", b"\xef\xbb\xbfbl\xc3\xa4u\n"),
            (b"\xff\xfeg\0r\0\xfc\0n\0\n\0", b"\xff\xfeb\0l\0\xe4\0u\0\n\0"),
            (b"\xfe\xff\0g\0r\0\xfc\0n\0\n", b"\xfe\xff\0b\0l\0\xe4\0u\0\n"),
            (b"\x80 gr\xfcn\n", b"\x80 bl\xe4u\n"),  # Windows-1252: the euro sign
            (b"\x81 gr\xfcn\n", b"\x81 bl\xe4u\n"),  # undefined there, so Latin-1
            (b"\xff\xfeg\0r\0\xfc\0n\0\r\0\n\0", b"\xff\xfeb\0l\0\xe4\0u\0\r\0\n\0"),
        ],
    )
    def test_is_kept(self, editor: FileEditor, path: Path, before: bytes, after: bytes) -> None:
        path.write_bytes(before)
        assert "has been edited" in replace(editor, path, "grün", "bläu")
        assert path.read_bytes() == after
        assert run(editor, "undo_edit", path)["is_error"] is False
        assert path.read_bytes() == before

    def test_without_a_code_for_a_character_refuses_the_edit(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes(b"gr\xfcn\n")
        assert replace(editor, path, "grün", "naïve → я") == (
            f"ERROR:\nNo edit was performed. {path} is encoded as cp1252, which has no code for `→`. Write it with "
            "other characters, or convert the file to UTF-8 first, e.g. with `iconv`."
        )
        assert path.read_bytes() == b"gr\xfcn\n"

    def test_that_would_not_be_recognised_again_refuses_the_edit(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes(b"gr\xfcn\n")
        for new_str in ["grü\x01n", "Ã¼", "ï»¿grün"]:  # binary, UTF-8, and UTF-8 with a byte order mark
            assert "could not be told from another encoding" in replace(editor, path, "grün", new_str)
            assert path.read_bytes() == b"gr\xfcn\n"

    @pytest.mark.parametrize(
        "content",
        [
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            b"GIF89a\x01\0\x01\0\x80\x01\0",
            b"\xff\xd8\xff\xe0\0\x10JFIF\0",
            b"RIFF\x24\0\0\0WEBPVP8 ",
            b"BM\x3a\0\0\0\0\0",
            b"text\0text",
            b"a\0b\0",  # UTF-16 without a byte order mark
            b"\xff\xfe\0\0a\0\0\0",  # UTF-32
            b"\xff\xfea",  # half a character
            b"\xef\xbb\xbf\xff",
            b"\x1f\x8b\x08\x01\x02\xff\xfe",
        ],
    )
    def test_is_not_guessed_for_binary_files(self, editor: FileEditor, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        refusal = f"ERROR:\nFile validation failed for {path}: {BINARY}"
        assert run(editor, "view", path)["content"] == refusal
        assert replace(editor, path, "a", "b") == refusal
        assert run(editor, "insert", path, insert_line=0, new_str="a")["content"] == refusal
        assert path.read_bytes() == content

    def test_of_terminal_output_is_text(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes(b"\x1b[1mok\x1b[0m\x07 \x01")
        assert run(editor, "view", path)["content"].endswith("\n     1\t\x1b[1mok\x1b[0m\x07 \x01\n")


class TestLineBreaks:
    @pytest.mark.parametrize(
        ("before", "old_str", "new_str", "after"),
        [
            (b"a\r\nb\r\nc\r\n", "b\n", "x\ny\n", b"a\r\nx\r\ny\r\nc\r\n"),
            (b"a\r\nb\r\nc\r\n", "a\r\nb", "x\r\ny", b"x\r\ny\r\nc\r\n"),
            (b"a\nb\nc\n", "b\n", "x\r\ny\r\n", b"a\nx\ny\nc\n"),
            (b"a\rb\rc\r", "b\n", "x\ny\n", b"a\rx\ry\rc\r"),
            (b"a\r\nb", "b", "x", b"a\r\nx"),
            (b"a\r\nb", "a\nb", "x", b"x"),
            (b"a", "a", "x\ny", b"x\ny"),
            # Mixed: lines that the edit leaves alone keep their own break, the others get the most frequent one.
            (b"a\r\nb\r\nc\nd\n", "b\nc\n", "b\nx\n", b"a\r\nb\r\nx\nd\n"),
            (b"a\r\nb\r\nc\nd\r\n", "c", "c\nx", b"a\r\nb\r\nc\nx\r\nd\r\n"),
            (b"a\nb\r\nc\nd", "d", "x\n", b"a\nb\r\nc\nx\n"),
            # An `a\r` before an empty line that ends in `\n` would lose the empty line.
            (b"a\rb\nc\nd\n", "b\n", "\n", b"a\n\nc\nd\n"),
        ],
    )
    def test_are_kept(
        self, editor: FileEditor, path: Path, before: bytes, old_str: str, new_str: str, after: bytes
    ) -> None:
        path.write_bytes(before)
        result = run(editor, "str_replace", path, old_str=old_str, new_str=new_str)
        assert path.read_bytes() == after
        assert "\r" not in result["old_content"] + result["new_content"] + result["diff"]
        run(editor, "undo_edit", path)
        assert path.read_bytes() == before

    def test_are_kept_by_insertions(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes(b"a\r\nb")
        run(editor, "insert", path, insert_line=2, new_str="c")
        assert path.read_bytes() == b"a\r\nb\r\nc"

    def test_are_counted_alike(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes("a\r\nb\rc\nd\x0b\x85\u2028e".encode())
        assert run(editor, "view", path)["content"].endswith(
            ":\n     1\ta\n     2\tb\n     3\tc\n     4\td\x0b\x85\u2028e\n"
        )


class TestFile:
    @pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o1711])
    def test_keeps_its_mode(self, editor: FileEditor, path: Path, mode: int) -> None:
        path.write_text("one")
        path.chmod(mode)
        replace(editor, path, "one", "two")
        run(editor, "undo_edit", path)
        assert (path.read_text(), path.stat().st_mode & 0o7777) == ("one", mode)

    def test_clears_the_set_user_id_bit_as_any_write_does(self, plain_user: Path) -> None:
        path = plain_user / "a.sh"
        path.write_text("one")
        path.chmod(0o6755)
        replace(FileEditor(str(plain_user)), path, "one", "two")
        assert path.stat().st_mode & 0o7777 == 0o755

    def test_is_created_as_the_umask_says(self, editor: FileEditor, tmp_path: Path) -> None:
        old = os.umask(0o027)
        try:
            run(editor, "create", tmp_path / "a.txt", file_text="one")
        finally:
            os.umask(old)
        assert (tmp_path / "a.txt").stat().st_mode & 0o7777 == 0o640

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_keeps_its_owner(self, editor: FileEditor, path: Path) -> None:
        path.write_text("one")
        os.chown(path, NOBODY, NOBODY)
        replace(editor, path, "one", "two")
        assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)

    def test_stays_behind_its_symbolic_links(self, editor: FileEditor, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there/a.txt").write_text("one")
        (tmp_path / "link").symlink_to("there/a.txt")
        (tmp_path / "to_link").symlink_to(tmp_path / "link")
        replace(editor, tmp_path / "to_link", "one", "two")
        assert (tmp_path / "there/a.txt").read_text() == "two"
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "to_link").is_symlink()

    def test_is_created_where_a_link_leads(self, editor: FileEditor, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("a.txt")
        assert run(editor, "create", tmp_path / "link", file_text="one")["prev_exist"] is False
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "a.txt").read_text() == "one"

    def test_leaves_its_hard_links(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one")
        (tmp_path / "b.txt").hardlink_to(path)
        replace(editor, path, "one", "two")
        assert (path.read_text(), (tmp_path / "b.txt").read_text()) == ("two", "one")

    def test_is_replaced_at_once(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one")
        with path.open() as reader:
            replace(editor, path, "one", "two")
            assert reader.read() == "one"
        assert list(tmp_path.iterdir()) == [path]

    def test_may_have_the_longest_name(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 255)
        assert run(editor, "create", path, file_text="one")["is_error"] is False
        assert path.read_text() == "one"

    def test_is_written_beside_what_killed_editors_left(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one")
        for attempt in range(99):
            (tmp_path / f".deckhands-edit-{os.getpid()}-{attempt}").write_text("left over")
        replace(editor, path, "one", "two")
        assert path.read_text() == "two"
        (tmp_path / f".deckhands-edit-{os.getpid()}-99").write_text("left over")
        assert replace(editor, path, "two", "three") == (
            f"ERROR:\nRan into 100 files named .deckhands-edit-* are left over in {tmp_path} while trying to write to "
            f"{path}. Look at it with bash."
        )
        assert path.read_text() == "two"


class TestKind:
    def test_fifo_device_and_socket_are_refused_at_once(self, editor: FileEditor, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "socket"))
            for path, kind in [
                (tmp_path / "fifo", "FIFO"),
                (tmp_path / "socket", "socket"),
                (Path("/dev/zero"), "character device"),
            ]:
                refusal = (
                    f"ERROR:\nFile validation failed for {path}: It is a {kind}, and only regular files can be read or "
                    "edited by this tool."
                )
                assert run(editor, "view", path)["content"] == refusal
                assert replace(editor, path, "a", "b") == refusal
                assert run(editor, "undo_edit", path)["content"] == refusal

    def test_file_that_claims_to_be_empty_is_read(self, editor: FileEditor) -> None:
        assert Path("/proc/self/status").stat().st_size == 0
        assert "     1\tName:\t" in run(editor, "view", "/proc/self/status")["content"]
        small = FileEditor("/", VersionedFiles(max_file_bytes=8))
        assert "File is too large" in run(small, "view", "/proc/self/status")["content"]


class TestSize:
    def test_over_ten_megabytes_is_refused(self, editor: FileEditor, path: Path) -> None:
        path.write_bytes(b"x" * 10 * 2**20)
        assert run(editor, "view", path)["is_error"] is False
        path.write_bytes(b"x" * (11 * 2**20))
        refusal = (
            f"ERROR:\nFile validation failed for {path}: File is too large (11.0MB). Maximum allowed size is 10MB. Use "
            "bash to work on parts of it, e.g. with `grep -n` and `sed -n`."
        )
        assert run(editor, "view", path)["content"] == refusal
        assert replace(editor, path, "x", "y") == refusal

    def test_over_the_limit_is_never_written(self, tmp_path: Path) -> None:
        editor = FileEditor(str(tmp_path), VersionedFiles(max_file_bytes=8))
        path = tmp_path / "a.txt"
        assert "File is too large" in run(editor, "create", path, file_text="123456789")["content"]
        assert not path.exists()
        run(editor, "create", path, file_text="12345678")
        assert "File is too large" in replace(editor, path, "1", "11")
        assert "File is too large" in run(editor, "insert", path, insert_line=0, new_str="")["content"]
        assert path.read_text() == "12345678"


class TestRefusal:
    def test_of_permissions(self, plain_user: Path) -> None:
        editor = FileEditor(str(plain_user))
        path = plain_user / "a.txt"
        path.write_text("one")
        remedy = "Check the permissions with `ls -la`."
        path.chmod(0o444)
        assert replace(editor, path, "one", "two") == (
            f"ERROR:\nRan into Permission denied while trying to write to {path}. {remedy}"
        )
        path.chmod(0o200)
        assert run(editor, "view", path)["content"] == (
            f"ERROR:\nRan into Permission denied while trying to read {path}. {remedy}"
        )
        path.chmod(0o644)
        assert "has been edited" in replace(editor, path, "one", "two")
        plain_user.chmod(0o500)
        denied = f"ERROR:\nRan into Permission denied while trying to write to {path}. {remedy}"
        assert replace(editor, path, "two", "three") == denied
        assert run(editor, "undo_edit", path)["content"] == denied
        assert run(editor, "create", plain_user / "b.txt", file_text="")["is_error"] is True
        plain_user.chmod(0o300)
        assert run(editor, "view", plain_user)["content"] == (
            f"ERROR:\nRan into Permission denied while trying to list {plain_user}. {remedy}"
        )
        # The undo that failed has not cost the version.
        plain_user.chmod(0o700)
        assert run(editor, "undo_edit", path)["is_error"] is False
        assert path.read_text() == "one"
        assert list(plain_user.iterdir()) == [path]

    def test_of_a_closed_directory_inside(self, plain_user: Path) -> None:
        (plain_user / "closed").mkdir(mode=0)
        content = run(FileEditor(str(plain_user)), "view", plain_user)["content"]
        assert content.endswith(f":\n{plain_user}/\n{plain_user}/closed/")

    def test_of_paths(self, editor: FileEditor, tmp_path: Path) -> None:
        (tmp_path / "circle").symlink_to("circle")
        (tmp_path / "file").write_text("")
        cases = [
            ("file/a.txt", "Not a directory", "A part of the path is a file"),
            ("x" * 256, "File name too long", "Use a shorter path."),
            ("circle", "Too many levels of symbolic links", "Its symbolic links lead in a circle"),
        ]
        for name, reason, remedy in cases:
            content = run(editor, "create", tmp_path / name, file_text="x")["content"]
            assert content.startswith(f"ERROR:\nRan into {reason} while trying to ")
            assert remedy in content

    def test_of_a_full_or_read_only_file_system(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "a.txt").write_text("one")
        path = f"{tmp_path}/disk/a.txt"
        results = run_in_small_disk(
            tmp_path / "disk",
            [
                {"command": "create", "path": path, "file_text": "one" * 10_000},
                {"command": "insert", "path": path, "insert_line": 0, "new_str": "x" * 60_000},
                {"command": "view", "path": f"{tmp_path}/disk"},
                {"command": "str_replace", "path": path, "old_str": "one" * 10_000, "new_str": "two"},
                {"command": "str_replace", "path": f"{tmp_path}/a.txt", "old_str": "one", "new_str": "two"},
            ],
        )
        assert [result["is_error"] for result in results] == [False, True, False, False, True]
        assert results[1]["content"] == (
            f"ERROR:\nRan into No space left on device while trying to write to {path}. Free some space first; `df -h` "
            "shows what is full."
        )
        assert results[2]["content"].endswith(f":\n{tmp_path}/disk/\n{path}")  # and nothing hidden
        assert results[4]["content"] == (
            f"ERROR:\nRan into Read-only file system while trying to write to {tmp_path}/a.txt. Choose a path on a "
            "file system that can be written."
        )


def run_in_small_disk(directory: Path, calls: list[dict[str, object]]) -> list[dict[str, Any]]:
    """Run commands where `directory` is a disk of 64 KiB and all else is read-only, with the standard library alone."""
    program = (
        "import json, sys\n"
        "calls, root = json.load(sys.stdin)\n"
        "sys.path.insert(0, root)\n"
        "from tool_worker.host.editor.file_editor import FileEditor\n"
        "editor = FileEditor('/')\n"
        "json.dump([editor.run(call) for call in calls], sys.stdout)\n"
    )
    mounts = ["--ro-bind", "/", "/", "--size", "65536", "--tmpfs", str(directory)]
    done = subprocess.run(
        ["bwrap", *mounts, sys.executable, "-I", "-S", "-c", program],
        input=json.dumps([calls, str(ROOT)]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
