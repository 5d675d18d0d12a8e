"""The content of compose.yaml, read as text; `test_compose_trial` starts it."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.limits.quotas import QuotaTable
from broker.limits.tenants import TenantTable
from broker.runtime.settings import BrokerSettings
from broker.secrets.secrets import parse_key
from broker.tools.mcp_config import read_servers
from controller_worker.loop.hooks import Hooks, load_hooks
from controller_worker.providers.profiles import Profiles
from deckhands.client.archive.retention import Retention
from tool_worker.sandbox.seccomp import REFUSED

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose.yaml"
OUTSIDE = ROOT / "deploy" / "compose.outside.yaml"
CLAUDE = ROOT / "deploy" / "compose.claude.yaml"
CHAOS = ROOT / "deploy" / "compose.chaos.yaml"
NO_SANDBOX = ROOT / "deploy" / "compose.none.yaml"
SYSTEM_CALLS = ROOT / "deploy" / "seccomp.json"
PRODUCERS = ROOT / "deploy" / "compose.producers.yaml"
PASSWORDS = tuple(
    f"{who}_PASSWORD"
    for who in (
        *("ADMIN", "OPERATOR", "CONTROLLER", "TOOL", "INGRESS", "JOBS", "GATEWAY", "METRICS", "BEAT", "PRODUCER"),
        *("QUEUE", "FLOWER"),
    )
)
POOLS = {"ipython": "bash,ipython", "browser": "bash,browser,ipython"}
STAYING = {"store", "queue", "controller", "tools", "ingress", "jobs", "beat", "gateway", "flower", *POOLS}
PASSING = {"setup", "cli"}
ORDINARY = ["no-new-privileges:true"]
FOR_BUBBLEWRAP = [*ORDINARY, "seccomp=deploy/seccomp.json", "apparmor=unconfined", "systempaths=unconfined"]


def services() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_services_are_these() -> None:
    assert set(services()) == STAYING | PASSING


@pytest.mark.parametrize("name", sorted(STAYING | PASSING))
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = services()[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == (FOR_BUBBLEWRAP if name in {"tools", *POOLS} else ORDINARY)
    assert not {"privileged", "cap_add", "devices", "ipc", "network_mode", "pid", "userns_mode"} & set(service)
    kept = {volume.partition(":")[0] for volume in service.get("volumes", [])}
    assert kept <= {"log", "queue", "node", "archive", "evaluations"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", sorted(STAYING))
def test_long_running_service_has_a_health_check_and_restarts(name: str) -> None:
    service = services()[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True


def test_health_is_asked_of_the_heartbeat() -> None:
    asked = {name: services()[name]["healthcheck"]["test"][1:] for name in STAYING - {"flower", "gateway"}}
    command = ["python", "-P", "-m", "broker.health"]
    assert asked == {
        "store": [*command, "store"],
        "queue": [*command, "store"],
        "controller": [*command, "controller"],
        **{name: [*command, "tool"] for name in ("tools", *POOLS)},
        "ingress": [*command, "ingress"],
        "jobs": [*command, "jobs"],
        "beat": [*command, "beat"],
    }


def test_no_password_has_a_default() -> None:
    text = COMPOSE.read_text()
    used = re.findall(r"\$\{(\w*PASSWORD)([^}]*)\}", text)
    assert {name for name, _ in used} == set(PASSWORDS)
    assert {rest for _, rest in used} == {":?run deploy/make-env"}
    assert len(used) == len(re.findall(r"\$\{?\w*PASSWORD", text))


def test_only_services_that_need_keys_or_network_have_them() -> None:
    assert [name for name, service in services().items() if "LLM_API_KEY" in service.get("environment", {})] == [
        "controller"
    ]
    assert {name for name, service in services().items() if "outside" in service["networks"]} == {
        "controller",
        "flower",
    }
    assert yaml.safe_load(COMPOSE.read_text())["networks"]["inside"] == {"internal": True}


def test_only_services_with_secrets_have_their_key() -> None:
    assert {name for name in services() if "DECKHANDS_SECRET_KEY" in services()[name].get("environment", {})} == {
        *("controller", "tools", *POOLS, "ingress", "jobs", "gateway", *PASSING)
    }
    used = re.findall(r"\$\{SECRET_KEY([^}]*)\}", COMPOSE.read_text())
    assert set(used) == {":?run deploy/make-env"}


def test_only_setup_is_admin_and_each_role_has_a_user() -> None:
    admins = {name for name, service in services().items() if "//admin:" in json.dumps(service.get("environment", {}))}
    assert admins == {"setup"}
    texts = {name: json.dumps(service.get("environment", {})) for name, service in services().items()}
    users = {name: re.findall(r"redis://(\w+):", text) for name, text in texts.items()}
    assert {name: found for name, found in users.items() if found} == {
        **{name: [name] * 2 for name in ("controller", "ingress", "jobs")},  # of the store, and of Celery's broker
        **{name: ["tool"] * 2 for name in ("tools", *POOLS)},
        **{name: [name] for name in ("gateway", "beat", "flower")},
        "setup": ["admin"],
        "cli": ["operator"],
        "store": ["metrics"],
    }


def test_ingress_logs_in_as_itself_and_reaches_only_servers() -> None:
    ingress = services()["ingress"]
    logins = re.findall(r"redis://(\w*):", json.dumps(ingress["environment"]))
    assert sorted(logins) == ["ingress", "ingress"]
    assert ingress["networks"] == ["inside"]
    assert not {"ports", "configs", "env_file"} & set(ingress)
    assert ingress["volumes"] == ["evaluations:/var/lib/evaluations"]
    assert ingress["environment"]["DECKHANDS_EVALUATIONS"] == "/var/lib/evaluations"
    assert [name for name in services() if "//ingress:" in json.dumps(services()[name])] == ["ingress"]
    assert "//producer:" not in COMPOSE.read_text()
    known = {name: services()[name]["environment"].keys() & set(PASSWORDS) for name in ("store", "queue")}
    assert known == {
        "store": set(PASSWORDS) - {"QUEUE_PASSWORD", "FLOWER_PASSWORD", "BEAT_PASSWORD"},
        "queue": set(PASSWORDS) - {"ADMIN_PASSWORD", "OPERATOR_PASSWORD", "GATEWAY_PASSWORD"},
    }


def test_the_gateway_logs_in_as_itself_behind_its_own_network() -> None:
    gateway = services()["gateway"]
    assert re.findall(r"redis://(\w*):", json.dumps(gateway["environment"])) == ["gateway"]
    assert (gateway["networks"], gateway["profiles"]) == (["inside", "web"], ["gateway"])
    assert gateway["ports"] == ["127.0.0.1:${GATEWAY_PORT:-8900}:8900"]
    assert [name for name in services() if "web" in services()[name]["networks"]] == ["gateway"]


def test_remote_producers_reach_both_servers_local_only_by_default() -> None:
    address = "${PRODUCER_ADDRESS:-127.0.0.1}"
    assert yaml.safe_load(PRODUCERS.read_text())["services"] == {
        "store": {"networks": ["inside", "outside"], "ports": [f"{address}:${{STORE_PORT:-6379}}:6379"]},
        "queue": {"networks": ["inside", "outside"], "ports": [f"{address}:${{QUEUE_PORT:-6380}}:6379"]},
    }


@pytest.mark.parametrize("name", sorted(STAYING | PASSING))
def test_every_setting_is_known(name: str) -> None:
    environment = services()[name].get("environment", {})
    ours = {key: value for key, value in environment.items() if key.startswith("DECKHANDS_")}
    BrokerSettings.from_env({key: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for key, value in ours.items()})


def test_every_conversation_has_its_own_sandbox_by_default() -> None:
    assert services()["tools"]["environment"]["DECKHANDS_SANDBOX"] == "bwrap"
    text = NO_SANDBOX.read_text()
    assert "security_opt: !override [" in text  # or the engine's filters would stay off
    assert yaml.safe_load(text.replace("!override", ""))["services"] == {
        "tools": {"security_opt": ORDINARY, "environment": {"DECKHANDS_SANDBOX": "none"}}
    }


def test_sdk_profile_changes_only_image_and_sandbox() -> None:
    text = CLAUDE.read_text()
    (service,) = yaml.safe_load(text.replace("!override", ""))["services"].values()
    assert set(service) == {"image", "build", "security_opt", "environment"}
    assert service["security_opt"] == FOR_BUBBLEWRAP
    assert service["build"] == {"args": {"REQUIREMENTS": "claude"}}
    pinned, with_sdk = ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("run", "claude"))
    assert "\nclaude-agent-sdk==" in with_sdk
    assert set(pinned.splitlines()) < set(with_sdk.splitlines())  # it can serve as the image of every service


def test_quota_and_server_files_are_empty_by_default() -> None:
    whole = yaml.safe_load(COMPOSE.read_text())
    files = {name: re.sub(r"^\$\{\w+_FILE:-(.*)\}$", r"\1", entry["file"]) for name, entry in whole["configs"].items()}
    assert files == {
        "models": "deploy/models.toml",
        "quotas": "deploy/quotas.toml",
        "tenants": "deploy/tenants.toml",
        "hooks": "deploy/hooks.toml",
        "mcp": "deploy/mcp.json",
        "retention": "deploy/retention.toml",
    }
    assert Retention.of_setting(str(ROOT / files["retention"])) == Retention()
    assert QuotaTable.load_setting(str(ROOT / files["quotas"])).pools == ()
    assert TenantTable.load_setting(str(ROOT / files["tenants"])) == TenantTable()
    assert isinstance(load_hooks(str(ROOT / files["hooks"])), Hooks)
    profiles = Profiles.from_env(
        {"LLM_CONFIG": str(ROOT / files["models"]), "LLM_MODEL": "anthropic/claude-sonnet-4-5"}
    )
    assert [entry.name for entry in profiles.table.entries] == ["anthropic/claude-sonnet-4-5"]
    assert read_servers(ROOT / files["mcp"], {}) == ()
    mounted = {name: services()[name]["configs"] for name in STAYING if "configs" in services()[name]}
    variables = {"models": "LLM_CONFIG"} | {
        name: f"DECKHANDS_{name.upper()}" for name in ("quotas", "tenants", "hooks")
    }
    assert mounted == {
        "controller": [
            {"source": source, "target": services()["controller"]["environment"][variable]}
            for source, variable in variables.items()
        ],
        **{
            name: [{"source": "mcp", "target": services()[name]["environment"]["DECKHANDS_MCP"]}]
            for name in ("tools", *POOLS)
        },
        "jobs": [{"source": "retention", "target": services()["jobs"]["environment"]["DECKHANDS_RETENTION"]}],
    }


def test_pool_profile_adds_tool_workers_of_the_same_node() -> None:
    tools = services()["tools"]
    for name, pools in POOLS.items():
        service = services()[name]
        assert service["profiles"] == [name]
        assert service["environment"] == tools["environment"] | {"DECKHANDS_POOLS": pools}
        assert service["build"]["args"]["REQUIREMENTS"] == "pools"
        own = {"profiles", "environment", "image", "build"}
        assert {key: value for key, value in service.items() if key not in own} == {
            key: value for key, value in tools.items() if key not in own
        }
    pinned, larger = ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("run", "pools"))
    assert {"ipykernel", "playwright"} <= {line.partition("==")[0] for line in larger.splitlines()}
    names = [{line.partition(" ")[0] for line in text.splitlines() if "==" in line} for text in (pinned, larger)]
    assert names[0] < names[1]  # it can serve as the image of every service


def test_traces_of_every_worker_go_where_the_environment_says() -> None:
    traced = {name for name in STAYING if "OTEL_EXPORTER_OTLP_ENDPOINT" in services()[name].get("environment", {})}
    assert traced == {"controller", "tools", *POOLS, "ingress", "jobs", "gateway"}


def test_outside_network_profile_changes_nothing_else() -> None:
    assert yaml.safe_load(OUTSIDE.read_text())["services"] == {
        name: {
            "networks": ["inside", "outside"],
            "env_file": [{"path": f"deploy/{name}.env", "required": False}],
        }
        for name in ("tools", "jobs")
    }
    assert {"deploy/tools.env", "deploy/jobs.env"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_jobs_log_in_as_themselves_and_share_the_archive() -> None:
    found = services()
    assert re.findall(r"redis://(\w*):", json.dumps(found["jobs"]["environment"])) == ["jobs", "jobs"]
    assert re.findall(r"redis://(\w*):", json.dumps(found["beat"]["environment"])) == ["beat"]
    assert [name for name in found if "//jobs:" in json.dumps(found[name])] == ["jobs"]
    sharing = {name for name in found if "archive:/var/lib/archive" in found[name].get("volumes", [])}
    assert sharing == {"jobs", "cli", "gateway"}
    assert {found[name]["environment"]["DECKHANDS_ARCHIVE"] for name in sharing} == {
        "${ARCHIVE:-file:///var/lib/archive}"
    }


def test_container_filter_differs_from_sandbox_only_for_sandbox_creation() -> None:
    profile = json.loads(SYSTEM_CALLS.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    names = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert len(names) == len(set(names))
    assert set(REFUSED) - set(names) == {"mount", "umount2", "pivot_root", "unshare", "sethostname"}


def test_the_image_holds_no_secrets() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in ignored if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert not [pattern for pattern in patterns if pattern.startswith("!.")]
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_passwords_are_made_fresh_and_kept(tmp_path: Path) -> None:
    made = [made_env(tmp_path / name) for name in ("first", "second")]
    for file in made:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert re.findall(r"^(\w+)=[0-9a-f]{48}$", file.read_text(), re.MULTILINE) == [*PASSWORDS]
    found = [line for file in made for line in re.findall(r"=(\w{48})$", file.read_text(), re.MULTILINE)]
    assert len(set(found)) == 2 * len(PASSWORDS)
    keys = {secret_key(file) for file in made}
    assert len(keys) == 2
    assert {len(parse_key(key)) for key in keys} == {32}
    before = made[0].read_text()
    again = subprocess.run([made[0].parent / "deploy" / "make-env"], check=True, capture_output=True)
    assert again.stdout == b".env has all passwords already\n"
    assert made[0].read_text() == before


def test_missing_entries_of_an_older_file_are_added(tmp_path: Path) -> None:
    earlier = "ADMIN_PASSWORD=0123456789abcdef\nLLM_MODEL=m\nDOOR_PASSWORD=\nSECRET_KEY=kept"
    (tmp_path / "deploy").mkdir()
    (tmp_path / ".env").write_text(earlier)
    file = made_env(tmp_path)
    lines = file.read_text().splitlines()
    assert lines[:4] == earlier.splitlines()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    added = [line.partition("=")[0] for line in lines[4:]]
    assert added == [name for name in PASSWORDS if name != "ADMIN_PASSWORD"]


def secret_key(file: Path) -> str:
    (key,) = re.findall(r"^SECRET_KEY=(.+)$", file.read_text(), re.MULTILINE)
    return key


def made_env(folder: Path) -> Path:
    """Make fresh passwords in a folder and return the file."""
    (folder / "deploy").mkdir(parents=True, exist_ok=True)
    script = shutil.copy(ROOT / "deploy" / "make-env", folder / "deploy")
    subprocess.run([script], check=True, capture_output=True)
    return folder / ".env"


def test_chaos_needs_no_rights_and_no_socket_of_the_engine() -> None:
    added = yaml.safe_load(CHAOS.read_text())["services"]
    sharing = {"pid": "service:pids"}
    assert {name: added[name] for name in ("controller", "tools", "ingress", "jobs")} == dict.fromkeys(
        ("controller", "tools", "ingress", "jobs"), sharing
    )
    assert set(added) == {"pids", "controller", "tools", "ingress", "jobs", "chaos"}
    for name in ("pids", "chaos"):
        service = added[name]
        assert (service["user"], service["read_only"], service["cap_drop"]) == ("10001:10001", True, ["ALL"])
        assert service["security_opt"] == ORDINARY
        assert "/var/run/docker.sock" not in str(service)
        assert "ports" not in service
    assert added["pids"]["network_mode"] == "none"
    assert added["chaos"]["networks"] == ["inside"]
    assert {"DECKHANDS_SECRET_KEY", "DECKHANDS_MASTER_KEYS"} <= set(added["chaos"]["environment"])
    assert {"--shared-pids", "--store-restarts"} <= set(added["chaos"]["entrypoint"])
    assert "/var/lib/chaos" in (ROOT / "Dockerfile").read_text()
