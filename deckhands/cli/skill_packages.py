"""Skills from a Git repository or an archive, pinned by a commit or a digest, and installed below a folder.

    .agents/skills/NAME/…          the files of a skill
    .agents/skills/pins.json       the source, the pin and the digest of each installed skill

Holds: only the pinned content is installed, only regular files of folders with a `SKILL.md`, and each skill atomically.
No hook, attribute, submodule or link of a source takes effect. A folder that was not installed here is never replaced.
Untrusted: a source, and everything below a workspace, including its pins. Forged pins can only falsify the check.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from broker.contract import check_skill_folder, find_skill_folders, find_skill_name
from broker.runtime import UsageError
from deckhands.evaluation import MAX_BYTES, ArchiveFiles, CommitFiles, TreeFile, read_tree, run_git

SKILLS = ".agents/skills"
PINS = "pins.json"
MAX_PINS_BYTES = 2**20
MAX_SKILL_FILES = 500
MAX_SKILL_BYTES = 16 * 2**20
DOWNLOAD_SECONDS = 120.0
NO_ATTRIBUTES = "* -export-ignore -export-subst -text !eol -ident -filter !working-tree-encoding\n"
"""Attributes of a repository would change files, and could write a long commit message into one many times."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")

Skills = Mapping[str, Mapping[str, TreeFile]]
"""The files of skills, by the names of the skills and the paths below their folders."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The origin of an installed skill.

    Attributes:
        pin: a commit, or `sha256:` and the digest of an archive.
        digest: the digest of its files as installed.
    """

    source: str
    pin: str
    digest: str


_PINS: TypeAdapter[dict[str, Pin]] = TypeAdapter(dict[str, Pin])


def fetch_skills(source: str, *, commit: str | None, digest: str | None, only: Collection[str] = ()) -> Skills:
    """Return the skills of a repository at a commit, or of an archive with a digest.

    Args:
        source: an address, or a path of this machine.
        only: names of the skills to return; none for all. The others are not checked.

    Raises:
        UsageError: the source cannot be fetched, has another digest, or has no usable skill; the text names it.
    """
    if (commit is None) == (digest is None):
        raise UsageError(
            "A skill needs one pin.", remedy="Give --commit with a repository, or --sha256 with an archive."
        )
    _check_source(source)
    with tempfile.TemporaryDirectory(prefix="deckhands-skills-") as folder:
        if commit is not None:
            files = _fetch_commit(Path(folder), source, commit.lower(), only)
        else:
            files = _fetch_archive(Path(folder), source, (digest or "").lower().removeprefix("sha256:"))
    return _find_skills(source, files, only)


def install_skills(top: Path, skills: Skills, *, source: str, pin: str) -> list[str]:
    """Write skills below a folder, with their pins, and return their paths.

    Raises:
        UsageError: a folder of this name exists that this command did not install, a link leads elsewhere, or the
            system refuses a file.
    """
    home = _open_skill_folder(top)
    pins = read_pins(top)
    for name in skills:
        if os.path.lexists(home / name) and name not in pins:
            raise UsageError(
                f"{home / name} exists, and was not installed by this command.", remedy="Move it away first."
            )
    for name, files in skills.items():
        try:
            _replace_folder(home / name, files)
        except OSError as error:
            raise UsageError(f"{home / name} cannot be written: {error.strerror}.") from error
        pins[name] = Pin(source, pin, _compute_digest(files))
        _write_pins(home, pins)
    return [f"{SKILLS}/{name}" for name in skills]


def remove_skill(top: Path, name: str) -> None:
    """Remove an installed skill and its pin.

    Raises:
        UsageError: none of this name was installed.
    """
    home, pins = _open_skill_folder(top), read_pins(top)
    if pins.pop(name, None) is None or not _NAME.fullmatch(name):
        raise UsageError(f"No skill {ascii(name)[:100]} was installed below {top}.", remedy="`deckhands skills ls`")
    if (home / name).is_symlink():
        (home / name).unlink()
    else:
        shutil.rmtree(home / name, ignore_errors=True)
    _write_pins(home, pins)


def read_pins(top: Path) -> dict[str, Pin]:
    """Return the pins of the skills that were installed below a folder.

    Raises:
        UsageError: they cannot be read.
    """
    path = top / SKILLS / PINS
    if not os.path.lexists(path):
        return {}
    with suppress(OSError, ValidationError):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_PINS_BYTES:
            return _PINS.validate_json(path.read_bytes())
    raise UsageError(f"{path} cannot be read as pins of skills.", remedy="Restore it, or remove it with its skills.")


