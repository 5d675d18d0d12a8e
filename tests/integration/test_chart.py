"""The Helm chart: rendered for every option, checked against Kubernetes' schemas, and its roles started as processes."""

from __future__ import annotations

import base64
import copy
import functools
import json
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from broker.limits.quotas import QuotaTable
from broker.store import SentinelUrl
from deckhands.operations.monitoring.families import FAMILIES
from tests.kubernetes_api import TOKEN, running_cluster
from tests.kubernetes_objects import path_of
from tests.polling import unhurried, until
from tests.sentinels import find_port
from tests.stores import valkey_program

kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "deckhands"
DEPLOY = CHART.parents[1]
HELM = Path(sys.executable).parent / "helm"
VERSIONS = ("1.30", "1.37")
OWN_SECRET = ["secrets.existing=mine"]
EXTERNAL = ["store.kind=external", "queue.kind=external", "queue.external.hosts=q:6379", *OWN_SECRET]
OPTIONS: dict[str, list[str]] = {
    "default": [],
    "sentinel": ["store.kind=sentinel", "queue.kind=sentinel", "store.acks=replica"],
    "cluster": [
        *EXTERNAL,
        *("store.external.scheme=rediss+cluster", r"store.external.hosts=a:6379\,b:6379", "store.external.path="),
        "networkPolicy.storeCidrs[0]=10.9.0.0/16",
    ],
    "external sentinels": [
        *EXTERNAL,
        *("store.external.scheme=redis+sentinel", r"store.external.hosts=a:26379\,b:26379"),
        *("store.external.path=/deck/0", "store.external.setup=false"),
    ],
    "hpa": [f"{role}.autoscaling.kind=hpa" for role in ("controller", "tools", "ingress", "jobs", "gateway")],
    "keda": [f"{role}.autoscaling.kind=keda" for role in ("controller", "tools", "ingress", "jobs")],
    "bubblewrap": ["tools.sandbox=bwrap", "tools.seccompProfile=deckhands.json", "tools.egressCidrs[0]=0.0.0.0/0"],
    "pods": [
        *("tools.sandbox=kubernetes", "tools.kubernetes.images[0]=team/sandbox:1", "tools.egressCidrs[0]=0.0.0.0/0"),
        *(
            "tools.kubernetes.apiServerCidrs[0]=10.96.0.1/32",
            "tools.kubernetes.template=spec: {priorityClassName: low}",
        ),
    ],
    "watched": [
        *("flower.enabled=true", "metrics.serviceMonitor.enabled=true", "metrics.alerts.enabled=true"),
        *("metrics.dashboard.enabled=true", "gateway.route.enabled=true", "gateway.route.host=agents.example"),
        *("gateway.route.tlsSecret=tls", "gateway.from[0].team=agents", "logFormat=text"),
    ],
    "bare": ["gateway.enabled=false", "metrics.enabled=false", "cli.enabled=false", "networkPolicy.enabled=false"],
    "restored": ["store.kind=sentinel", "store.chosen=1", "tools.volumes[0].name=vault", "files.secretSources=x = 1"],
    "stored": ["archive=s3://a/b", "checkpoints=s3://a/c", "imagePullSecrets[0].name=pull", "store.shards=8"],
}
OTHERS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of other projects, whose schemas are not Kubernetes' own."""
KEYS = {"SECRET_KEY", "MASTER_KEYS"}
STORE_USERS = ("ADMIN", "OPERATOR", "CONTROLLER", "TOOL", "INGRESS", "JOBS", "GATEWAY", "METRICS", "PRODUCER")
QUEUE_USERS = ("QUEUE", "CONTROLLER", "TOOL", "INGRESS", "JOBS", "BEAT", "METRICS", "FLOWER", "PRODUCER")
OF_SENTINELS = {"REPLICATION_PASSWORD", "SENTINEL_ADMIN_PASSWORD"}
MAY_READ: dict[str, set[str]] = {
    "controller": {"CONTROLLER_PASSWORD", "LLM_API_KEY", *KEYS},
    "tools": {"TOOL_PASSWORD", *KEYS},
    "ingress": {"INGRESS_PASSWORD", *KEYS},
    "jobs": {"JOBS_PASSWORD", *KEYS},
    "beat": {"BEAT_PASSWORD"},
    "gateway": {"GATEWAY_PASSWORD", *KEYS},
    "metrics": {"METRICS_PASSWORD", "METRICS_TOKEN"},
    "flower": {"FLOWER_PASSWORD"},
    "cli": {"OPERATOR_PASSWORD", *KEYS},
    "setup": {"ADMIN_PASSWORD", *KEYS},
    "store": {*(f"{user}_PASSWORD" for user in STORE_USERS), "PRODUCERS", *OF_SENTINELS},
    "queue": {*(f"{user}_PASSWORD" for user in QUEUE_USERS), *OF_SENTINELS},
}
"""What each role finds of the secret, but for SENTINEL_PASSWORD."""

