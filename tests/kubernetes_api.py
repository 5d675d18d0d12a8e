"""An API server of Kubernetes with one machine, for tests: it checks requests, and runs pods as processes.

Every body that it takes and every object that it answers with is validated against the schemas of Kubernetes' own
OpenAPI document, in the version `VERSION`, as the package `kubernetes-validate` has them; unknown fields and parameters
are refused. It demands a token, the rights of a Role, the Pod Security Standard `restricted`, a quota, and policies
(ValidatingAdmissionPolicy) whose CEL expressions it evaluates.

A container is a bubblewrap process on this machine's /usr, with the mounts, the user and the rights of its pod; `exec`
enters its namespaces. So what runs in a pod is confined as there, and what it does is real.

What takes time in a cluster takes requests here, so that tests wait for nothing: a pod is pending until it was read
once, and one that ends keeps running until it was read `LAST_LOOKS` times.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import re
import secrets
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import cel
import jsonschema_rs
import kubernetes_validate
import yaml
from aiohttp import WSMsgType, web

from tests.certificates import certificate_in
from tests.kubernetes_objects import RESOURCES, check_object, path_of
from tool_worker.sandbox.containers import ClusterAccess, ContainerSettings, KubernetesSettings
from tool_worker.sandbox.sandbox import find_interpreter, list_interpreter_prefixes

Object = dict[str, Any]

VERSION = "1.37"
NAMESPACE = "agents"
TOKEN = "a-token-of-the-service-account"
WORKER, NODE, CLAIM = "deck-tools-0", "machine-1", "node-deck-tools-0"
IMAGE = "team/sandbox:1"
MISSING_IMAGE = "team/missing:1"
ALL_RIGHTS = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete", "get", "list"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
)
PARAMETERS = {
    "create": {"fieldValidation", "fieldManager", "dryRun", "pretty"},
    "delete": {"gracePeriodSeconds", "propagationPolicy", "dryRun"},
    "get": {"pretty"},
    "list": {"labelSelector", "fieldSelector", "limit", "continue", "resourceVersion"},
    "exec": {"container", "command", "stdin", "stdout", "stderr", "tty"},
}
LAST_LOOKS = 2
DROPPED = 0
"""As an injected fault: the connection is closed without an answer."""
RUN_AS = ("--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs")


class Refused(Exception):
    """A request that the server answers with a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "code": code, "reason": reason, "message": message,
        }  # fmt: skip
        self.code = code


@lru_cache
def schema_of(kind: str, api_version: str) -> jsonschema_rs.Validator:
    """Return the validator of one kind."""
    folder = Path(kubernetes_validate.__file__).with_name("kubernetes-json-schema") / f"v{VERSION}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    path = folder / f"{kind.lower()}-{group}.json"
    if not path.exists():
        path = folder / f"{kind.lower()}-meta-{group}.json"
    schema = json.loads(path.read_text())
    found = {"_definitions.json": json.loads((folder / "_definitions.json").read_text())}
    registry = jsonschema_rs.Registry([(f"json-schema:///{name}", text) for name, text in found.items()])
    return jsonschema_rs.validator_for(schema, registry=registry, base_uri=f"json-schema:///{path.name}")


def check(found: Object, kind: str | None = None) -> None:
    """Refuse an object that the OpenAPI document does not describe."""
    name, version = kind or found.get("kind", ""), found.get("apiVersion", "v1")
    try:
        validator = schema_of(name, version)
    except FileNotFoundError:
        raise Refused(404, "NotFound", f'no matches for kind "{name}" in version "{version}"') from None
    for error in validator.iter_errors(found):
        where = ".".join(map(str, error.instance_path))
        raise Refused(400, "BadRequest", f'{name} in version "{version}" cannot be handled: {where}: {error.message}')


