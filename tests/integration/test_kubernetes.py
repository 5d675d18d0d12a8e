"""Pods as workspaces, by an API server that checks each request and runs pods as confined processes."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

from broker.contract import WorkspaceSpec
from broker.tools import McpServerSpec
from deckhands.operations.diagnosis.diagnostics import find_limit
from tests.integration.test_chart import find, render
from tests.integration.test_docker import FETCH, GATE, site
from tests.integration.workspace_hosts import Gate, Terminal, answer, client, opened
from tests.kubernetes_api import (
    ALL_RIGHTS,
    CLAIM,
    DROPPED,
    IMAGE,
    MISSING_IMAGE,
    NAMESPACE,
    NODE,
    TOKEN,
    WORKER,
    FakeCluster,
    Refused,
    running_cluster,
)
from tests.polling import until
from tool_worker.errors import SandboxUnavailable, SandboxUnsafe, WorkspaceRefused, WorkspaceUnavailable
from tool_worker.sandbox import Enclosure, KubernetesSandbox, find_sandbox, run_self_test
from tool_worker.sandbox.containers import ClusterAccess
from tool_worker.sandbox.kubernetes.__main__ import Entrance, _Stream, start
from tool_worker.sandbox.kubernetes.api import Api, ApiRefusal
from tool_worker.sandbox.kubernetes.pods import LABEL, read_template
from tool_worker.settings import load_tool_settings
from tool_worker.tools.mcp.launch import SandboxedLaunch
from tool_worker.worker.examination import examine
from tool_worker.worker.placement import build_node_offer
from tool_worker.workspace.launch.start_slots import STARTS_AT_ONCE, StartSlots
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.workspaces import Workspaces


@pytest.fixture
def cluster(tmp_path: Path, copies_of_code: Path) -> Iterator[FakeCluster]:
    with running_cluster(tmp_path / "cluster", tmp_path / "volume") as found:
        files = found.volume / "node" / ".sandbox"
        shutil.copytree(copies_of_code, files)
        yield found
        for code in files.glob("code-*"):
            if not (copies_of_code / code.name).exists():
                shutil.copytree(code, copies_of_code / code.name)


@pytest.fixture(scope="module")
def copies_of_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copies of the host's code that earlier tests made on their volumes: compiling it costs more than a test."""
    return tmp_path_factory.mktemp("code")


@asynccontextmanager
async def start_workspaces(cluster: FakeCluster, **settings: Any) -> AsyncIterator[Workspaces]:
    settings = {"containers": cluster.settings(), **settings}
    async with opened(cluster.volume / "node", sandbox="kubernetes", **settings) as workspaces:
        yield workspaces
    assert cluster.sandboxes() == []


def sandbox_of(cluster: FakeCluster, **settings: Any) -> KubernetesSandbox:
    files = cluster.volume / "node" / ".sandbox"
    files.mkdir(parents=True, exist_ok=True)
    return KubernetesSandbox(files, cluster.settings(**settings))


def names(cluster: FakeCluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.sandboxes()]


async def test_pod_is_closed_and_belongs_to_its_conversation(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster) as workspaces:
        run = Terminal(await workspaces.open("closed"))
        knock = "import socket; socket.socket(socket.AF_UNIX).connect('/run/deckhands/entrance/socket')"
        found = await run(
            "id -u; grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status; touch /usr/x 2>&1 | grep -c Read-only; "
            "cat /proc/1/environ 2>&1; env | grep -c KUBERNETES; ls /var/run/secrets 2>&1 | grep -c serviceaccount; "
            f'tail -n +3 /proc/net/dev | grep -vc lo:; python3 -c "{knock}" 2>&1 | tail -1 | cut -d: -f1'
        )
        zero = "0" * 16
        assert found.content.splitlines() == [
            str(os.getuid() or 1000),
            f"CapEff:\t{zero}",
            f"CapBnd:\t{zero}",
            "NoNewPrivs:\t1",
            "1",
            "cat: /proc/1/environ: Permission denied",
            "0",
            "0",
            "0",
            "FileNotFoundError",
        ]
        assert (await run("cd / && touch /tmp/x ~/x /workspace/x && ls /workspace")).content == "x"
        (pod,) = cluster.sandboxes()
        assert pod["metadata"]["labels"][f"{LABEL}/conversation"] == "closed"
        assert pod["metadata"]["labels"][f"{LABEL}/network"] == "none"
        (owner,) = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], "controller" in owner) == ("StatefulSet", "deck-tools", False)
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["tolerations"] == [{"key": "agents", "operator": "Exists"}]


