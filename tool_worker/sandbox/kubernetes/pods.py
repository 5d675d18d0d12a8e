"""The sandbox `kubernetes`: one pod per workspace, on the node and the volume of the tool worker's own pod.

A pod gets the parts of the volume that its workspace needs, by `subPath`. Its host fetches its descriptors through a
socket on the volume, as in the docker sandbox, and is then reached through another one: both pods have the same kernel.
So a host needs no request to the API server after its start, and a new tool worker finds it as it was. Other programs,
such as a clone or the program of an MCP server, run through `exec` in a pod of their own (see `__main__`).

    <files>/code-<digest>/    the code of workspace hosts, mounted read-only
    <files>/pods/<pod>        a lock, held while the program of a pod is served

Holds:
    - A pod meets the Pod Security Standard `restricted`: it has no capability, no way to gain one, a read-only root,
      and no token of a service account. It runs as the owner of its workspace. A template of the operator changes none
      of this.
    - Its label `deckhands/network` is `none` unless the conversation was given the network; network policies of the
      cluster act on it. The self-test tries to reach the API server from such a pod.
    - Its name is derived from the volume and its host, so that a host has one pod. Labels name its node and its
      conversation. Through them it is found, and removed when its host is gone. It belongs to the owner of the tool
      worker's pod, and Kubernetes removes it with that.
Does not: bound the number of processes, which is a setting of the kubelet (`podPidsLimit`). Does not protect against
users who can create or change pods in its namespace.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from broker.runtime import SYSTEM_CLOCK
from tool_worker.errors import SandboxUnavailable, WorkspaceRefused
from tool_worker.sandbox.containers import (
    CODE_ROOT,
    HOME,
    HOST_NAME,
    ContainerSettings,
    change_owner,
    find_owner,
)
from tool_worker.sandbox.sandbox import (
    HOST_CODE,
    PACKAGE_ROOT,
    Capabilities,
    Enclosure,
    HostDescriptors,
    find_interpreter,
    make_agent_environment,
)

if TYPE_CHECKING:
    from tool_worker.sandbox.kubernetes.api import Api, Manifest

NAME_PREFIX = "deckhands-sandbox-"
LABEL = "deckhands"
CONTAINER = "sandbox"
ENTRANCE = f"{CODE_ROOT}/entrance"
"""The directory in a pod with the socket of the same name as at its source."""
POD_PROGRAM = f"{CODE_ROOT}/tool_worker/host/pod_program.py"
END_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.2
HANDOVER_SECONDS = 60.0
REQUESTS = {"cpu": "10m", "memory": "64Mi"}
MAX_LABEL_CHARS = 63
MAX_CLAIM_CHARS = 100
"""In a pod's name, which the kubelet puts into names of files together with the namespace."""


@dataclass(frozen=True, slots=True)
class OwnPod:
    """What a worker's own pod says about the pods that it may start.

    Attributes:
        node: the machine that it runs on.
        claim: the volume with the worker's files.
        mounted_at, sub_path: where the worker sees which part of the volume.
        owners: what the pods belong to.
        tolerations, pull_secrets, selinux: copied, because the pods must run on its node and share its files.
    """

    node: str
    claim: str
    mounted_at: Path
    sub_path: str
    owners: list[Manifest]
    tolerations: list[Manifest]
    pull_secrets: list[Manifest]
    selinux: Manifest

    def locate(self, path: Path) -> str:
        """Return the part of the volume that the worker sees at a path.

        Raises:
            WorkspaceRefused: the path is not on the volume.
        """
        if not path.is_relative_to(self.mounted_at) or ".." in path.parts:
            raise WorkspaceRefused(
                f"{path} is not on the volume {self.claim}, and a pod can see nothing else.",
                remedy=f"Name a directory below {self.mounted_at}, or leave it out.",
            )
        return "/".join(part for part in (self.sub_path, *path.relative_to(self.mounted_at).parts) if part)


