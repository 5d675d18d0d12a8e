"""Which files configure a command, and which may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from broker.runtime.settings import BrokerSettings
from deckhands.client.named_directory import resolve_local_directory
from deckhands.configuration import read_configuration

ENV = {"DECKHANDS_HOME": "/nowhere/at/all"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir(mode=0o755)
    return made


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    path.chmod(0o644)
    return path


TOML = """
url = "redis://from-toml:6379/0"
shards = 4
debug = true
pools = ["bash", "gpu"]
workspace_roots = ["/srv/a:b", "/srv/c"]
[llm]
model = "acme/toml"
[shell]
EDITOR = "vi"
"""


def test_the_environment_wins_over_dotenv_which_wins_over_toml(folder: Path) -> None:
    toml = written(folder, "deckhands.toml", TOML)
    dotenv = written(folder, ".env", "DECKHANDS_URL=redis://from-dotenv\nLLM_MODEL='acme/dotenv'\nDJANGO_KEY=x\n")
    found = read_configuration(ENV | {"LLM_MODEL": "acme/env", "DECKHANDS_SHARDS": " "}, folder)
    assert found.values == {
        "DECKHANDS_URL": "redis://from-dotenv",
        "DECKHANDS_SHARDS": "4",
        "DECKHANDS_DEBUG": "1",
        "DECKHANDS_POOLS": "bash,gpu",
        "DECKHANDS_WORKSPACE_ROOTS": r"/srv/a\:b:/srv/c",
        "SANDBOX_ENV_EDITOR": "vi",
        "DECKHANDS_CONFIG_FILES": f"{dotenv}:{toml}",
    }
    assert (found.files, found.notices) == ([dotenv, toml], [])


def test_nothing_is_read_where_there_is_nothing(folder: Path) -> None:
    assert read_configuration(ENV, folder).values == {}
    written(folder, ".env", "DJANGO_KEY=x\nDECKHANDS_URL=\n")
    assert read_configuration(ENV, folder).files == []  # nothing of ours: another program's


def test_values_of_dotenv_are_taken_literally(folder: Path) -> None:
    written(folder, ".env", "LLM_API_KEY=${HOME}$(id)\n")
    assert read_configuration(ENV, folder).values["LLM_API_KEY"] == "${HOME}$(id)"


TEXTS = {".env": "DECKHANDS_SANDBOX=none\n", "deckhands.toml": 'sandbox = "none"\n'}


@pytest.mark.parametrize("name", list(TEXTS))
class TestFilesThatOthersMayHaveWritten:
    def refused(self, folder: Path, name: str, why: str, **env: str) -> None:
        path = written(folder, name, TEXTS[name])
        found = read_configuration(ENV | env, folder)
        assert (found.values, found.files) == ({}, [])
        assert len(found.notices) == 1
        assert f"{path} is not read: " in found.notices[0]
        assert why in found.notices[0]

    @pytest.mark.parametrize("mark", [".git", ".hg", ".jj"])
    def test_in_a_repository(self, folder: Path, name: str, mark: str) -> None:
        (folder / mark).mkdir()
        (below := folder / "src" / "deep").mkdir(parents=True)
        self.refused(folder, name, f"it lies in the repository {folder}")
        self.refused(below, name, f"it lies in the repository {folder}")

    def test_below_a_workspace_root(self, folder: Path, name: str) -> None:
        self.refused(folder, name, "where agents work", DECKHANDS_WORKSPACE_ROOTS=f"/srv/other:{folder.parent}")

    def test_below_a_link_to_a_workspace_root(self, folder: Path, name: str) -> None:
        (link := folder.parent / "link").symlink_to(folder)
        self.refused(link, name, "where agents work", DECKHANDS_WORKSPACE_ROOTS=str(folder))

    @pytest.mark.parametrize("variable", ["DECKHANDS_HOME", "DECKHANDS_NODE_DIR"])
    def test_where_workspaces_are(self, folder: Path, name: str, variable: str) -> None:
        self.refused(folder, name, "where agents work", **{variable: str(folder.parent)})

    def test_where_every_user_can_write(self, folder: Path, name: str) -> None:
        folder.chmod(0o777)
        self.refused(folder, name, f"every user can write {folder}")

    def test_a_file_that_every_user_can_write(self, folder: Path, name: str) -> None:
        path = written(folder, name, TEXTS[name])
        path.chmod(0o666)
        assert f"every user can write {path}" in read_configuration(ENV, folder).notices[0]

    def test_nothing_in_it_is_an_error(self, folder: Path, name: str) -> None:
        (folder / ".git").mkdir()
        written(folder, name, "DECKHANDS_NONSENSE=1\n" if name == ".env" else "=")
        assert read_configuration(ENV, folder).values == {}


def test_a_named_file_is_trusted_wherever_it_lies(folder: Path) -> None:
    (folder / ".git").mkdir()
    path = written(folder, "other.toml", 'sandbox = "none"')
    found = read_configuration(ENV | {"DECKHANDS_CONFIG": str(path)}, folder.parent)
    assert (found.values["DECKHANDS_SANDBOX"], found.files) == ("none", [path])


def test_directory_with_a_read_file_may_be_no_workspace(folder: Path) -> None:
    path = written(folder, "deckhands.toml", "shards = 2")
    found = read_configuration(ENV, folder)
    with pytest.raises(UsageError, match=f"it holds {path}, which is Deckhands' own"):
        resolve_local_directory(folder, ENV | found.values)
    with pytest.raises(UsageError, match="it holds"):
        resolve_local_directory(folder.parent, ENV | found.values)
    (beside := folder / "project").mkdir()
    assert resolve_local_directory(beside, ENV | found.values) == beside


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("deckhands.toml", "shard = 2", r"DECKHANDS_SHARD is unknown\. Did you mean DECKHANDS_SHARDS\?"),
        ("deckhands.toml", 'shards = "many"', r"DECKHANDS_SHARDS is 'many'\. It must be a number\."),
        ("deckhands.toml", "shards = 2026-01-01", "shards is .*Write a text"),
        ("deckhands.toml", 'config = "x.toml"', "DECKHANDS_CONFIG cannot stand in a file"),
        ("deckhands.toml", 'config_files = ""', "DECKHANDS_CONFIG_FILES cannot stand in a file"),
        ("deckhands.toml", "[llm\n", "cannot be read: .*Correct it"),
        (".env", "DECKHANDS_SHARD=2", "DECKHANDS_SHARD is unknown"),
        (".env", "DECKHANDS_CONFIG=x.toml", "DECKHANDS_CONFIG cannot stand in a file"),
    ],
)
def test_an_error_names_the_file(folder: Path, name: str, text: str, told: str) -> None:
    path = written(folder, name, text)
    with pytest.raises(UsageError, match=f"{path}.*{told}"):
        read_configuration(ENV, folder)


def test_a_named_file_that_is_missing(folder: Path) -> None:
    with pytest.raises(UsageError, match=f"{folder}/none.toml cannot be read: No such file"):
        read_configuration(ENV | {"DECKHANDS_CONFIG": f"{folder}/none.toml"}, folder)


def test_workers_read_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, ".env", "DECKHANDS_SHARDS=9\n")
    written(folder, "deckhands.toml", "shards = 9\n")
    monkeypatch.chdir(folder)
    assert BrokerSettings.from_env({}).shards is None
    assert BrokerSettings().shards is None