async def test_command_continues_in_its_pod_after_a_kill(cluster: FakeCluster) -> None:
    root = cluster.volume / "node"
    async with start_workspaces(cluster) as workspaces:
        await workspaces.open("survivor")
        gates = {name: Gate(root / "survivor" / "workspace", name) for name in ("started", "held")}
        for name in gates:
            (root / "survivor" / "workspace" / name).chmod(0o666)
        command = "echo begun >> trace; echo x > started; read x < held; cat trace"
        variables = cluster.environment()
        worker = client(root, "kubernetes", "survivor", 7, command, variables=variables)
        await gates["started"].wait()
        (before,) = cluster.sandboxes()
        os.killpg(worker.pid, signal.SIGKILL)
        await asyncio.to_thread(worker.communicate)
        gates["held"].open()
        again = client(root, "kubernetes", "survivor", 7, "not run again", variables=variables)
        assert (await answer(again))["content"] == "begun"
        assert [pod["metadata"]["uid"] for pod in cluster.sandboxes()] == [before["metadata"]["uid"]]


async def test_killed_pod_leaves_an_unknown_outcome(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster) as workspaces:
        workspace = await workspaces.open("killed")
        started = Gate(cluster.volume / "node" / "killed" / "workspace", "started")
        (cluster.volume / "node" / "killed" / "workspace" / "started").chmod(0o666)
        running = asyncio.create_task(workspace.run(1, "bash", {"command": "echo x > started; sleep 1000"}))
        await started.wait()
        (before,) = cluster.sandboxes()
        cluster.kill(before["metadata"]["name"])
        assert (await running).is_unknown
        assert (await workspace.run(2, "bash", {"command": "echo a new one"})).value["content"] == "a new one"
        (after,) = cluster.sandboxes()
        assert after["metadata"]["name"] == before["metadata"]["name"]
        assert after["metadata"]["uid"] != before["metadata"]["uid"]


def test_self_test_and_doctor_know_it(cluster: FakeCluster) -> None:
    files = cluster.volume / "node"
    report = run_self_test(sandbox_of(cluster), files)
    assert (report.sandbox, report.escapes, len(report.results)) == ("kubernetes", (), 9)
    found = {finding.name: finding for finding in examine("kubernetes", cluster.settings(), files)}
    assert (found["sandbox kubernetes"].is_good, found["sandbox kubernetes"].is_needed) == (True, True)
    assert "sandbox kubernetes" not in {finding.name for finding in examine("bwrap", cluster.settings(), files)}
    assert cluster.sandboxes() == []
    environment = {**cluster.environment(), "DECKHANDS_NODE_DIR": str(files)}
    offer = build_node_offer(load_tool_settings(environment))
    assert "kubernetes" in offer.sandboxes
    assert offer.images == (IMAGE,)


@pytest.mark.parametrize("pending", ["", "900"])
def test_doctor_waits_longer_than_the_start_of_a_pod(cluster: FakeCluster, pending: str) -> None:
    given = {"DECKHANDS_KUBERNETES_PENDING_SECONDS": pending} if pending else {}
    environment = {**cluster.environment(), **given}
    sandbox = KubernetesSandbox(cluster.volume, load_tool_settings(environment).containers)
    assert find_limit(environment) > sandbox.capabilities.start_limit_seconds > find_limit({})


async def test_sandbox_without_network_policies_is_refused(cluster: FakeCluster) -> None:
    cluster.enforces_network = False
    async with start_workspaces(cluster) as workspaces:
        with pytest.raises(SandboxUnsafe, match=r"connect_to_machine \(127\.0\.0\.1:"):
            await workspaces.open("reaching")


async def test_worker_needs_only_the_documented_rights(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster) as workspaces:
        await workspaces.open("least")
        assert sorted(set(cluster.requests)) == [
            *(("create", "pods"), ("delete", "pods"), ("get", "pods"), ("get", "pods/exec"), ("list", "pods"))
        ]


# What the chart allows