def check_pins(top: Path) -> list[str]:
    """Return the problems of the installed skills of a folder, as sentences."""
    found = []
    try:
        pins = read_pins(top)
    except UsageError as error:
        return [str(error.message)]
    for name, pin in sorted(pins.items()):
        folder = top / SKILLS / name
        if not _NAME.fullmatch(name) or folder.is_symlink() or not folder.is_dir():
            found.append(f"{SKILLS}/{ascii(name)[1:101]}: it is pinned but missing")
            continue
        try:
            digest = _compute_digest(read_tree(folder))
        except UsageError as error:
            found.append(f"{SKILLS}/{name}: {error.message}")
            continue
        if digest != pin.digest:
            found.append(f"{SKILLS}/{name}: it differs from its pin {ascii(pin.pin)[1:72]}; install it again")
    return found


def _check_source(source: str) -> None:
    try:
        parts = urlsplit(source if "://" in source else "")
    except ValueError:
        parts = None
    if source.startswith("-") or not source.isprintable() or parts is None:
        raise UsageError(f"{ascii(source)[:200]} is no address of a skill.", remedy="Give a path, or an https address.")
    has_token = parts.scheme in ("http", "https") and parts.username is not None
    if has_token or parts.password is not None:
        raise UsageError(
            "The address of a skill has a password or a token, which would be kept.",
            remedy="Clone or download it first, and give the path.",
        )


def _fetch_commit(folder: Path, source: str, commit: str, only: Collection[str]) -> dict[str, TreeFile]:
    if not _COMMIT.fullmatch(commit):
        raise UsageError(f"{ascii(commit)[:100]} is no full commit hash.", remedy="`git rev-parse NAME` prints it.")
    place = source if "://" in source or not Path(source).exists() else str(Path(source).resolve())
    kind = "sha256" if len(commit) == len(sha256().hexdigest()) else "sha1"
    run_git(folder, "init", "--quiet", "--bare", f"--object-format={kind}", "mirror")
    mirror = folder / "mirror"
    (mirror / "info").mkdir(exist_ok=True)
    (mirror / "info" / "attributes").write_text(NO_ATTRIBUTES)
    fetch = ("fetch", "--quiet", "--no-tags", "--no-recurse-submodules")
    is_there = run_git(mirror, *fetch, "--depth=1", "--", place, commit) is not None
    if not is_there and run_git(mirror, *fetch, "--", place, "+refs/*:refs/all/*") is None:
        raise UsageError(f"Git cannot fetch {source}.", remedy="For a private repository: clone it, and give the path.")
    listed = run_git(mirror, "ls-tree", "-r", "-l", "-z", f"{commit}^{{commit}}")
    if listed is None:
        raise UsageError(f"{source} has no commit {commit}.")
    sizes: dict[str, int] = {}
    for line in listed.decode(errors="replace").split("\0"):
        about, _, path = line.partition("\t")
        if about.startswith("100"):
            sizes[path] = int(about.split()[-1])
    folders = _choose_folders(source, sizes, only)
    chosen = [path for path in sizes if _folder_of(path, folders) is not None]
    _check_size(source, len(chosen), sum(sizes[path] for path in chosen))
    return CommitFiles(mirror, commit, tuple(f":(literal){path}" for path in chosen)).read() if chosen else {}


def _fetch_archive(folder: Path, source: str, digest: str) -> dict[str, TreeFile]:
    if not _SHA256.fullmatch(digest):
        raise UsageError(f"{ascii(digest)[:100]} is no SHA-256 digest.", remedy="`sha256sum FILE` prints it.")
    content = _download(source) if "://" in source else _read_archive(Path(source))
    found = sha256(content).hexdigest()
    if found != digest:
        raise UsageError(f"{source} has the digest {found}, not {digest}.", remedy="Check who has changed it.")
    path = folder / ("files.zip" if content.startswith(b"PK") else "files.tar")
    path.write_bytes(_unpack(source, content))
    try:
        return ArchiveFiles(path).read()
    except UsageError as error:
        raise UsageError(error.message.replace(str(path), source)) from error


