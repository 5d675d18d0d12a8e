"""`deckhands skills add` and `rm`: pinned skills from repositories and archives, some of them hostile."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import subprocess
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deckhands.cli.main import call
from deckhands.evaluation.datasets.file_trees import MAX_BYTES
from tests.trees import write_files

PDF = "---\nname: pdf\ndescription: Reads PDFs.\n---\nRun it."
FILES = {
    "README.md": "Ours.",
    "skills/pdf/SKILL.md": PDF,
    "skills/pdf/scripts/run.sh": "echo ran",
    "skills/csv/SKILL.md": PDF.replace("pdf", "csv"),
}
Said = Callable[[], str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def read() -> str:
        found = capsys.readouterr()
        return found.out + found.err

    return read


def git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    done = subprocess.run(["git", *identity, *arguments], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(place: Path, files: dict[str, str]) -> str:
    write_files(place, files)
    git(place, "init", "--quiet")
    git(place, "add", "-A")
    git(place, "commit", "--quiet", "-m", "skills")
    return git(place, "rev-parse", "HEAD")


def pack(path: Path, files: dict[str, str], *further: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
        for entry in further:
            archive.addfile(entry)
    return sha256(path.read_bytes()).hexdigest()


def test_skills_of_a_commit_are_installed_and_checked(tmp_path: Path, folder: Path, said: Said) -> None:
    pin = commit(tmp_path / "repo", FILES)
    commit(tmp_path / "repo", {"skills/pdf/SKILL.md": PDF + " Later."})
    (tmp_path / "repo" / "skills" / "pdf" / "scripts" / "run.sh").chmod(0o755)
    assert call(["skills", "add", str(tmp_path / "repo"), "--commit", pin, "--into", str(folder)]) == 0
    assert said().splitlines()[:2] == [".agents/skills/csv", ".agents/skills/pdf"]
    skill = folder / ".agents" / "skills" / "pdf"
    assert (skill / "SKILL.md").read_text() == PDF
    assert (skill / "scripts" / "run.sh").read_text() == "echo ran"
    assert not (folder / ".agents" / "skills" / "README.md").exists()
    assert call(["skills", "check", str(folder)]) == 0
    said()
    assert call(["skills", "ls", str(folder), "--json"]) == 0
    listed = {row["name"]: row for row in map(json.loads, said().splitlines())}
    assert (listed["pdf"]["pin"], listed["pdf"]["source"]) == (pin, str(tmp_path / "repo"))
    assert listed["pdf"]["shown"] == "when needed"
    (skill / "scripts" / "run.sh").write_text("echo changed")
    assert call(["skills", "check", str(folder)]) == 1
    assert "differs from its pin" in said()
    assert call(["skills", "add", str(tmp_path / "repo"), "--commit", pin, "--into", str(folder)]) == 0
    assert call(["skills", "check", str(folder)]) == 0


def test_commit_behind_a_branch_is_found(tmp_path: Path, folder: Path) -> None:
    pin = commit(tmp_path / "repo", FILES)
    commit(tmp_path / "repo", {"skills/pdf/SKILL.md": PDF + " Later."})
    source = (tmp_path / "repo").as_uri()
    assert call(["skills", "add", source, "--commit", pin, "--skill", "pdf", "--into", str(folder)]) == 0
    assert (folder / ".agents" / "skills" / "pdf" / "SKILL.md").read_text() == PDF
    assert not (folder / ".agents" / "skills" / "csv").exists()


def test_attributes_of_a_repository_change_no_file(tmp_path: Path, folder: Path) -> None:
    files = {
        "pdf/SKILL.md": PDF + "$Format:%B$ $Id$\n",
        "pdf/left-out.md": "There.\n",
        ".gitattributes": "*.md export-subst ident text eol=crlf working-tree-encoding=UTF-16\nleft-out.md export-ignore\n",
    }
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "--quiet")
    (tmp_path / "repo" / ".git" / "info").mkdir(exist_ok=True)
    (tmp_path / "repo" / ".git" / "info" / "attributes").write_text("* !working-tree-encoding\n")
    pin = commit(tmp_path / "repo", files)
    assert call(["skills", "add", str(tmp_path / "repo"), "--commit", pin, "--into", str(folder)]) == 0
    skill = folder / ".agents" / "skills" / "pdf"
    found = {f"pdf/{path.name}": path.read_bytes().decode() for path in skill.iterdir()}
    assert found == {name: text for name, text in files.items() if name.startswith("pdf/")}


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_skills_of_an_archive_are_installed_at_home(tmp_path: Path, folder: Path, said: Said, kind: str) -> None:
    path = tmp_path / "archive"
    files = {f"top/{name}": text for name, text in FILES.items()}
    if kind == "tar":
        pin = pack(path, files)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        pin = sha256(path.read_bytes()).hexdigest()
    assert call(["skills", "add", str(path), "--sha256", pin]) == 0
    assert call(["skills", "ls", str(folder)]) == 0
    assert "with pdf" in said()
    assert call(["skills", "rm", "pdf"]) == 0
    assert not (Path.home() / ".agents" / "skills" / "pdf").exists()
    assert (Path.home() / ".agents" / "skills" / "csv").exists()
    assert call(["skills", "check", str(folder)]) == 0


def test_archive_of_a_server_needs_the_pinned_digest(tmp_path: Path, folder: Path, said: Said) -> None:
    (tmp_path / "served").mkdir()
    pin = pack(tmp_path / "served" / "skills.tar.gz", FILES)
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert call(["skills", "add", f"{url}/skills.tar.gz", "--sha256", pin, "--into", str(folder)]) == 0
            assert call(["skills", "add", f"{url}/skills.tar.gz", "--sha256", "0" * 64, "--into", str(folder)]) == 2
            assert call(["skills", "add", f"{url}/missing", "--sha256", pin, "--into", str(folder)]) == 2
        finally:
            server.shutdown()
            thread.join()
    assert "404" in said()
    assert (folder / ".agents" / "skills" / "pdf" / "SKILL.md").read_text() == PDF


class CompressedTransfers(SimpleHTTPRequestHandler):
    """Calls the compression of each file one of its transfer, as some servers do for `.tar.gz`."""

    def end_headers(self) -> None:
        self.send_header("Content-Encoding", "gzip")
        super().end_headers()


def test_archive_is_kept_as_packed_by_its_server(tmp_path: Path, folder: Path) -> None:
    pin = pack(tmp_path / "skills.tar.gz", FILES)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(CompressedTransfers, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/skills.tar.gz"
        try:
            assert call(["skills", "add", url, "--sha256", pin, "--into", str(folder)]) == 0
        finally:
            server.shutdown()
            thread.join()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def test_links_and_devices_of_an_archive_are_left_out(tmp_path: Path, folder: Path) -> None:
    further = [
        link("skills/pdf/secret", "/etc/passwd"),
        link("skills/pdf/hard", "skills/pdf/SKILL.md", tarfile.LNKTYPE),
        link("skills/pdf/device", "", tarfile.CHRTYPE),
        link("skills/pdf/references", "/tmp"),
    ]
    pin = pack(tmp_path / "archive", {**FILES, "skills/pdf/references/a.md": "inside"}, *further)
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 0
    found = {path.name for path in (folder / ".agents" / "skills" / "pdf").iterdir()}
    assert found == {"SKILL.md", "scripts", "references"}
    assert not (folder / ".agents" / "skills" / "pdf" / "references").is_symlink()


@pytest.mark.parametrize("name", ["../outside.md", "skills/pdf/../../../outside.md", "/tmp/outside.md"])
def test_archive_with_a_path_outside_is_refused(tmp_path: Path, folder: Path, said: Said, name: str) -> None:
    pin = pack(tmp_path / "archive", {**FILES, name: "x"})
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "outside" in said()
    assert not (folder / ".agents").exists()


def test_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, folder: Path, said: Said) -> None:
    (tmp_path / "archive").write_bytes(gzip.compress(bytes(2 * MAX_BYTES + 1)))
    pin = sha256((tmp_path / "archive").read_bytes()).hexdigest()
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "unpacks to more than" in said()


def test_tar_file_packed_otherwise_is_refused(tmp_path: Path, folder: Path, said: Said) -> None:
    pack(tmp_path / "archive", FILES)
    packed = lzma.compress(gzip.decompress((tmp_path / "archive").read_bytes()), lzma.FORMAT_ALONE)
    (tmp_path / "archive").write_bytes(packed)
    pin = sha256(packed).hexdigest()
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "is no .tar.gz, .tar or .zip" in said()


def forge_size(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes().replace(size.to_bytes(4, "little"), (100).to_bytes(4, "little")))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_with_forged_sizes_takes_little_memory(tmp_path: Path, folder: Path, said: Said, method: int) -> None:
    size = 2 * MAX_BYTES + 77
    path = tmp_path / "archive"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("pdf/SKILL.md", bytes(size))
    forge_size(path, size)
    pin = sha256(path.read_bytes()).hexdigest()
    tracemalloc.start()
    try:
        assert call(["skills", "add", str(path), "--sha256", pin, "--into", str(folder)]) == 2
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert f"The archive {path} cannot be read" in said()


def test_encrypted_zip_file_is_named(tmp_path: Path, folder: Path, said: Said) -> None:
    path = tmp_path / "archive"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pdf/SKILL.md", PDF)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    pin = sha256(content).hexdigest()
    assert call(["skills", "add", str(path), "--sha256", pin, "--into", str(folder)]) == 2
    assert "is encrypted" in said()


def test_damaged_zip_file_is_named(tmp_path: Path, folder: Path, said: Said) -> None:
    path = tmp_path / "archive"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pdf/SKILL.md", PDF * 20)
    content = path.read_bytes().replace(b"SKILL.md", b"SKILL.md\xff", 1)
    path.write_bytes(content)
    pin = sha256(content).hexdigest()
    assert call(["skills", "add", str(path), "--sha256", pin, "--into", str(folder)]) == 2
    assert f"The archive {path} cannot be read" in said()


@pytest.mark.parametrize("names", [["pdf/a", "pdf/a/b"], ["pdf/" + "a" * 300]])
def test_files_that_cannot_be_written_are_named(tmp_path: Path, folder: Path, said: Said, names: list[str]) -> None:
    pin = pack(tmp_path / "archive", {"pdf/SKILL.md": PDF, "z": "", **dict.fromkeys(names, "x")})
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "pdf cannot be written" in said()
    assert list((folder / ".agents" / "skills").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.md": "x"}, "no folder with a SKILL.md"),
        ({"Big_One/SKILL.md": PDF}, "no name of an AgentSkill"),
        ({"other/SKILL.md": PDF}, "both must be the same"),
        ({"a/pdf/SKILL.md": PDF, "b/pdf/SKILL.md": PDF}, "two of its folders"),
        ({"pdf/SKILL.md": "---\na: !!x y\n---\nBad."}, "has a tag"),
        ({"pdf/SKILL.md": PDF} | {f"pdf/{number}": "" for number in range(600)}, "601 files"),
    ],
)
def test_unusable_skills_are_named(tmp_path: Path, folder: Path, said: Said, files: dict[str, str], words: str) -> None:
    pin = pack(tmp_path / "archive", {"z": "x", **files})
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert words in said()


def test_other_content_than_the_pinned_is_refused(tmp_path: Path, folder: Path, said: Said) -> None:
    pack(tmp_path / "archive", FILES)
    commit(tmp_path / "repo", FILES)
    for options in (["archive", "--sha256", "0" * 64], ["repo", "--commit", "0" * 40]):
        assert call(["skills", "add", str(tmp_path / options[0]), *options[1:], "--into", str(folder)]) == 2
        assert "0" * 40 in said()
    assert not (folder / ".agents").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "one pin"),
        (["x", "--commit", "main"], "no full commit hash"),
        (["x", "--sha256", "abc"], "no SHA-256 digest"),
        (["https://a:b@host.example/x", "--sha256", "0" * 64], "password"),
        (["https://token@host.example/x", "--sha256", "0" * 64], "a password or a token"),
        (["http://[::1/x", "--sha256", "0" * 64], "no address"),
        (["missing.tar.gz", "--sha256", "0" * 64], "cannot be read"),
        (["ext::sh -c touch% /tmp/x", "--commit", "0" * 40], "cannot fetch"),
    ],
)
def test_bad_input_is_named(folder: Path, said: Said, arguments: list[str], words: str) -> None:
    assert call(["skills", "add", *arguments, "--into", str(folder)]) == 2
    assert words in said()


def test_skill_of_another_origin_is_not_replaced(tmp_path: Path, folder: Path, said: Said) -> None:
    pin = pack(tmp_path / "archive", FILES)
    write_files(folder, {".agents/skills/pdf/SKILL.md": "mine"})
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "was not installed by this command" in said()
    assert (folder / ".agents" / "skills" / "pdf" / "SKILL.md").read_text() == "mine"
    assert call(["skills", "rm", "pdf", "--into", str(folder)]) == 2


@pytest.mark.parametrize("place", [".agents", ".agents/skills"])
def test_link_of_a_workspace_leads_nowhere(tmp_path: Path, folder: Path, said: Said, place: str) -> None:
    pin = pack(tmp_path / "archive", FILES)
    (folder / place).parent.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    (folder / place).symlink_to(tmp_path / "elsewhere")
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, "--into", str(folder)]) == 2
    assert "is a link" in said()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_forged_pins_remove_nothing_outside(tmp_path: Path, folder: Path, said: Said) -> None:
    forged = {"../../../kept": {"source": "\x1b[2J", "pin": "\x1b[2J", "digest": ""}}
    write_files(folder, {".agents/skills/pins.json": json.dumps(forged)})
    (tmp_path / "kept").mkdir()
    assert call(["skills", "rm", "../../../kept", "--into", str(folder)]) == 2
    assert (tmp_path / "kept").is_dir()
    assert call(["skills", "check", str(folder)]) == 1
    assert "\x1b" not in said()


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "<<<<<<< ours\n{}", "\ud800".encode(errors="surrogatepass")])
def test_unreadable_pins_are_named_and_kept(tmp_path: Path, folder: Path, said: Said, text: str | bytes) -> None:
    path = folder / ".agents" / "skills" / "pins.json"
    path.parent.mkdir(parents=True)
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    pin = pack(tmp_path / "archive", FILES)
    into = ["--into", str(folder)]
    assert call(["skills", "check", str(folder)]) == 1
    assert call(["skills", "add", str(tmp_path / "archive"), "--sha256", pin, *into]) == 2
    assert call(["skills", "rm", "pdf", *into]) == 2
    assert call(["skills", "ls", str(folder)]) == 0
    assert said().count("cannot be read as pins") == 4
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == ["pins.json"]


def test_chosen_skill_of_a_large_source_is_installed(tmp_path: Path, folder: Path, said: Said) -> None:
    further = {f"big/{number}": "" for number in range(600)} | {"big/SKILL.md": PDF, "Bad/SKILL.md": "Bad."}
    pin = commit(tmp_path / "repo", FILES | further)
    arguments = ["skills", "add", str(tmp_path / "repo"), "--commit", pin, "--into", str(folder)]
    assert call(arguments) == 2
    assert "--skill" in said()
    assert call([*arguments, "--skill", "missing"]) == 2
    assert "It has Bad, big, csv, pdf." in said()
    assert call([*arguments, "--skill", "pdf"]) == 0
    digest = pack(tmp_path / "archive", FILES | further)
    archive = ["skills", "add", str(tmp_path / "archive"), "--sha256", digest, "--into", str(folder)]
    assert call([*archive, "--skill", "csv"]) == 0
    assert {path.name for path in (folder / ".agents" / "skills").iterdir()} == {"pdf", "csv", "pins.json"}