PODS = ["tools.sandbox=kubernetes", "tools.kubernetes.images[0]=a", "tools.kubernetes.apiServerCidrs[0]=10.0.0.1/32"]
OWN = "its own sandboxes only"
LABELS, ACCOUNT, PLACED = "the labels of one", "no account and nothing of its machine", "the scheduler places a sandbox"
RESTRICTED, PORTS = "a restricted container without variables", "no ports, and the kubelet connects to nothing"
VOLUME, PARTS = "the volume of its tool worker only", "parts of the volume only"
CREDENTIALS = {"httpGet": {"host": "169.254.169.254", "port": 80, "path": "/latest/meta-data"}}
CONTAINER_AT = "spec.containers.0"
EVIL: dict[str, tuple[str, dict[str, Any]]] = {
    "another name": (OWN, {"metadata.name": "deck-controller-0"}),
    "the name of a sandbox of another worker": (OWN, {"metadata.name": "deckhands-sandbox-node-deck-tools-1-a"}),
    "the name of a sandbox of a worker with a longer name": (
        OWN,
        {"metadata.name": "deckhands-sandbox-node-deck-tools-01-a"},
    ),
    "labels of a role": (LABELS, {"metadata.labels": {"app.kubernetes.io/component": "controller"}}),
    "a part of the release": (LABELS, {"metadata.labels.app.kubernetes.io/instance": "deck"}),
    "a secret": (VOLUME, {"spec.volumes": [{"name": "node", "secret": {"secretName": "deck-secrets"}}]}),
    "a claim of the store": (VOLUME, {"spec.volumes.0.persistentVolumeClaim.claimName": "data-deck-store-0"}),
    "the claim of another worker": (VOLUME, {"spec.volumes.0.persistentVolumeClaim.claimName": "node-deck-tools-1"}),
    "a whole volume": (PARTS, {f"{CONTAINER_AT}.volumeMounts": [{"name": "node", "mountPath": "/all"}]}),
    "a part chosen later": (
        PARTS,
        {f"{CONTAINER_AT}.volumeMounts": [{"name": "node", "mountPath": "/all", "subPathExpr": "x"}]},
    ),
    "variables of a secret": (RESTRICTED, {f"{CONTAINER_AT}.envFrom": [{"secretRef": {"name": "deck-secrets"}}]}),
    "capabilities": (RESTRICTED, {f"{CONTAINER_AT}.securityContext.capabilities": {}}),
    "some capabilities": (RESTRICTED, {f"{CONTAINER_AT}.securityContext.capabilities.drop": ["NET_RAW"]}),
    "a second container": (RESTRICTED, {"spec.initContainers": [{"name": "x", "image": "x"}]}),
    "a port of the machine": (PORTS, {f"{CONTAINER_AT}.ports": [{"containerPort": 80, "hostPort": 80}]}),
    "a liveness probe": (PORTS, {f"{CONTAINER_AT}.livenessProbe": CREDENTIALS}),
    "a readiness probe": (PORTS, {f"{CONTAINER_AT}.readinessProbe": CREDENTIALS}),
    "a startup probe": (PORTS, {f"{CONTAINER_AT}.startupProbe": CREDENTIALS}),
    "a hook of its life": (PORTS, {f"{CONTAINER_AT}.lifecycle": {"postStart": CREDENTIALS}}),
    "an account": (ACCOUNT, {"spec.serviceAccountName": "deck-tools"}),
    "a token": (ACCOUNT, {"spec.automountServiceAccountToken": True}),
    "the network of the machine": (ACCOUNT, {"spec.hostNetwork": True}),
    "a machine without the scheduler": (PLACED, {"spec.nodeName": "machine-2"}),
    "a priority": (PLACED, {"spec.priorityClassName": "system-node-critical"}),
}


@pytest.fixture
def guarded(cluster: FakeCluster) -> FakeCluster:
    """A cluster with the role and the policy of the chart."""
    manifests = render(PODS)
    (policy,) = (each for each in manifests if each["kind"] == "ValidatingAdmissionPolicy")
    cluster.rights, cluster.policies = tuple(find(manifests, "Role", "deck-tools")["rules"]), (policy,)
    return cluster


def test_role_and_policy_of_the_chart_suffice(guarded: FakeCluster) -> None:
    files = guarded.volume / "node"
    assert run_self_test(sandbox_of(guarded), files).escapes == ()
    assert guarded.sandboxes() == []


@pytest.mark.parametrize("case", sorted(EVIL))
def test_policy_keeps_a_worker_from_other_pods(guarded: FakeCluster, case: str) -> None:
    guarded.enforces_security = False
    pod = make_abandoned_pod(guarded)
    message, changes = EVIL[case]
    for path, value in changes.items():
        inner: Any = pod
        *above, field = path.replace("app.kubernetes.io/", "app@").split(".")
        for key in above:
            inner = inner[int(key)] if key.isdecimal() else inner[key]
        inner[field.replace("app@", "app.kubernetes.io/")] = value
    with (
        Api(ClusterAccess(config=str(guarded.config))) as api,
        pytest.raises(SandboxUnavailable, match=f"ValidatingAdmissionPolicy denied: .*{message}"),
    ):
        api.create_pod(pod)
    assert guarded.sandboxes() == []


@pytest.mark.parametrize("caller", ["deck-tools-1", "deck-tools", ""])
async def test_policy_keeps_a_worker_from_sandboxes_of_others(guarded: FakeCluster, caller: str) -> None:
    pod = make_abandoned_pod(guarded)
    name = pod["metadata"]["name"]
    with Api(ClusterAccess(config=str(guarded.config))) as api:
        made = api.create_pod(pod)
        guarded.caller = caller
        for act in (
            lambda: api.delete_pod(name, made["metadata"]["uid"]),
            lambda: api.delete_pod(WORKER, "worker-0"),
            lambda: api.create_pod(pod),
        ):
            with pytest.raises(SandboxUnavailable, match=f"ValidatingAdmissionPolicy denied: .*{OWN}"):
                act()
        with pytest.raises(SandboxUnavailable, match="status 403"):
            await _Stream(api, name, b"").serve()
    assert names(guarded) == [name]