def check_restricted(pod: Object) -> None:
    """Refuse a pod that the Pod Security Standard `restricted` forbids."""
    spec = pod["spec"]
    found = []
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    of_pod = spec.get("securityContext", {})
    kinds = {kind for volume in spec.get("volumes", []) for kind in set(volume) - {"name"}}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += sorted(kinds - allowed)
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        merged = {**of_pod, **own}
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation != false")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own.get("capabilities", {}).get("add"):
            found.append("unrestricted capabilities")
        if merged.get("runAsNonRoot") is not True or merged.get("runAsUser") == 0:
            found.append("runAsNonRoot != true")
        if merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccompProfile")
    if found:
        name = pod["metadata"]["name"]
        raise Refused(
            403, "Forbidden", f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {found}'
        )


@dataclass
class Container:
    """A container that runs: the outer process, and the first process inside."""

    outer: subprocess.Popen[bytes]
    main_pid: int
    user: int
    group: int
    environment: dict[str, str]
    directory: str


@dataclass
class FakeCluster:
    """A cluster with one namespace and one machine; started by `running_cluster`.

    Attributes:
        failing_pulls: how often the download of the missing image fails before it works.
        rights: the rules of the role that the token's account has.
        policies: admission policies, as manifests.
        quota: how many pods the namespace may have.
        has_room: whether the scheduler finds a place for a pod.
        enforces_network: whether network policies close pods; the machine's own network otherwise.
        enforces_security: whether the namespace enforces the Pod Security Standard `restricted`.
        answers_pings: whether connections of exec answer heartbeats.
        caller: the pod that the token was made for; empty for a token of no pod.
        requests: verb and resource of each request that was served.
        injected: verb and status of faults; each one answers the next request with its verb, instead of serving it.
    """

    folder: Path
    volume: Path
    rights: tuple[Object, ...] = ALL_RIGHTS
    policies: tuple[Object, ...] = ()
    quota: int = 100
    has_room: bool = True
    enforces_network: bool = True
    enforces_security: bool = True
    caller: str = WORKER
    answers_pings: bool = True
    pull_message: str = "not found"
    failing_pulls: int = 2**31
    protocols: tuple[str, ...] = ("v5.channel.k8s.io", "v4.channel.k8s.io")
    pods: dict[str, Object] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    injected: list[tuple[str, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    last_looks: dict[str, int] = field(default_factory=dict)
    machine: asyncio.Lock = field(default_factory=asyncio.Lock)
    url: str = ""
    certificate: Path = Path()

    @property
    def config(self) -> Path:
        """The kubeconfig of the worker's account."""
        return self.folder / "kubeconfig"

    def settings(self, *images: str, **more: Any) -> ContainerSettings:
        """Return a worker's settings of containers."""
        access = ClusterAccess(config=str(self.config))
        kubernetes = KubernetesSettings(access, pod=WORKER, **{"pending_seconds": 60.0, **more})
        return ContainerSettings(images or (IMAGE, "team/*"), kubernetes=kubernetes)

    def environment(self) -> dict[str, str]:
        """Return the variables of a tool worker in the pod `WORKER`."""
        return {
            "DECKHANDS_SANDBOX": "kubernetes",
            "DECKHANDS_DOCKER_IMAGES": IMAGE,
            "DECKHANDS_KUBERNETES_CONFIG": str(self.config),
            "DECKHANDS_KUBERNETES_POD": WORKER,
        }

    def sandboxes(self) -> list[Object]:
        """Return the pods that are sandboxes and do not end, the oldest first."""
        return [
            pod
            for name, pod in list(self.pods.items())
            if name != WORKER and "deletionTimestamp" not in pod["metadata"]
        ]

    def find_pods_of(self, conversation_id: str) -> list[Object]:
        """Return the pods of one conversation."""
        return [
            pod
            for pod in self.sandboxes()
            if pod["metadata"]["annotations"]["deckhands/conversation"] == conversation_id
        ]

    def kill(self, name: str) -> None:
        """Kill a container as the kernel does when memory runs out."""
        os.kill(self.containers[name].main_pid, 9)

    def add_worker(self) -> None:
        """Add the pod of the tool worker itself, with the volume of its files."""
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "deck-tools", "uid": "u-1", "controller": True}
        mount = {"name": "node", "mountPath": str(self.volume)}
        self.pods[WORKER] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": WORKER, "namespace": NAMESPACE, "uid": "worker-0", "labels": {}, "ownerReferences": [owner]
            },
            "spec": {
                "nodeName": NODE,
                "tolerations": [{"key": "agents", "operator": "Exists"}],
                "containers": [{"name": "tools", "image": "deckhands:0.1.0", "volumeMounts": [mount]}],
                "volumes": [{"name": "node", "persistentVolumeClaim": {"claimName": CLAIM}}],
            },
            "status": {"phase": "Running"},
        }  # fmt: skip

    # The requests.

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refused as refused:
            check(refused.status)
            return web.json_response(refused.status, status=refused.code)
        except Exception as error:  # a fault of the fake itself
            self.faults.append(repr(error))
            raise

    async def _route(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized", "Unauthorized")
        parts = request.path.strip("/").split("/")
        if request.method == "POST" and request.query.get("dryRun") == "All":
            return self._dry_run(request.path, await request.json())
        if parts[:3] != ["api", "v1", "namespaces"] or parts[4:5] != ["pods"]:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        name, sub = [*parts[5:], "", ""][:2]
        verb = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "list"}[request.method]
        resource = f"pods/{sub}" if sub else "pods"
        self._authorize(verb, resource, parts[3])
        unknown = set(request.query) - PARAMETERS["exec" if sub else verb]
        if unknown:
            raise Refused(400, "BadRequest", f"unknown parameters {sorted(unknown)}")
        for fault in self.injected:
            if fault[0] == verb:
                self.injected.remove(fault)
                return self._fail(request, fault[1])
        self.requests.append((verb, resource))
        if sub == "exec":
            self._admit("CONNECT", resource, name, None)
            return await self._exec(request, name)
        body = await request.json() if request.can_read_body else None
        if verb == "create":
            return self._answer(await self._create(body), 201)
        if verb == "list":
            answer = self._answer(self._list(request.query))
            for each in sorted(self.pods):
                await self._proceed(each)
            return answer
        if name not in self.pods:
            raise Refused(404, "NotFound", f'pods "{name}" not found')
        if verb == "delete":
            return self._answer(await self._delete(name, body))
        answer = self._answer(self._look(name))
        await self._proceed(name)
        return answer

    def _fail(self, request: web.Request, status: int) -> web.Response:
        if status == DROPPED:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 500, text="not JSON", headers={"Retry-After": "0"})

    async def _proceed(self, name: str) -> None:
        """Do what the machine does to a pod between two requests."""
        async with self.machine:
            if name in self.pods:
                await self._proceed_with(name, self.pods[name])

    async def _proceed_with(self, name: str, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            self.last_looks[name] -= 1
            if self.last_looks[name] <= 0:
                await asyncio.to_thread(self._end, name)
                del self.pods[name]
        elif pod["status"]["phase"] == "Pending" and "nodeName" in pod["spec"] and name not in self.containers:
            if pod["spec"]["containers"][0]["image"] == MISSING_IMAGE and self.failing_pulls:
                self.failing_pulls -= 1
                self._set_state(pod, {"waiting": {"reason": "ImagePullBackOff", "message": self.pull_message}})
                return
            self.containers[name] = await asyncio.to_thread(self._start, pod)
            pod["status"]["phase"] = "Running"
            self._set_state(pod, {"running": {}})

    def _dry_run(self, path: str, found: Object) -> web.Response:
        """Check an object of any kind as for its creation, and answer with it."""
        check(found)
        if (found["apiVersion"], found["kind"]) not in RESOURCES:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace = found["metadata"].get("namespace", NAMESPACE)
        if path != path_of(found, namespace) or namespace != NAMESPACE:
            raise Refused(400, "BadRequest", f"{found['kind']} of the namespace {namespace} does not belong to {path}")
        try:
            check_object(found)
        except (ValueError, KeyError, TypeError) as error:
            message = f"{found['kind']} {found['metadata']['name']!r} is invalid: {error}"
            raise Refused(422, "Invalid", message) from error
        return web.json_response(found, status=201)

    def _answer(self, found: Object, code: int = 200) -> web.Response:
        for each in found.get("items", [found]):
            check({**each, "apiVersion": "v1", "kind": each.get("kind", "Pod")})
        return web.json_response(found, status=code)

    def _authorize(self, verb: str, resource: str, namespace: str) -> None:
        is_allowed = namespace == NAMESPACE and any(
            verb in rule["verbs"] and resource in rule["resources"] and "" in rule["apiGroups"] for rule in self.rights
        )
        if not is_allowed:
            who = f'User "system:serviceaccount:{NAMESPACE}:deck-tools" cannot {verb} resource "{resource}"'
            message = f'{resource} is forbidden: {who} in API group "" in the namespace "{namespace}"'
            raise Refused(403, "Forbidden", message)

    def _admit(self, operation: str, resource: str, name: str, found: Object | None, old: Object | None = None) -> None:
        for policy in self.policies:
            rules = policy["spec"]["matchConstraints"]["resourceRules"]
            if not any(operation in rule["operations"] and resource in rule["resources"] for rule in rules):
                continue
            extra = {"authentication.kubernetes.io/pod-name": [self.caller]} if self.caller else {}
            user = {"username": f"system:serviceaccount:{NAMESPACE}:deck-tools", "extra": extra}
            context: Object = {
                "object": found, "oldObject": old,
                "request": {"operation": operation, "name": name, "namespace": NAMESPACE, "userInfo": user},
                "variables": {},
            }  # fmt: skip
            conditions = policy["spec"].get("matchConditions", [])
            if not all(cel.evaluate(each["expression"], context) for each in conditions):
                continue
            for each in policy["spec"].get("variables", []):
                context["variables"][each["name"]] = cel.evaluate(each["expression"], context)
            for each in policy["spec"]["validations"]:
                if not cel.evaluate(each["expression"], context):
                    raise Refused(
                        403,
                        "Forbidden",
                        f"{resource} is forbidden: ValidatingAdmissionPolicy denied: {each['message']}",
                    )

    async def _create(self, pod: Object) -> Object:
        check(pod, "Pod")
        name = pod["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) or len(name) > 253:
            raise Refused(422, "Invalid", f'Pod "{name}" is invalid: metadata.name')
        for key, value in pod["metadata"].get("labels", {}).items():
            if not re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value) or len(value) > 63:
                raise Refused(422, "Invalid", f'Pod "{name}" is invalid: metadata.labels: {key}={value!r}')
        if self.enforces_security:
            check_restricted(pod)
        self._admit("CREATE", "pods", name, pod)
        if name in self.pods:
            raise Refused(409, "AlreadyExists", f'pods "{name}" already exists')
        if len(self.sandboxes()) >= self.quota:
            message = f'pods "{name}" is forbidden: exceeded quota: pods, requested: pods=1, limited: pods={self.quota}'
            raise Refused(403, "Forbidden", message)
        made = copy.deepcopy(pod)
        made["metadata"] |= {"namespace": NAMESPACE, "uid": secrets.token_hex(8), "resourceVersion": "1"}
        made["status"] = {"phase": "Pending"}
        self.pods[name] = made
        if not self.has_room:
            message = "0/1 nodes are available: 1 Insufficient memory."
            made["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            ]
        else:
            made["spec"]["nodeName"] = NODE
        return made

    def _set_state(self, pod: Object, state: Object) -> None:
        container = pod["spec"]["containers"][0]
        pod["status"]["containerStatuses"] = [
            {
                "name": container["name"], "image": container["image"], "imageID": "", "ready": "running" in state,
                "restartCount": 0, "state": state,
            }
        ]  # fmt: skip

    def _look(self, name: str) -> Object:
        pod = self.pods[name]
        container = self.containers.get(name)
        if container is not None and container.outer.poll() is not None and pod["status"]["phase"] == "Running":
            code = container.outer.returncode
            pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
            written = self.folder / "logs" / f"{name}.termination"
            ended = {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "message": written.read_text()[:4096],
            }
            self._set_state(pod, {"terminated": ended})
        return pod

    def _list(self, query: Any) -> Object:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        found = [self._look(name) for name in sorted(self.pods)]
        found = [pod for pod in found if wanted.items() <= pod["metadata"].get("labels", {}).items()]
        start, size = int(query.get("continue", 0)), int(query.get("limit", 500))
        following = {"continue": str(start + size)} if start + size < len(found) else {}
        return {"apiVersion": "v1", "kind": "PodList", "metadata": following, "items": found[start : start + size]}

    async def _delete(self, name: str, options: Object | None) -> Object:
        pod = self.pods[name]
        if options is not None:
            check(options, "DeleteOptions")
            if options.get("preconditions", {}).get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
                raise Refused(409, "Conflict", "the UID in the precondition does not match")
        self._admit("DELETE", "pods", name, None, pod)
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 1}
            self.last_looks[name] = LAST_LOOKS
        return pod

    # The machine.

    def _start(self, pod: Object) -> Container:
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        name = pod["metadata"]["name"]
        user, group = spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        termination = logs / f"{name}.termination"
        termination.touch()
        termination.chmod(0o666)
        options = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", spec["hostname"]]
        is_closed = self.enforces_network and pod["metadata"]["labels"].get("deckhands/network") == "none"
        options += ["--unshare-net"] if is_closed else []
        options += ["--unshare-user", "--uid", str(user), "--gid", str(group)] if os.getuid() else []
        options += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--dir", "/etc"]
        for directory in ("bin", "sbin", "lib", "lib64"):
            link = Path("/", directory)
            options += ["--symlink", str(link.readlink()), str(link)] if link.is_symlink() else []
        for file in ("passwd", "group", "ld.so.cache", "localtime"):
            options += ["--ro-bind-try", f"/etc/{file}", f"/etc/{file}"]
        for path in list_interpreter_prefixes():
            options += [] if path.is_relative_to("/usr") else [*_parents(path), "--ro-bind", str(path), str(path)]
        options += ["--dir", "/image", "--symlink", find_interpreter(), "/image/python3"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            options += _parents(Path(mount["mountPath"]))
            if claim := volumes[mount["name"]].get("persistentVolumeClaim"):
                assert claim["claimName"] == CLAIM
                source = (self.volume / mount["subPath"]).resolve()
                assert source.is_relative_to(self.volume.resolve()), "a path that leads out of the volume"
                options += ["--ro-bind" if mount.get("readOnly") else "--bind", str(source), mount["mountPath"]]
            else:
                options += ["--perms", "1777", "--tmpfs", mount["mountPath"]]
        options += ["--bind", str(termination), "/dev/termination-log", "--remount-ro", "/"]
        environment = {
            "PATH": "/image:/usr/local/bin:/usr/bin:/bin", "HOME": "/", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "LD_LIBRARY_PATH": str(Path(find_interpreter()).parents[1] / "lib"),
        }  # fmt: skip
        reading, writing = os.pipe()
        command = [*options, "--info-fd", str(writing), "--as-pid-1", "--chdir", container["workingDir"], "--"]
        command += [*_make_run_as(user, group), *container["command"]]
        with (logs / f"{name}.log").open("wb") as log:
            outer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=[writing],
                start_new_session=True,
            )  # fmt: skip
        os.close(writing)
        with os.fdopen(reading) as told:
            announced = json.loads(told.read() or '{"child-pid": 0}')
        return Container(outer, announced["child-pid"], user, group, environment, container["workingDir"])

    def _end(self, name: str) -> None:
        container = self.containers.pop(name, None)
        if container is not None and container.outer.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(container.main_pid, 9)
        if container is not None:
            container.outer.wait()

    async def _exec(self, request: web.Request, name: str) -> web.StreamResponse:
        container = self.containers.get(name)
        if container is None or container.outer.poll() is not None:
            raise Refused(400, "BadRequest", f"pod {name} does not have a running container")
        socket = web.WebSocketResponse(protocols=self.protocols, autoping=self.answers_pings)
        if not set(self.protocols) & {text.strip() for text in request.headers["Sec-WebSocket-Protocol"].split(",")}:
            raise Refused(403, "Forbidden", "no common protocol")
        await socket.prepare(request)
        entering = ["nsenter", "--target", str(container.main_pid), "--mount", "--pid", "--net", "--ipc", "--uts"]
        entering += ["--user", "--preserve-credentials"] if os.getuid() else []
        entering += ["--root"]
        running = await asyncio.create_subprocess_exec(
            *entering, "--", *_make_run_as(container.user, container.group), *request.query.getall("command"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=container.environment,
            start_new_session=True,
        )  # fmt: skip
        assert running.stdin is not None

        async def copy_out(stream: asyncio.StreamReader | None, channel: int) -> None:
            assert stream is not None
            while part := await stream.read(2**15):
                await socket.send_bytes(bytes([channel]) + part)

        async def copy_in() -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[:2] == bytes([255, 0]):
                    assert socket.ws_protocol == "v5.channel.k8s.io"
                    running.stdin.close()
                elif message.type is WSMsgType.BINARY and message.data[0] == 0:
                    with suppress(ConnectionError):
                        running.stdin.write(message.data[1:])
                        await running.stdin.drain()
            running.stdin.close()  # the client is gone

        reading = asyncio.create_task(copy_in())
        try:
            with suppress(ConnectionError):
                await asyncio.gather(copy_out(running.stdout, 1), copy_out(running.stderr, 2))
            code = await running.wait()
            status: Object = {"metadata": {}, "status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}]
                status |= {
                    "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes},
                    "message": f"command terminated with exit code {code}",
                }  # fmt: skip
            check({"apiVersion": "v1", "kind": "Status", **status})
            with suppress(ConnectionError):
                await socket.send_bytes(bytes([3]) + json.dumps(status).encode())
                await socket.close()
        finally:  # the request may be cancelled when the cluster ends
            reading.cancel()
            running._transport.close()  # type: ignore[attr-defined]
        return socket


def _parents(path: Path) -> list[str]:
    """Return the options that create the directories above a mount, for every user."""
    above = [str(parent) for parent in reversed(path.parents) if str(parent) != "/"]
    return [word for parent in above for word in ("--perms", "0755", "--dir", parent)]


def _make_run_as(user: int, group: int) -> list[str]:
    ids = [f"--reuid={user}", f"--regid={group}", "--clear-groups"] if os.getuid() == 0 else []
    return ["setpriv", *ids, *(RUN_AS if os.getuid() == 0 else ("--no-new-privs",)), "--"]


@contextmanager
def running_cluster(folder: Path, volume: Path, **settings: Any) -> Iterator[FakeCluster]:
    """Serve a cluster from a thread, and end all its processes afterwards."""
    folder.mkdir(exist_ok=True)
    volume.mkdir(exist_ok=True)
    cluster = FakeCluster(folder, volume, **settings)
    cluster.add_worker()
    certificate, key = certificate_in(folder)
    cluster.certificate = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**22)
        app.router.add_route("*", "/{path:.*}", cluster._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        cluster.url = f"https://127.0.0.1:{port}"
        ended = cluster._ended = asyncio.Event()
        started.set()
        await ended.wait()
        assert runner.server is not None
        links = [connection.transport for connection in runner.server.connections]
        await runner.cleanup()
        for link in links:  # else it waits for its client to end TLS
            if link is not None:
                link.abort()
        for _ in range(3):  # connections, and pipes of programs, close in the rounds after
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="kubernetes")
    thread.start()
    started.wait()
    authority = base64.b64encode(certificate.read_bytes()).decode()
    cluster.config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "worker",
                "clusters": [
                    {"name": "fake", "cluster": {"server": cluster.url, "certificate-authority-data": authority}}
                ],
                "users": [{"name": "worker", "user": {"token": TOKEN}}],
                "contexts": [
                    {"name": "worker", "context": {"cluster": "fake", "user": "worker", "namespace": NAMESPACE}}
                ],
            }
        )
    )  # fmt: skip
    try:
        yield cluster
    finally:
        for name in list(cluster.containers):
            cluster._end(name)
        loop.call_soon_threadsafe(cluster._ended.set)
        thread.join()
        loop.close()
    assert not cluster.faults, cluster.faults