Manifest = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], check=False, capture_output=True, text=True, timeout=unhurried(60))


def to_options(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def render(values: list[str]) -> list[Manifest]:
    return [found for found in yaml.load_all(write(tuple(values)), yaml.CSafeLoader) if found]


@functools.cache
def write(values: tuple[str, ...]) -> str:
    done = helm("template", "deck", str(CHART), "--namespace", "agents", *to_options(list(values)))
    assert done.returncode == 0, done.stderr
    return done.stdout


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and the template of each pod."""
    for each in manifests:
        if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
            template = each["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


@pytest.fixture(params=sorted(OPTIONS))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(OPTIONS[request.param])


@functools.cache
def check_schema(manifest: str, version: str) -> None:
    """Check a manifest, which most options share; the validator reads all schemas again at each call."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def test_manifests_fit_the_schemas_of_kubernetes(manifests: list[Manifest]) -> None:
    for each in manifests:
        for version in () if each["kind"] in OTHERS else VERSIONS:
            check_schema(json.dumps(each), version)


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with running_cluster(folder / "cluster", folder / "volume") as cluster:
        tls = ssl.create_default_context(cafile=str(cluster.certificate))
        token = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=cluster.url, verify=tls, headers=token, params={"dryRun": "All"}) as client:
            yield client


def test_an_api_server_accepts_every_manifest(manifests: list[Manifest], api_server: httpx.Client) -> None:
    ours = [each for each in manifests if each["kind"] not in OTHERS]
    assert len({(each["kind"], each["metadata"]["name"]) for each in ours}) == len(ours)
    for each in ours:
        answer = api_server.post(path_of(each, "agents"), json=each)
        assert answer.status_code == httpx.codes.CREATED, answer.text


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "complaint"),
    [
        ("Deployment", "deck-controller", "spec.selector.matchLabels.tier", "x", "spec.selector: not in the template"),
        ("Deployment", "deck-controller", "spec.replica", 3, "replica"),
        ("StatefulSet", "deck-tools", "spec.volumeClaimTemplates", [], "volumeMounts"),
        ("Service", "deck-gateway", "metadata.name", "9.gateway", "metadata.name"),
        ("NetworkPolicy", "deck-closed", "metadata.labels.team", "a b", "labels: team"),
        ("Secret", "deck-secrets", "data.SECRET_KEY", "not base64", "is invalid"),
        ("ConfigMap", "deck-files", "metadata.namespace", "other", "does not belong to"),
    ],
)
def test_an_api_server_refuses_what_a_schema_allows(
    api_server: httpx.Client, kind: str, name: str, path: str, value: object, complaint: str
) -> None:
    found = copy.deepcopy(find(render([]), kind, name))
    *above, field = path.split(".")
    functools.reduce(lambda inner, key: inner[key], above, found)[field] = value
    answer = api_server.post(path_of(found, "agents"), json=found)
    assert answer.is_client_error
    assert complaint in answer.json()["message"]


def test_chart_passes_helms_own_check() -> None:
    for values in OPTIONS.values():
        done = helm("lint", "--strict", str(CHART), *to_options(values))
        assert done.returncode == 0, done.stdout


def test_pods_meet_the_restricted_standard(manifests: list[Manifest]) -> None:
    """Source: the Pod Security Standard `restricted`. Bubblewrap needs more, and only in pods of tools."""
    for component, template in pods(manifests):
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        starts_pods = component == "tools" and "serviceAccountName" in spec
        assert spec["automountServiceAccountToken"] is starts_pods
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {kind for volume in spec.get("volumes", []) for kind in set(volume) - {"name"}}
        assert volumes <= {"emptyDir", "configMap", "secret"}
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights.pop("capabilities") == {"drop": ["ALL"]}
            assert rights.pop("allowPrivilegeEscalation") is False
            assert rights.pop("readOnlyRootFilesystem") is True
            is_confining = component == "tools" and spec.get("hostUsers") is False
            assert set(rights) == ({"procMount", "appArmorProfile", "seccompProfile"} if is_confining else set())
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_role_reads_only_its_own_part_of_the_secret(manifests: list[Manifest]) -> None:
    for component, template in pods(manifests):
        found = {
            env["valueFrom"]["secretKeyRef"]["key"]
            for container in template["spec"]["containers"]
            for env in container["env"]
            if "secretKeyRef" in env.get("valueFrom", {})
        }
        found |= {
            item["key"]
            for volume in template["spec"].get("volumes", [])
            for item in volume.get("secret", {}).get("items", [])
        }
        assert found - {"SENTINEL_PASSWORD"} <= MAY_READ[component], component