def test_policy_allows_the_priority_of_the_template(guarded: FakeCluster) -> None:
    values = [*PODS, "tools.kubernetes.template=spec: {priorityClassName: low}"]
    (policy,) = (each for each in render(values) if each["kind"] == "ValidatingAdmissionPolicy")
    guarded.policies = (policy,)
    pod = make_abandoned_pod(guarded)
    pod["spec"]["priorityClassName"] = "low"
    with Api(ClusterAccess(config=str(guarded.config))) as api:
        assert api.create_pod(pod)["spec"]["priorityClassName"] == "low"


# What may go wrong


@pytest.mark.parametrize("fault", [429, 500, 503, DROPPED])
async def test_busy_api_server_delays_a_pod_only(cluster: FakeCluster, fault: int) -> None:
    async with start_workspaces(cluster) as workspaces:
        await workspaces.open("first")
        cluster.injected += [("create", fault), ("list", fault)] + [("get", fault)] * 5
        assert (await Terminal(await workspaces.open("second"))("echo served")).content == "served"
        assert cluster.injected == []


def test_api_server_that_stays_busy_is_named(cluster: FakeCluster) -> None:
    cluster.injected += [("get", 503)] * 1_000
    with Api(ClusterAccess(config=str(cluster.config)), 0.5) as api, pytest.raises(ApiRefusal, match=r"\(503\)"):
        api.get_pod(WORKER)
    assert len(cluster.injected) < 999


def plan_of_a_host(cluster: FakeCluster, entrance: Path) -> dict[str, Any]:
    labels = {"root": "/r", "conversation": "c", "host": "4" * 32}
    enclosure = replace(_enclosure(cluster, labels), entrance=entrance)
    (plan,) = sandbox_of(cluster, pending_seconds=1.0).options(enclosure)
    return dict(json.loads(plan))


def test_pod_of_the_next_start_survives_a_late_starter(cluster: FakeCluster) -> None:
    entrance = cluster.volume / "node" / "entrance" / "socket"
    entrance.parent.mkdir(parents=True)
    plan = plan_of_a_host(cluster, entrance)
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        entrance.touch()
        mine = Entrance(entrance)
        entrance.unlink()
        assert mine.is_gone
        entrance.touch()
        again = copy.deepcopy(plan)
        again["pod"]["spec"]["containers"][0]["command"] = ["sleep", "1000"]
        living = api.create_pod(again["pod"])
        with pytest.raises(SandboxUnavailable, match="was given up"):
            start(api, plan, ["sleep", "1000"], mine)
    assert [pod["metadata"]["uid"] for pod in cluster.sandboxes()] == [living["metadata"]["uid"]]


@pytest.mark.parametrize("is_taken", [True, False])
def test_fault_after_the_handover_keeps_the_pod(cluster: FakeCluster, is_taken: bool) -> None:
    entrance = cluster.volume / "node" / "entrance" / "socket"
    entrance.parent.mkdir(parents=True)
    entrance.touch()
    look = cluster._look

    def fail(name: str) -> dict[str, Any]:
        if name == WORKER:
            return look(name)
        if is_taken:
            entrance.unlink()
        raise Refused(403, "Forbidden", "not now")

    plan = plan_of_a_host(cluster, entrance)
    cluster._look = fail  # type: ignore[method-assign]
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        if is_taken:
            assert start(api, plan, ["sleep", "1000"], Entrance(entrance))["metadata"]["name"] in names(cluster)
        else:
            with pytest.raises(SandboxUnavailable, match="not now"):
                start(api, plan, ["sleep", "1000"], Entrance(entrance))
            assert names(cluster) == []


def test_removal_waits_until_the_processes_have_ended(cluster: FakeCluster) -> None:
    pod = make_abandoned_pod(cluster, root="/r", conversation="c", host="4" * 32)
    name = pod["metadata"]["name"]
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        api.create_pod(pod)
        while "running" not in str(api.get_pod(name)):
            pass
    assert name in cluster.containers
    sandbox_of(cluster).kill_stragglers("4" * 32)
    assert name not in cluster.containers


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rights": ()}, r"cannot get resource \"pods\".*Give the service account the rights"),
        ({"rights": ({**ALL_RIGHTS[0], "verbs": ["get", "list", "delete"]},)}, r"cannot create resource \"pods\""),
        ({"rights": ALL_RIGHTS[:1]}, "Kubernetes runs no program in the pod: status 403.*pods/exec"),
        ({"quota": 0}, "exceeded quota: pods.*Raise the quota"),
        ({"has_room": False}, r"did not start within 1 s: Unschedulable: 0/1 nodes .*Insufficient memory"),
    ],
)
async def test_pod_that_cannot_start_is_explained(cluster: FakeCluster, change: dict[str, Any], reason: str) -> None:
    for name, value in change.items():
        setattr(cluster, name, value)
    workspaces = Workspaces(
        cluster.volume / "node", sandbox="kubernetes", containers=cluster.settings(pending_seconds=1.0)
    )
    with pytest.raises(SandboxUnavailable) as refused:
        await workspaces.open("first")
    assert re.search(reason, f"{refused.value} {refused.value.remedy}".replace("\n", " ")), refused.value
    assert cluster.sandboxes() == []


