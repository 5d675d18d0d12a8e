"""Environment variables of Deckhands' processes: only listed ones, regardless of the name of a secret."""

from __future__ import annotations

import ast
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.runtime.environment import BEAT, INGRESS, JOBS, SERVICES, TOOLS, make_worker_environment
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
from tests.polling import until
from tool_worker.settings import ToolVariables
from tool_worker.workspace.files.staging import remove_tree

ROOT = Path(__file__).resolve().parents[2]
SECRET_NAMES = (
    *("LLM_API_KEY", "LLM_AWS_SECRET_ACCESS_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "MY_PRIVATE_THING", "PGPASSWORD"),
)
SECRETS = {name: f"canary-{number}" for number, name in enumerate(SECRET_NAMES, 1)}
NEEDED = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nowhere",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",
    "HTTPS_PROXY": "http://proxy:3128",
    "no_proxy": "localhost",
    "SSL_CERT_FILE": "/certificates",
    "PYTHONPATH": "/code",
    "DECKHANDS_POOLS": "bash",
    "SANDBOX_ENV_SIGN": "sign",
    "NO_CHANGE_TIMEOUT_SECONDS": "5",
}
PRINTING = ("/bin/sh", "-c", "env; exec sleep 600")


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    commands = dict.fromkeys(("controller", "tools", "services", "ingress", "jobs", "beat"), PRINTING)
    spec = ClusterSpec(tmp_path, ingresses=2, jobs=2, beats=1, environment=NEEDED | SECRETS, commands=commands)
    running = Cluster(spec)
    await running.start()
    yield running
    await running.stop()


async def test_only_controllers_of_a_cluster_get_more_than_is_listed(cluster: Cluster) -> None:
    logs = {name: worker.log for name, worker in cluster.workers.items()}
    for log in logs.values():
        await until(lambda log=log: "DECKHANDS_NODE_DIR" in log.read_text(), what="environment")
    assert "canary" not in Path(f"/proc/{cluster.store.child.pid}/environ").read_text()
    assert [name for name, log in logs.items() if "canary" in log.read_text()] == ["controller-1"]
    assert list(logs) == ["controller-1", "tools-1", "services-1", "ingress-1", "jobs-1"]
    assert {f"{name}={value}" for name, value in NEEDED.items()} <= set(logs["tools-1"].read_text().splitlines())
    # Controller workers call models, and the variables of their libraries cannot be listed.
    assert {f"{name}={value}" for name, value in SECRETS.items()} <= set(logs["controller-1"].read_text().splitlines())