class KubernetesSandbox:
    """Runs programs in pods; a `Sandbox`.

    Args:
        files: Directory, created if missing, on the volume that pods share.
        containers: The operator's settings for containers; its images are those of pods, too.
    """

    name = "kubernetes"
    code_root = CODE_ROOT
    capabilities = Capabilities(confines_programs=True, inherits_descriptors=False, runs_images=True)
    reach = "their own workspace and pod; where a conversation was given the network, what the network policies allow"
    system_call_filter = b""  # the runtime brings its own; the host adds ours (see `host/descriptor_receiver`)

    def __init__(self, files: Path, containers: ContainerSettings) -> None:
        self._files = files.absolute()
        self._containers = containers
        self._settings = containers.kubernetes
        self._found: OwnPod | None = None
        limit_seconds = self._settings.pending_seconds + HANDOVER_SECONDS
        self.capabilities = replace(type(self).capabilities, start_limit_seconds=limit_seconds)

    def reason_unavailable(self) -> str | None:
        """See `Sandbox.reason_unavailable`."""
        if problem := self._containers.find_image_problem():
            return problem
        try:
            self._own_pod()
            self._read_template()
        except (SandboxUnavailable, WorkspaceRefused) as error:
            return str(error)
        return None

    def shell_environment(self, enclosure: Enclosure) -> Mapping[str, str]:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.shell_environment`."""
        return make_agent_environment(HOME)

    def keeps_home(self, enclosure: Enclosure) -> bool:
        """See `Sandbox.keeps_home`. Only the pod's user could write there or remove its files."""
        return os.geteuid() in (0, enclosure.workspace.stat().st_uid)

    def keeps_temporary(self, enclosure: Enclosure) -> bool:  # noqa: ARG002  (the protocol's)
        """See `Sandbox.keeps_temporary`."""
        return True

    def writable(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.writable`."""
        return [enclosure.mount_at, "/tmp", HOME, "/dev"]  # noqa: S108  (inside the pod)

    def forbidden_addresses(self) -> Sequence[str]:
        """See `Sandbox.forbidden_addresses`: the API server, which every pod reaches unless a policy prevents it."""
        with self._open_api() as api:
            server = urlsplit(api.server)
        return [f"{server.hostname}:{server.port or 443}"]

    def options(self, enclosure: Enclosure) -> Sequence[str]:
        """See `Sandbox.options`. They contain no secret: a command line is visible to other processes.

        Raises:
            WorkspaceRefused: the directory is root's or not on the volume, or the image may not be used.
            SandboxUnavailable: the worker's own pod or the template cannot be read.
        """
        plan = {
            "access": asdict(self._settings.access),
            "pending_seconds": self._settings.pending_seconds,
            "pod": merge(self._read_template(), self._make_pod(enclosure)),
            "environment_names": list(enclosure.environment_names),
            "claim": self._own_pod().claim,
            "locks": str(self._files / "pods"),
            "entrance": str(enclosure.entrance or ""),
        }
        return [json.dumps(plan)]

    def command(
        self, program: Sequence[str], options: Sequence[str], descriptors: HostDescriptors | int | None = None
    ) -> Sequence[str]:
        """See `Sandbox.command`."""
        own = ["python3", *program[1:]] if program[0] == find_interpreter() else list(program)
        ours = [sys.executable, "-I", "-m", __package__ or ""]
        if isinstance(descriptors, HostDescriptors):
            arriving = ["python3", "-I", "-S", f"{CODE_ROOT}/tool_worker/host/descriptor_receiver.py"]
            return [*ours, "host", *options, *arriving, f"{ENTRANCE}/socket", *own[1:]]
        return [*ours, "run", *options, *own]

    def kill_stragglers(self, host_id: str) -> None:
        """See `Sandbox.kill_stragglers`."""
        with self._open_api() as api:
            if pod := api.get_pod(make_pod_name(self._own_pod().claim, host_id)):
                remove_pods(api, [pod])

    def remove_dead(self, root: Path, is_alive: Callable[[str], bool]) -> None:
        """See `Sandbox.remove_dead`. A pod on another machine can no longer be reached, and is removed as well."""
        own = self._own_pod()
        with self._open_api() as api:
            sweep(api, own.claim, self._files / "pods")
            dead = [
                pod
                for pod in api.list_pods({f"{LABEL}/root": _hash(own.claim, str(root))})
                if pod.get("spec", {}).get("nodeName", own.node) != own.node
                or not is_alive(pod["metadata"].get("annotations", {}).get(f"{LABEL}/conversation", ""))
            ]
            remove_pods(api, dead)

    def _open_api(self) -> Api:
        # Late: the clients of HTTP take as long to import as the rest of a worker's sandboxes.
        from tool_worker.sandbox.kubernetes.api import PATIENCE_SECONDS, Api

        return Api(self._settings.access, min(PATIENCE_SECONDS, self._settings.pending_seconds))

    def _own_pod(self) -> OwnPod:
        if self._found is None:
            name = self._settings.pod or socket.gethostname()
            with self._open_api() as api:
                pod = api.get_pod(name)
                if pod is None:
                    raise SandboxUnavailable(
                        f"the namespace {api.namespace} has no pod {name}",
                        remedy="Name the pod of this worker in DECKHANDS_KUBERNETES_POD.",
                    )
            self._found = _read_own_pod(pod, self._files)
        return self._found

    def _read_template(self) -> Manifest:
        return read_template(Path(self._settings.template)) if self._settings.template else {}

    def _make_pod(self, enclosure: Enclosure) -> Manifest:
        own = self._own_pod()
        image = self._containers.choose_image(enclosure.image)
        user, group = find_owner(enclosure)
        volumes, mounts = self._make_mounts(own, enclosure, user, group)
        host_id = enclosure.labels.get("host", "")
        labels = {
            "app.kubernetes.io/managed-by": "deckhands",
            "app.kubernetes.io/component": "sandbox",
            f"{LABEL}/claim": _hash(own.claim),
            f"{LABEL}/network": "open" if enclosure.has_network else "none",
        }
        conversation = enclosure.labels.get("conversation", "")
        if conversation:
            labels[f"{LABEL}/root"] = _hash(own.claim, enclosure.labels.get("root", ""))
            labels[f"{LABEL}/conversation"] = conversation[:MAX_LABEL_CHARS].strip("-_.")
        else:
            labels[f"{LABEL}/locks"] = _hash(own.claim, str(self._files / "pods"))
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": make_pod_name(own.claim, host_id or secrets.token_hex(16)),
                "labels": labels,
                "annotations": {f"{LABEL}/conversation": conversation, f"{LABEL}/workspace": str(enclosure.workspace)},
                "ownerReferences": own.owners,
            },
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "hostNetwork": False,
                "hostPID": False,
                "hostIPC": False,
                "shareProcessNamespace": False,
                "hostname": HOST_NAME,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": user,
                    "runAsGroup": group,
                    "seccompProfile": {"type": "RuntimeDefault"},
                    **({"seLinuxOptions": own.selinux} if own.selinux else {}),
                },
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _only_on(own.node)}},
                "tolerations": own.tolerations,
                **({"imagePullSecrets": own.pull_secrets} if own.pull_secrets else {}),
                "containers": [
                    {
                        "name": CONTAINER,
                        "image": image,
                        "workingDir": enclosure.mount_at,
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "privileged": False,
                            "readOnlyRootFilesystem": True,
                            "runAsNonRoot": True,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "resources": self._make_resources(enclosure),
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            },
        }

    def _make_resources(self, enclosure: Enclosure) -> Manifest:
        limits: dict[str, str] = {}
        requests = dict(REQUESTS)
        if (memory := enclosure.limits.memory_bytes) is not None:
            limits["memory"] = str(memory)
            requests["memory"] = str(min(memory, 64 * 2**20))
        if self._containers.cpus is not None:
            limits["cpu"] = f"{max(1, round(self._containers.cpus * 1000))}m"
        return {"requests": requests, **({"limits": limits} if limits else {})}

    def _make_mounts(
        self, own: OwnPod, enclosure: Enclosure, user: int, group: int
    ) -> tuple[list[Manifest], list[Manifest]]:
        """Return the volumes of a pod and where it sees them, outer ones first."""
        volumes: list[Manifest] = [{"name": "node", "persistentVolumeClaim": {"claimName": own.claim}}]
        mounts = [
            _mount(own, enclosure.workspace, enclosure.mount_at),
            {**_mount(own, self._copy_code(), f"{CODE_ROOT}/tool_worker"), "readOnly": True},
        ]
        for path in enclosure.read_only:
            shown = path
            if path.name == "socket":  # its directory, which has nothing else: the socket may not exist yet
                shown = path.parent
                shown.mkdir(mode=0o700, parents=True, exist_ok=True)
                change_owner(shown, user, group)
            mounts.append({**_mount(own, shown, str(shown)), "readOnly": True})
        if enclosure.entrance is not None:
            mounts.append({**_mount(own, enclosure.entrance.parent, ENTRANCE), "readOnly": True})
        in_memory = {"medium": "Memory", "sizeLimit": str(enclosure.temporary_bytes)}
        kept = {"home": (HOME, enclosure.home), "tmp": ("/tmp", enclosure.temporary), "shm": ("/dev/shm", None)}  # noqa: S108
        for name, (target, source) in kept.items():
            if source is None:
                volumes.append({"name": name, "emptyDir": in_memory})
                mounts.append({"name": name, "mountPath": target})
            else:
                change_owner(source, user, group)
                mounts.append(_mount(own, source, target))
        return volumes, sorted(mounts, key=lambda mount: mount["mountPath"].count("/"))

    def _copy_code(self) -> Path:
        """Return a copy of the host's code on the volume; the first call of a version makes it."""
        package = PACKAGE_ROOT / "tool_worker"
        files = [
            file
            for name in HOST_CODE
            for file in sorted([package / name, *(package / name).rglob("*")])
            if file.is_file() and file.suffix != ".pyc"
        ]
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(package)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        target = self._files / f"code-{digest.hexdigest()[:16]}"
        if not target.is_dir():
            draft = self._files / f".code-{secrets.token_hex(8)}"
            for file in files:
                copied = draft / file.relative_to(package)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
            compileall.compile_dir(draft, quiet=2, stripdir=str(draft), prependdir=f"{CODE_ROOT}/tool_worker")
            for path in (draft, *draft.rglob("*")):  # the pod's user reads them, whatever our mask is
                path.chmod(0o755 if path.is_dir() else 0o644)
            try:
                draft.rename(target)
            except OSError:  # another worker was faster
                shutil.rmtree(draft, ignore_errors=True)
        return target