async def test_image_that_cannot_be_pulled_is_named(cluster: FakeCluster) -> None:
    cluster.pull_message = "manifest unknown\x1b[2J\nforged: line" + "x" * 5_000
    async with start_workspaces(cluster, containers=cluster.settings(pending_seconds=10.0)) as workspaces:
        spec = WorkspaceSpec(sandbox="kubernetes", image=MISSING_IMAGE)
        with pytest.raises(WorkspaceUnavailable) as refused:
            await workspaces.open("missing", spec)
        text = str(refused.value)
        assert "ImagePullBackOff: manifest unknown" in text
        assert "\x1b" not in text
        assert "\nforged" not in text
        assert len(text) < 2_000
        with pytest.raises(WorkspaceRefused, match="no container of the image 'other/image'"):
            await workspaces.open("other", WorkspaceSpec(sandbox="kubernetes", image="other/image"))


async def test_image_that_is_pulled_late_is_waited_for(cluster: FakeCluster) -> None:
    cluster.failing_pulls = 2
    async with start_workspaces(cluster) as workspaces:
        run = Terminal(await workspaces.open("late", WorkspaceSpec(sandbox="kubernetes", image=MISSING_IMAGE)))
        assert (await run("echo pulled")).content == "pulled"
        assert cluster.failing_pulls == 0


async def test_pod_starts_while_all_slots_of_the_node_are_held(cluster: FakeCluster) -> None:
    slots = StartSlots(cluster.volume / "node")
    async with start_workspaces(cluster) as workspaces, AsyncExitStack() as held:
        for _ in range(STARTS_AT_ONCE):
            await held.enter_async_context(slots.hold())
        workspace = await workspaces.open("conversation")
        assert (await workspace.run(1, "bash", {"command": "echo on"})).value["content"] == "on"


async def test_directory_outside_the_volume_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    os.chown(project, os.getuid() or 4321, -1)
    async with start_workspaces(cluster, named=NamedDirectories([project])) as workspaces:
        with pytest.raises(WorkspaceRefused, match=f"is not on the volume {CLAIM}"):
            await workspaces.open("outside", WorkspaceSpec(path=str(project)))


def change_config(cluster: FakeCluster, **user: object) -> None:
    config = yaml.safe_load(cluster.config.read_text())
    config["users"][0]["user"] = user
    cluster.config.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no images", "no image is named"),
        ("no account", "runs in no pod with a service account"),
        ("no file", "is no usable kubeconfig: FileNotFoundError"),
        ("a list", "is no usable kubeconfig: AttributeError"),
        ("a program", "is found by a program"),
        ("wrong token", r"Kubernetes refuses: Unauthorized \(401\)"),
        ("no server", "The API server https://127.0.0.1:1 does not answer"),
        ("no pod", f"the namespace {NAMESPACE} has no pod {WORKER}"),
        ("no volume", "is on no volume that pods can share"),
        ("template", "may have only `metadata` and `spec`"),
    ],
)
def test_unusable_configuration_is_explained(cluster: FakeCluster, tmp_path: Path, case: str, reason: str) -> None:
    settings = cluster.settings(pending_seconds=0.5)
    if case == "no account":
        settings = load_tool_settings({"DECKHANDS_DOCKER_IMAGES": IMAGE}).containers
    elif case == "no images":
        settings = load_tool_settings({}).containers
    elif case == "no file":
        cluster.config.unlink()
    elif case == "a list":
        cluster.config.write_text("[1, 2]")
    elif case == "a program":
        change_config(cluster, exec={"command": "/bin/sh"})
    elif case == "wrong token":
        change_config(cluster, token="another")
    elif case == "no server":
        cluster.config.write_text(cluster.config.read_text().replace(cluster.url, "https://127.0.0.1:1"))
    elif case == "no pod":
        del cluster.pods[WORKER]
    elif case == "no volume":
        cluster.pods[WORKER]["spec"]["volumes"] = [{"name": "node", "emptyDir": {}}]
    else:
        template = tmp_path / "template.yaml"
        template.write_text(yaml.safe_dump({"spec": {"volumes": [{"name": "all", "hostPath": {"path": "/"}}]}}))
        settings = cluster.settings(template=str(template))
    with pytest.raises(SandboxUnavailable, match=reason):
        find_sandbox("kubernetes", cluster.volume / "node", settings)
    assert find_sandbox("auto", tmp_path / "files", settings).name != "kubernetes"