def test_every_pod_that_stays_is_probed(manifests: list[Manifest]) -> None:
    for component, template in pods(manifests):
        for container in template["spec"]["containers"]:
            probes = {name for name in container if name.endswith("Probe")}
            assert (not probes) is (component in {"setup", "cli"}), component


def test_variables_are_settings(manifests: list[Manifest]) -> None:
    known = set(
        re.findall(r"^\| `([A-Z_]+)` \|", (CHART.parents[2] / "docs" / "settings.md").read_text(), re.MULTILINE)
    )
    for _, template in pods(manifests):
        for container in template["spec"]["containers"]:
            names = [env["name"] for env in container["env"]]
            assert len(names) == len(set(names)), names
            assert {name for name in names if name.startswith(("DECKHANDS_", "LLM_"))} <= known | {"LLM_CONFIG"}


def test_selectors_select_the_pods_of_one_component(manifests: list[Manifest]) -> None:
    labels = [template["metadata"]["labels"] for _, template in pods(manifests)]
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            selector = spec["selector"]
        elif each["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet", "ServiceMonitor"}:
            selector = spec["selector"]["matchLabels"]
        else:
            continue
        matching = [every for every in labels if selector.items() <= every.items()]
        assert len(matching) == 1, (each["kind"], each["metadata"]["name"])


def test_all_pods_are_closed_to_the_network_by_default() -> None:
    found = render([])
    closed = find(found, "NetworkPolicy", "deck-closed")["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(closed)
    for _, template in pods(found):
        assert closed["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    reaching = [
        each["metadata"]["name"]
        for each in found
        if each["kind"] == "NetworkPolicy" and "ipBlock" in json.dumps(each["spec"].get("egress", []))
    ]
    assert reaching == ["deck-outside"]
    outside = find(found, "NetworkPolicy", "deck-outside")["spec"]["podSelector"]["matchExpressions"][0]["values"]
    assert "tools" not in outside


def test_three_servers_are_named_by_their_sentinels() -> None:
    found = render(OPTIONS["sentinel"])
    (controller,) = find(found, "Deployment", "deck-controller")["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value", "") for each in controller["env"]}
    for name, service, user in (
        ("DECKHANDS_URL", "store", "controller"),
        ("DECKHANDS_CELERY_URL", "queue", "controller"),
    ):
        url = SentinelUrl.parse(env[name])
        assert url.service == service
        assert url.sentinels == tuple((f"deck-{service}-{number}.deck-{service}", 26379) for number in range(3))
        assert url.servers.startswith(f"redis://{user}:$(")
    assert env["DECKHANDS_ACKS"] == "replica"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (["store.kind=external", *OWN_SECRET], "store.external.hosts names the servers of an external store"),
        (["queue.kind=external", "queue.external.hosts=a:1"], "secrets.existing names the secret with the passwords"),
        (["store.acks=replica"], "a single server has no replica; set store.kind to sentinel"),
        (["flower.enabled=true", "queue.kind=sentinel"], "set queue.kind to server, or leave Flower out"),
        (["gateway.route.enabled=true"], "gateway.route.host names the host of the gateway"),
        (["gateway.autoscaling.kind=keda"], "gateway.autoscaling.kind"),
        (["store.kind=etcd"], "store.kind"),
        (["tools.sandbox=kubernetes"], "tools.kubernetes.images names the images of sandboxes"),
        (["tools.sandbox=kubernetes", "tools.kubernetes.images[0]=a"], "tools.kubernetes.apiServerCidrs names"),
        (["controler.replicas=3"], "Additional property controler is not allowed"),
        ([*EXTERNAL, "queue.external.scheme=redis+cluster", "store.external.hosts=a:1"], "queue.external.scheme"),
    ],
)
def test_values_that_cannot_work_are_refused(values: list[str], complaint: str) -> None:
    done = helm("template", "deck", str(CHART), *to_options(values))
    assert done.returncode != 0
    assert complaint in done.stderr


