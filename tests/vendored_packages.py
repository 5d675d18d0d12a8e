"""The libraries that the web page brings along: `make vendored`, or `python -m tests.vendored_packages`, fetches them.

`vendored.json` names each package with its exact version, its licence, and its files with their SHA-256. To take
another version, change it there and run the command: the files and their hashes are written again. `changes` of a file
are what the page's policy requires: `<style>` elements and `style` attributes are forbidden.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.source_code import ROOT

WEB = ROOT / "deckhands" / "server" / "web"
MANIFEST = WEB / "vendored.json"
FOLDER = WEB / "page" / "vendored"
BARE_IMPORT = re.compile(rb"""from ?(["'])preact\1""")
SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")


def load_manifest() -> dict[str, dict[str, Any]]:
    manifest: dict[str, dict[str, Any]] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return manifest


def to_vendored(content: bytes) -> bytes:
    """Return a file of a package as the page uses it.

    A browser resolves no name of a package, has no `process`, and needs no source map.
    """
    content = BARE_IMPORT.sub(b'from"./preact.js"', content).replace(b"process.env.NODE_ENV", b'"production"')
    return SOURCE_MAP.sub(b"\n", content)


def apply_changes(content: bytes, changes: dict[str, str]) -> bytes:
    """Return a file with the changes that the manifest names; each has to be found."""
    for old, new in changes.items():
        assert old.encode() in content, f"{old} is not in the file: look at the new version, and adapt the change"
        content = content.replace(old.encode(), new.encode())
    return content


def find_licence(names: list[str]) -> str:
    return next(name for name in sorted(names) if re.fullmatch(r"package/LICEN[CS]E(\.\w+)?", name, re.IGNORECASE))


def fetch_package(name: str, version: str) -> tarfile.TarFile:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True, capture_output=True)
        return tarfile.open(fileobj=io.BytesIO(next(Path(folder).glob("*.tgz")).read_bytes()))


def refresh() -> None:
    """Write the files of every package, and their hashes into the manifest."""
    manifest = load_manifest()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for name, package in manifest.items():
        with fetch_package(name, package["version"]) as archive:
            for to, file in package["files"].items():
                member = archive.extractfile(f"package/{file['from']}")
                assert member is not None, to
                content = apply_changes(to_vendored(member.read()), file.get("changes", {}))
                (FOLDER / to).write_bytes(content)
                file["sha256"] = sha256(content).hexdigest()
            licence = archive.extractfile(find_licence(archive.getnames()))
            assert licence is not None, name
            (FOLDER / f"LICENSE.{name.rpartition('/')[2]}.txt").write_bytes(licence.read())
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    refresh()