def test_account_of_a_pod_is_used_and_its_token_reread(cluster: FakeCluster, tmp_path: Path) -> None:
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("expired")
    (account / "namespace").write_text(NAMESPACE)
    (account / "ca.crt").write_bytes(cluster.certificate.read_bytes())
    settings = load_tool_settings({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert settings.containers.kubernetes.access.address == "https://[fd00::1]:6443"
    with Api(ClusterAccess(address=cluster.url, account=str(account))) as api:
        with pytest.raises(SandboxUnavailable, match="Unauthorized"):
            api.get_pod(WORKER)
        (account / "token").write_text(f"{TOKEN}\n")
        assert api.get_pod(WORKER) is not None
        assert api.get_pod("absent") is None


# What is left over


def make_abandoned_pod(cluster: FakeCluster, **labels: str) -> dict[str, Any]:
    """Return the description of a pod as an earlier worker of this node made it."""
    made = sandbox_of(cluster)._make_pod(_enclosure(cluster, labels))
    made["spec"]["containers"][0]["command"] = ["sleep", "1000"]
    return made


def _enclosure(cluster: FakeCluster, labels: dict[str, str]) -> Enclosure:
    workspace = cluster.volume / "node" / "left"
    workspace.mkdir(parents=True, exist_ok=True)
    return Enclosure(workspace, "/workspace", is_own=True, labels=labels)


async def test_pods_of_dead_workers_are_removed(cluster: FakeCluster) -> None:
    root = str(cluster.volume / "node")
    ours = make_abandoned_pod(cluster, root=root, conversation="forgotten", host="1" * 32)
    program = make_abandoned_pod(cluster)
    theirs = make_abandoned_pod(cluster, root="/elsewhere", conversation="theirs", host="2" * 32)
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        for pod in (ours, program, theirs):
            api.create_pod(pod)
    async with opened(cluster.volume / "node", sandbox="kubernetes", containers=cluster.settings()) as workspaces:
        await workspaces.open("another")
        conversations = {pod["metadata"]["annotations"][f"{LABEL}/conversation"] for pod in cluster.sandboxes()}
        assert conversations == {"theirs", "another"}
    assert names(cluster) == [theirs["metadata"]["name"]]


async def test_living_pod_on_another_machine_is_replaced(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster) as workspaces:
        await workspaces.open("moved")
        (before,) = cluster.sandboxes()
        cluster.pods[WORKER]["spec"]["nodeName"] = before["spec"]["nodeName"] + "-new"
        await workspaces.aclose()
        async with opened(cluster.volume / "node", sandbox="kubernetes", containers=cluster.settings()) as later:
            await later.get_demanded_sandbox()
            assert cluster.sandboxes() == []


async def test_pod_with_a_taken_name_is_replaced(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster) as workspaces:
        await workspaces.open("taken")
        (ours,) = cluster.sandboxes()
        await workspaces.close("taken")
        forged = make_abandoned_pod(cluster, root="/elsewhere", conversation="x", host="3" * 32)
        forged["metadata"]["name"] = ours["metadata"]["name"]
        with Api(ClusterAccess(config=str(cluster.config))) as api:
            uid = api.create_pod(forged)["metadata"]["uid"]
        run = Terminal(await workspaces.open("taken"))
        assert (await run("echo ours")).content == "ours"
        (pod,) = cluster.sandboxes()
        assert (pod["metadata"]["uid"] != uid, pod["metadata"]["name"]) == (True, forged["metadata"]["name"])


def test_examination_keeps_living_programs_and_removes_abandoned_ones(cluster: FakeCluster) -> None:
    launch = SandboxedLaunch("kubernetes", cluster.volume / "node", containers=cluster.settings())
    started = launch(McpServerSpec(name="lives", command="sh", args=("-c", "echo up; cat")))
    with subprocess.Popen(
        started.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=started.environment
    ) as run:
        assert run.stdout is not None
        assert run.stdin is not None
        assert run.stdout.readline() == b"up\n"
        (living,) = names(cluster)
        abandoned = make_abandoned_pod(cluster)
        with Api(ClusterAccess(config=str(cluster.config))) as api:
            api.create_pod(abandoned)
        found = {each.name: each for each in examine("kubernetes", cluster.settings(), cluster.volume / "node")}
        assert found["sandbox kubernetes"].is_good
        assert names(cluster) == [living]
        run.stdin.close()
        assert run.wait() == 0
    assert names(cluster) == []


def test_program_with_locks_elsewhere_is_left_alone(cluster: FakeCluster) -> None:
    theirs = make_abandoned_pod(cluster)
    files = cluster.volume / "other" / ".sandbox"
    files.mkdir(parents=True)
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        api.create_pod(theirs)
        KubernetesSandbox(files, cluster.settings()).remove_dead(files.parent, lambda _: False)
        assert names(cluster) == [theirs["metadata"]["name"]]
        sandbox_of(cluster).remove_dead(cluster.volume / "node", lambda _: False)
    assert names(cluster) == []


def test_pod_of_a_killed_program_is_removed_by_the_next(cluster: FakeCluster) -> None:
    launch = SandboxedLaunch("kubernetes", cluster.volume / "node", containers=cluster.settings())
    spec = McpServerSpec(name="waits", command="sh", args=("-c", "trap '' HUP; echo up; sleep 1000"))
    started = launch(spec)
    with subprocess.Popen(
        started.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=started.environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        (left,) = names(cluster)
        run.kill()
    again = launch(McpServerSpec(name="ends", command="sh", args=("-c", "echo done")))
    assert subprocess.run(again.command, env=again.environment, capture_output=True, check=True).stdout == b"done\n"
    assert left not in names(cluster)
    assert names(cluster) == []


# Programs by exec


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
def test_program_has_its_streams_and_variables(cluster: FakeCluster, protocol: str) -> None:
    cluster.protocols = (protocol,)
    launch = SandboxedLaunch("kubernetes", cluster.volume / "node", containers=cluster.settings())
    ends = "cat" if protocol.startswith("v5") else "true"
    script = f"read x; echo $x $KEY; id -u; {ends}; echo wrong >&2; exit 7"
    started = launch(McpServerSpec(name="printer", command="sh", args=("-c", script), env={"KEY": "its secret"}))
    assert "its secret" not in " ".join(started.command)
    pods: list[str] = []
    create = cluster._create

    async def keep(pod: dict[str, Any]) -> dict[str, Any]:
        pods.append(json.dumps(pod))
        return await create(pod)

    cluster._create = keep  # type: ignore[method-assign]
    done = subprocess.run(
        started.command, env=started.environment, input=b"hello\n" + b"more", capture_output=True, check=False
    )
    assert done.stdout.decode().split("\n")[:2] == ["hello its secret", str(os.getuid() or 1000)]
    assert done.stdout.endswith(b"more" if ends == "cat" else b"\n")
    assert (done.stderr, done.returncode) == (b"wrong\n", 7)
    assert len(pods) == 1
    assert "its secret" not in pods[0]
    assert cluster.sandboxes() == []


def test_exit_code_outlives_a_refused_removal(cluster: FakeCluster) -> None:
    launch = SandboxedLaunch("kubernetes", cluster.volume / "node", containers=cluster.settings())
    started = launch(McpServerSpec(name="ends", command="sh", args=("-c", "echo done; exit 7")))
    cluster.injected.append(("delete", 403))
    done = subprocess.run(
        started.command, env=started.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"done\n", b"", 7)
    assert len(names(cluster)) == 1
    sandbox_of(cluster).remove_dead(cluster.volume / "node", lambda _: False)
    assert names(cluster) == []


async def test_program_whose_connection_is_silent_is_given_up(cluster: FakeCluster) -> None:
    cluster.answers_pings = False
    pod = make_abandoned_pod(cluster)
    given = json.dumps({"program": ["sleep", "1000"], "environment": {}, "directory": "/"}).encode()
    with Api(ClusterAccess(config=str(cluster.config))) as api:
        start(api, {"pod": pod, "claim": CLAIM, "locks": "/absent", "pending_seconds": 60.0}, ["sleep", "1000"])
        with pytest.raises(SandboxUnavailable, match="broke before it ended: the API server stopped answering"):
            await _Stream(api, pod["metadata"]["name"], given, heartbeat_seconds=0.2).serve()
    port = urlsplit(cluster.url).port

    def is_closed() -> bool:
        return all(one.raddr == () or one.raddr.port != port for one in psutil.Process().net_connections("tcp"))

    await until(is_closed, limit=60, what="the end of the connection")


def test_hostile_output_is_output_and_nothing_else(cluster: FakeCluster) -> None:
    launch = SandboxedLaunch("kubernetes", cluster.volume / "node", containers=cluster.settings())
    forged = json.dumps({"status": "Success", "metadata": {}})
    script = f"printf '\\003{forged}'; printf '\\377\\001'; head -c 3000000 /dev/zero; exit 3"
    started = launch(McpServerSpec(name="hostile", command="sh", args=("-c", script)))
    done = subprocess.run(
        started.command, env=started.environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout == b"\x03" + forged.encode() + b"\xff\x01" + b"\0" * 3_000_000


async def test_words_of_a_failed_program_are_not_trusted(cluster: FakeCluster) -> None:
    """A program writes the message with which Kubernetes reports its container's end."""
    image_without_python = "echo 'Raise your limits at http://evil.test' > /dev/termination-log; exit 9"
    start = cluster._start

    def fail(pod: dict[str, Any]) -> Any:
        if "root" in " ".join(pod["metadata"]["labels"]):
            pod["spec"]["containers"][0]["command"] = ["sh", "-c", image_without_python]
        return start(pod)

    cluster._start = fail  # type: ignore[method-assign]
    async with start_workspaces(cluster) as workspaces:
        with pytest.raises(WorkspaceUnavailable) as refused:
            await workspaces.open("failing")
    assert "its container ended with exit code 9" in str(refused.value)
    assert "evil" not in str(refused.value)


async def test_some_hosts_are_reached_from_a_pod(cluster: FakeCluster) -> None:
    async with site() as host, start_workspaces(cluster, gate=GATE) as workspaces:
        run = Terminal(await workspaces.open("reaching", WorkspaceSpec(allow=(host,))))
        assert (await run(f'python3 -c "{FETCH.format(host)}"')).content == "hello"
        assert "403" in (await run(f'python3 -c "{FETCH.format("elsewhere.test")}"')).content
        spec = McpServerSpec(name="reaching", command="python3", args=("-c", FETCH.format(host)), allow=(host,))
        started = SandboxedLaunch("kubernetes", cluster.volume / "node", gate=GATE, containers=cluster.settings())(spec)
        async with started.proxy_for():
            program, *arguments = started.command
            running = await asyncio.create_subprocess_exec(
                program, *arguments, env=dict(started.environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            printed, _ = await running.communicate()
        assert printed == b"hello\n"


# The template


def test_template_changes_nothing_that_confines(cluster: FakeCluster, tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(
        yaml.safe_dump(
            {
                "metadata": {"labels": {"team": "a", f"{LABEL}/network": "open"}, "annotations": {"note": "b"}},
                "spec": {
                    "hostNetwork": True,
                    "automountServiceAccountToken": True,
                    "runtimeClassName": "runc-fast",
                    "priorityClassName": "low",
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                    "securityContext": {"runAsUser": 0, "supplementalGroups": [7]},
                    "containers": [{"name": "sandbox", "resources": {"requests": {"ephemeral-storage": "1Gi"}}}],
                },
            }
        )
    )
    (plan,) = sandbox_of(cluster, template=str(template)).options(_enclosure(cluster, {}))
    pod = json.loads(plan)["pod"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][f"{LABEL}/network"] == "none"
    spec = pod["spec"]
    assert (spec["hostNetwork"], spec["automountServiceAccountToken"]) == (False, False)
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("runc-fast", "low")
    assert [each["key"] for each in spec["tolerations"]] == ["agents", "spot"]
    assert spec["securityContext"]["runAsUser"] == (os.getuid() or 1000)
    requests = spec["containers"][0]["resources"]["requests"]
    assert set(requests) == {"cpu", "memory", "ephemeral-storage"}
    term = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term["matchFields"][0]["values"] == [NODE]


@pytest.mark.parametrize(
    "spec",
    [
        {"initContainers": [{"name": "x"}]},
        {"nodeName": "other"},
        {"containers": [{"name": "sandbox"}, {"name": "spy"}]},
        {"containers": [{"name": "other"}]},
        {"containers": [{"name": "sandbox", "securityContext": {"privileged": True}}]},
        {"containers": [{"name": "sandbox", "volumeMounts": []}]},
    ],
)
def test_template_with_further_parts_is_refused(tmp_path: Path, spec: dict[str, Any]) -> None:
    (tmp_path / "template.yaml").write_text(yaml.safe_dump({"spec": spec}))
    with pytest.raises(SandboxUnavailable, match=r"DECKHANDS_KUBERNETES_TEMPLATE: .* may have"):
        read_template(tmp_path / "template.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: PodTemplate\ntemplate: {spec: {priorityClassName: low}}", "move them out of `template`"),
        ("[]", "may have only mappings"),
        ("spec: low", "may have only mappings"),
        ("metadata: [a]", "may have only mappings"),
        ("{", "cannot be read"),
    ],
)
def test_template_that_would_be_ignored_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "template.yaml").write_text(text)
    with pytest.raises(SandboxUnavailable, match=f"DECKHANDS_KUBERNETES_TEMPLATE: .*{reason}"):
        read_template(tmp_path / "template.yaml")


async def test_pod_that_ended_by_itself_is_swept(cluster: FakeCluster) -> None:
    async with start_workspaces(cluster, idle_seconds=0.1) as workspaces:
        workspace = await workspaces.open("idle")
        assert (await workspace.run(1, "bash", {"command": "exit"})).value["metadata"]["exit_code"] == 0
        (name,) = names(cluster)
        await until(lambda: cluster.containers[name].outer.poll() is not None)
        await workspaces.open("busy")
        assert name not in names(cluster)