def test_pods_are_added_by_figures_that_are_exported() -> None:
    exported = {family.name + ("_total" if family.kind == "counter" else "") for family in FAMILIES}
    queries = [
        trigger["metadata"]["query"]
        for each in render(OPTIONS["keda"])
        if each["kind"] == "ScaledObject"
        for trigger in each["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    assert len(queries) == 6
    assert set(re.findall(r"deckhands_\w+", " ".join(queries))) <= exported


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    found = render(OPTIONS["watched"])
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    assert find(found, "PrometheusRule", "deck")["spec"] == alerts
    board = json.loads(find(found, "ConfigMap", "deck-dashboard")["data"]["deckhands.json"])
    assert board == json.loads((DEPLOY / "grafana" / "deckhands.json").read_text())


def test_empty_files_of_the_operator_say_nothing() -> None:
    files = find(render([]), "ConfigMap", "deck-files")["data"]
    assert json.loads(files["mcp.json"]) == {"mcpServers": {}}
    assert QuotaTable.parse(files["quotas.toml"]) == QuotaTable()


class Release:
    """The pods of a rendered release as processes of this machine, each with the variables of its container."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder, self.manifests = folder, manifests
        secret = find(manifests, "Secret", "deck-secrets")["data"]
        self.secret = {key: base64.b64decode(value).decode() for key, value in secret.items()}
        self.ports = {"store": find_port(), "queue": find_port()}
        self.processes: list[subprocess.Popen[bytes]] = []
        programs = folder / "programs"
        programs.mkdir()
        (programs / "valkey-server").symlink_to(valkey_program())
        for name in ("serve-valkey", "store.acl", "queue.acl"):
            shutil.copy(DEPLOY / name, programs)
        self.path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"

    def container(self, component: str) -> Manifest:
        (found,) = (template for name, template in pods(self.manifests) if name == component)
        container: Manifest = found["spec"]["containers"][0]
        return container

    def environment(self, component: str) -> dict[str, str]:
        found = {"PATH": self.path, "LLM_SCRIPTS_DIR": str(self.folder)}
        for env in self.container(component)["env"]:
            source = env.get("valueFrom", {})
            value = env.get("value", "")
            if "secretKeyRef" in source:
                value = self.secret.get(source["secretKeyRef"]["key"], "")
            elif "fieldRef" in source:
                value = f"deck-{component}-0"
            value = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
            for part, port in self.ports.items():
                value = value.replace(f"deck-{part}:6379", f"127.0.0.1:{port}")
            value = value.replace("127.0.0.1:6379", f"127.0.0.1:{self.ports.get(component)}")
            if value.startswith("/etc/deckhands"):
                continue  # empty files of the operator
            value = re.sub("^(/tmp|/var/lib)/deckhands", str(self.folder / component), value)
            found[env["name"]] = value
        return found

    def start(self, component: str, **more: str) -> None:
        folder = self.folder / component
        folder.mkdir()
        with (folder / "log.txt").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    self.container(component)["command"],
                    env={**self.environment(component), **more},
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                )
            )

    def run(self, component: str, *command: str) -> str:
        done = subprocess.run(
            command or self.container(component)["command"],
            check=False,
            env=self.environment(component),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=unhurried(90),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def is_ready(self, component: str) -> bool:
        """Return whether the readiness probe of a pod succeeds."""
        command = self.container(component)["readinessProbe"]["exec"]["command"]
        environment = self.environment(component)
        return subprocess.run(command, check=False, env=environment, capture_output=True).returncode == 0

    def end(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait()


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    found = Release(tmp_path, render([]))
    try:
        yield found
    finally:
        found.end()


async def test_variables_of_the_pods_make_a_working_cluster(release: Release) -> None:
    script = release.folder / "finish.json"
    script.write_text(json.dumps({"turns": [{"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}]}))
    for part in ("store", "queue"):
        release.start(part, PORT=str(release.ports[part]))
        await until(lambda part=part: release.is_ready(part), limit=60.0, what=part)
    release.run("setup")
    release.start("controller")
    release.start("tools")
    identity = release.run("cli", "deckhands", "submit", "-t", "say so", "--model", f"scripted/{script}").strip()
    release.run("cli", "deckhands", "wait", identity, "--timeout", "60")
    assert "done" in release.run("cli", "deckhands", "show", identity)