def make_pod_name(claim: str, host_id: str) -> str:
    """Return the name of a host's pod.

    It contains the claim, by which the admission policy of the chart knows whose pod it is.
    """
    return f"{NAME_PREFIX}{claim.replace('.', '-')[:MAX_CLAIM_CHARS]}-{host_id[:32].lower()}"


def merge(template: Manifest, ours: Manifest) -> Manifest:
    """Return our fields with those of a template that they do not set. Of lists, the container's fields are merged."""
    merged = dict(template)
    for name, value in ours.items():
        theirs = template.get(name)
        if isinstance(value, dict) and isinstance(theirs, dict):
            merged[name] = merge(theirs, value)
        elif name == "containers" and theirs:
            merged[name] = [merge(theirs[0], value[0])]
        elif name == "tolerations":
            merged[name] = [*value, *(theirs or ())]
        else:
            merged[name] = value
    return merged


def read_template(path: Path) -> Manifest:
    """Read the operator's template of pods.

    Raises:
        SandboxUnavailable: it is none, or has further containers or volumes.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise SandboxUnavailable(f"DECKHANDS_KUBERNETES_TEMPLATE: {path} cannot be read: {error}") from error
    found = {} if found is None else found
    if problem := _find_template_problem(found):
        raise SandboxUnavailable(f"DECKHANDS_KUBERNETES_TEMPLATE: {path} may have {problem}")
    return {"metadata": found.get("metadata") or {}, "spec": found.get("spec") or {}}


def _find_template_problem(found: object) -> str:
    """Return what alone a template may have, if it has anything else; empty: it can be used."""
    only_mappings = "only mappings: the file itself, its `metadata`, its `spec` and the container"
    if not isinstance(found, dict):
        return only_mappings
    metadata, spec = found.get("metadata") or {}, found.get("spec") or {}
    if not isinstance(metadata, dict) or not isinstance(spec, dict):
        return only_mappings
    unknown = {*found} - {"apiVersion", "kind", "metadata", "spec"}
    if "template" in unknown:
        return "only `metadata` and `spec` at the top: move them out of `template`"
    if unknown or spec.keys() & {"initContainers", "ephemeralContainers", "volumes", "nodeName"}:
        return "only `metadata` and `spec`, without volumes, nodeName and further containers"
    containers = spec.get("containers") or []
    if not isinstance(containers, list) or not all(isinstance(each, dict) for each in containers):
        return only_mappings
    if len(containers) > 1 or any(each.get("name") != CONTAINER for each in containers):
        return f"one container, named {CONTAINER}"
    if any(each.keys() - {"name", "resources", "imagePullPolicy"} for each in containers):
        return "only `resources` and `imagePullPolicy` of the container"
    return ""


def remove_pods(api: Api, pods: Sequence[Manifest]) -> None:
    """Remove pods, and wait until none of their processes is left.

    Raises:
        SandboxUnavailable: one of them still exists after a minute, such as on a lost machine.
    """
    for pod in pods:
        api.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])
    ends = SYSTEM_CLOCK.monotonic() + END_LIMIT_SECONDS
    for pod in pods:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        while (found := api.get_pod(name)) is not None and found["metadata"]["uid"] == uid:
            if SYSTEM_CLOCK.monotonic() > ends:
                raise SandboxUnavailable(
                    f"The pod {name} does not end.",
                    remedy="If its machine is lost, remove the machine from the cluster.",
                )
            threading.Event().wait(POLL_SECONDS)


def sweep(api: Api, claim: str, locks: Path) -> None:
    """Request the removal of pods of a volume that have ended, or whose program is no longer served.

    Programs whose locks are in another directory are left alone.
    """
    for pod in api.list_pods({f"{LABEL}/claim": _hash(claim)}):
        name = pod["metadata"]["name"]
        has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        is_ours = pod["metadata"].get("labels", {}).get(f"{LABEL}/locks") == _hash(claim, str(locks))
        if has_ended or (is_ours and is_abandoned(locks / name)):
            api.delete_pod(name, pod["metadata"]["uid"])
            (locks / name).unlink(missing_ok=True)


def is_abandoned(lock: Path) -> bool:
    """Return whether no process holds the lock of a pod."""
    import fcntl

    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _read_own_pod(pod: Manifest, files: Path) -> OwnPod:
    spec = pod["spec"]
    mounts = [mount for container in spec["containers"] for mount in container.get("volumeMounts", [])]
    around = [mount for mount in mounts if files.is_relative_to(mount["mountPath"])]
    mount = max(around, key=lambda each: len(each["mountPath"]), default={"name": ""})
    volume: Manifest = next((each for each in spec.get("volumes", []) if each["name"] == mount["name"]), {})
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if not claim or mount.get("subPathExpr"):
        raise SandboxUnavailable(
            f"{files} is on no volume that pods can share",
            remedy="Put DECKHANDS_NODE_DIR on a PersistentVolumeClaim of this worker's pod.",
        )
    metadata = pod["metadata"]
    own = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    owners = [
        {name: owner[name] for name in ("apiVersion", "kind", "name", "uid")}  # not as controller: it would adopt them
        for owner in metadata.get("ownerReferences", [])
    ]
    return OwnPod(
        node=spec.get("nodeName", ""),
        claim=claim,
        mounted_at=Path(mount["mountPath"]),
        sub_path=mount.get("subPath", "").strip("/"),
        owners=owners or [own],
        tolerations=spec.get("tolerations", []),
        pull_secrets=spec.get("imagePullSecrets", []),
        selinux=spec.get("securityContext", {}).get("seLinuxOptions", {}),
    )


def _only_on(node: str) -> Manifest:
    """Return the node selector of one machine. The scheduler still decides whether the pod fits there."""
    term = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"nodeSelectorTerms": [{"matchFields": [term]}]}


def _mount(own: OwnPod, source: Path, target: str) -> dict[str, Any]:
    if ":" in target:
        raise WorkspaceRefused(f"{target!r} cannot be mounted in a pod.", remedy="Use a path without colons.")
    return {"name": "node", "mountPath": target, "subPath": own.locate(source)}


def _hash(*words: str) -> str:
    """Return what stands for words in a label, which has few characters."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