def test_operators_variables_are_passed_except_model_settings(tmp_path: Path) -> None:
    servers = {"x": {"url": "https://x", "headers": {"Authorization": "Bearer ${GITHUB_TOKEN}", "X": "${LLM_API_KEY}"}}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    given = SECRETS | {"DECKHANDS_PASS_ENV": "AWS_*, PGPASSWORD,LLM_*", "DECKHANDS_MCP": str(tmp_path / "mcp.json")}
    assert set(make_worker_environment(TOOLS, given)) == {
        *("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "GITHUB_TOKEN", "DECKHANDS_PASS_ENV", "DECKHANDS_MCP")
    }
    assert ToolVariables.from_env({"DECKHANDS_PASS_ENV": "AWS_*"}).pass_env == "AWS_*"


@pytest.mark.parametrize("role", [INGRESS, JOBS, BEAT])
def test_variables_of_tools_reach_no_other_role(role: str, tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text("${GITHUB_TOKEN}")
    passed = {"DECKHANDS_PASS_ENV": "AWS_*,PGPASSWORD", "DECKHANDS_MCP": str(tmp_path / "mcp.json")}
    assert make_worker_environment(role, SECRETS | passed) == passed


@pytest.mark.parametrize(
    ("place", "passed"),
    [
        ("s3://bucket/folder", {"AWS_SECRET_ACCESS_KEY"}),
        ("gcs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS"}),
        ("file:///var/lib/archive", set()),
        ("other://bucket", set()),
        ("AWS", set()),
    ],
)
def test_jobs_get_the_variables_of_the_archive_s_cloud(place: str, passed: set[str]) -> None:
    given = SECRETS | {"DECKHANDS_ARCHIVE": place, "FSSPEC_OTHER": "x"}
    is_fsspec = place.partition("://")[0] in ("s3", "gcs", "other")
    wanted = {"DECKHANDS_ARCHIVE", *passed, *(["FSSPEC_OTHER"] if is_fsspec else [])}
    assert set(make_worker_environment(JOBS, given)) == wanted
    assert set(make_worker_environment(INGRESS, given)) == {"DECKHANDS_ARCHIVE"}
    assert set(make_worker_environment(TOOLS, given)) == {"DECKHANDS_ARCHIVE"}


def test_tool_workers_get_the_variables_of_the_checkpoints_cloud() -> None:
    given = {"DECKHANDS_CHECKPOINTS": "s3://bucket/folder", "FSSPEC_OTHER": "x"}
    assert set(make_worker_environment(TOOLS, SECRETS | given)) == {*given, "AWS_SECRET_ACCESS_KEY"}


def test_tool_workers_get_the_variables_that_programs_need() -> None:
    given = {"NODE_EXTRA_CA_CERTS": "/ca.pem", "PLAYWRIGHT_BROWSERS_PATH": "/browsers", "TEMP": "/t", "TMP": "/t"}
    given |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert make_worker_environment(TOOLS, SECRETS | given) == given


def test_services_in_one_process_get_what_one_of_them_gets() -> None:
    given = SECRETS | NEEDED | {"DECKHANDS_ARCHIVE": "s3://bucket/folder", "DECKHANDS_API_KEY": "x"}
    alone = [make_worker_environment(role, given) for role in (INGRESS, JOBS, BEAT)]
    assert make_worker_environment(SERVICES, given) == {name: value for each in alone for name, value in each.items()}


def test_a_beat_gets_no_key_and_no_store() -> None:
    given = dict.fromkeys(("DECKHANDS_URL", "DECKHANDS_SECRET_KEY", "DECKHANDS_SECRET_KEY_FILE"), "x")
    assert make_worker_environment(BEAT, given | {"DECKHANDS_CELERY_URL": "y"}) == {"DECKHANDS_CELERY_URL": "y"}


def test_a_file_of_servers_that_cannot_be_read_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff${GITHUB_TOKEN}")
    for name in ("missing", "bytes"):
        assert set(make_worker_environment(TOOLS, SECRETS | {"DECKHANDS_MCP": str(tmp_path / name)})) <= {
            "DECKHANDS_MCP",
            "GITHUB_TOKEN",
        }


def test_cleanup_passes_no_variables_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rm").write_text(f'#!/bin/sh\nenv >{tmp_path}/seen\nexec /bin/rm "$@"\n')
    (tmp_path / "bin" / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("GITHUB_TOKEN", "canary")
    (tmp_path / "doomed" / "folder").mkdir(parents=True)
    remove_tree(tmp_path / "doomed")
    assert not (tmp_path / "doomed").exists()
    assert not (tmp_path / "seen").exists() or "canary" not in (tmp_path / "seen").read_text()


def test_whatever_starts_a_process_says_what_it_knows() -> None:
    starting = {"run": "subprocess", "Popen": "subprocess", "create_subprocess_exec": "asyncio"}
    silent = []
    # Programs of `sessions` run in a workspace, and know what it knows.
    sources = {*ROOT.glob("broker/**/*.py"), *ROOT.glob("tool_worker/**/*.py")} - {
        *ROOT.glob("tool_worker/host/sessions/*")
    }
    for path in sorted(sources):
        text = path.read_text()
        if not any(f".{name}(" in text for name in starting):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if starting.get(node.func.attr) == owner and "env" not in {word.arg for word in node.keywords}:
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert silent == []