def _read_archive(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes.")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _download(url: str) -> bytes:
    import httpx2

    content = bytearray()
    try:
        plain = {"Accept-Encoding": "identity"}
        with httpx2.stream("GET", url, headers=plain, follow_redirects=True, timeout=DOWNLOAD_SECONDS) as answer:
            answer.raise_for_status()
            for part in answer.iter_raw():  # some servers call the compression of an archive one of the transfer
                content += part
                if len(content) > MAX_BYTES:
                    raise UsageError(f"{url} has more than {MAX_BYTES:,} bytes.")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UsageError(f"{url} cannot be fetched: {error}.") from error
    return bytes(content)


def _unpack(source: str, content: bytes) -> bytes:
    """Return a tar file without its compression, or a ZIP file as it is. The unpacked size is limited."""
    if content.startswith(b"\x1f\x8b"):
        packed = zlib.decompressobj(wbits=31)
        try:
            content = packed.decompress(content, 2 * MAX_BYTES)
        except zlib.error as error:
            raise UsageError(f"{source} cannot be unpacked: {error}.") from error
        if packed.unconsumed_tail:
            raise UsageError(f"{source} unpacks to more than {2 * MAX_BYTES:,} bytes.")
    if not content.startswith(b"PK"):
        try:
            tarfile.open(fileobj=BytesIO(content), mode="r:").close()
        except tarfile.TarError as error:  # else it would be unpacked without a limit, if it is packed otherwise
            raise UsageError(f"{source} is no .tar.gz, .tar or .zip archive.") from error
    return content


def _find_skills(source: str, files: Mapping[str, TreeFile], only: Collection[str]) -> Skills:
    folders = _choose_folders(source, files, only)
    skills: dict[str, dict[str, TreeFile]] = {}
    for folder in folders:
        own = {path.removeprefix(folder): file for path, file in files.items() if _folder_of(path, folders) == folder}
        _check_size(source, len(own), sum(len(file.content) for file in own.values()))
        text = own["SKILL.md"].content.decode(errors="replace")
        name = find_skill_name(folder, text)
        problems = check_skill_folder(name, text)
        if name in skills:
            problems.append("two of its folders have this name")
        if problems:
            raise UsageError(f"The skill {ascii(folder)[1:101] or 'at the top'} of {source}: {'; '.join(problems)}.")
        skills[name] = own
    _require_names(source, skills, only)
    return skills


def _choose_folders(source: str, paths: Iterable[str], only: Collection[str]) -> tuple[str, ...]:
    folders = find_skill_folders(paths)
    if not folders:
        raise UsageError(f"{source} has no folder with a SKILL.md.")
    if not only or folders == ("",):
        return folders
    _require_names(source, [PurePosixPath(folder).name for folder in folders], only)
    return tuple(folder for folder in folders if PurePosixPath(folder).name in only)


def _require_names(source: str, names: Iterable[str], only: Iterable[str]) -> None:
    there = sorted(set(names))
    if missing := [name for name in only if name not in there]:
        raise UsageError(
            f"{source} has no skill {', '.join(missing)}.", remedy=ascii(f"It has {', '.join(there)}.")[1:1001]
        )


def _folder_of(path: str, folders: Iterable[str]) -> str | None:
    return next((folder for folder in folders if path.startswith(folder)), None)


def _check_size(source: str, files: int, size: int) -> None:
    if files > MAX_SKILL_FILES or size > MAX_SKILL_BYTES:
        raise UsageError(
            f"The skills of {source} have {files:,} files and {size:,} bytes; "
            f"{MAX_SKILL_FILES:,} and {MAX_SKILL_BYTES:,} are allowed.",
            remedy="Choose some of them with --skill.",
        )


def _compute_digest(files: Mapping[str, TreeFile]) -> str:
    found = sha256()
    for path, file in sorted(files.items()):
        about = f"{path}\0{int(file.is_executable)}\0{len(file.content)}\0"
        found.update(about.encode(errors="replace") + file.content)
    return found.hexdigest()


def _open_skill_folder(top: Path) -> Path:
    """Return the folder of installed skills, created if missing."""
    home = top / SKILLS
    for folder in (home.parent, home):
        if folder.is_symlink():
            raise UsageError(f"{folder} is a link, and skills are never written through a link.")
        folder.mkdir(exist_ok=True)
    return home


def _replace_folder(target: Path, files: Mapping[str, TreeFile]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".new-skill-") as place:
        new, old = Path(place, "new"), Path(place, "old")
        for name, file in files.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(0o755 if file.is_executable else 0o644)
        if os.path.lexists(target):
            target.rename(old)
        new.rename(target)
        if old.is_symlink():
            old.unlink()


def _write_pins(home: Path, pins: Mapping[str, Pin]) -> None:
    text = json.dumps({name: asdict(pin) for name, pin in sorted(pins.items())}, indent=2)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".new-skill-") as place:
        path = Path(place, PINS)
        path.write_text(f"{text}\n", encoding="utf-8")
        path.rename(home / PINS)
