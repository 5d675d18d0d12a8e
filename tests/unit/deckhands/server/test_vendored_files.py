"""The libraries that the page brings along are those of the manifest, byte for byte."""

from __future__ import annotations

from hashlib import sha256

from deckhands.server.web.pages import files
from tests.vendored_packages import FOLDER, load_manifest, to_vendored

LICENCES = {"MIT", "BSD-3-Clause", "Apache-2.0", "MPL-2.0 OR Apache-2.0"}
MOST_BYTES = 900_000


def test_vendored_files_have_the_hashes_of_their_manifest() -> None:
    expected = {name: file["sha256"] for package in load_manifest().values() for name, file in package["files"].items()}
    licences = {f"LICENSE.{name.rpartition('/')[2]}.txt" for name in load_manifest()}
    found = {path.name: sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    assert {name: digest for name, digest in found.items() if name not in licences} == expected
    assert licences <= set(found)


def test_each_vendored_package_has_a_version_and_a_free_licence() -> None:
    for name, package in load_manifest().items():
        assert package["version"][0].isdigit(), name
        assert package["licence"] in LICENCES, name


def test_vendored_files_are_small_and_load_nothing_from_elsewhere() -> None:
    contents = [path.read_bytes() for path in FOLDER.glob("*.js")]
    assert sum(map(len, contents)) < MOST_BYTES
    for content in contents:
        assert to_vendored(content) == content
        assert b"import(" not in content
        assert b"new Function" not in content


def test_server_offers_vendored_scripts_without_their_licences() -> None:
    offered = {path.rpartition("/")[2] for path in files() if path.startswith("/web/vendored/")}
    assert "preact.js" in offered
    assert all(name.endswith((".js", ".css")) for name in offered)
