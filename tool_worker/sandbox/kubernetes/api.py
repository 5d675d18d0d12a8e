"""The requests to the API server of Kubernetes that pods need: create, get, list, delete, and the address of an exec.

Holds:
    - The token of a service account is read for each request, because Kubernetes replaces it.
    - Answers of the API server are trusted, except for the texts in them: programs of a pod can write some of these. No
      text that a program can write is read, and the others are shortened and stripped of control characters.
Does not: watch. A pod that starts is polled, which needs one right less.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
import yaml

from broker.runtime import SYSTEM_CLOCK
from tool_worker.errors import SandboxUnavailable
from tool_worker.sandbox.containers import ClusterAccess

Manifest = dict[str, Any]

LIMIT_SECONDS = 30.0
PATIENCE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
PAGE_SIZE = 200
MAX_TEXT_CHARS = 500
MAX_NUMBER_CHARS = 6
BUSY = (429, 500, 502, 503, 504)


class ApiRefusal(SandboxUnavailable):
    """The API server refused a request.

    Attributes:
        status: the HTTP status.
        reason: Kubernetes' name of the reason, such as `AlreadyExists`.
    """

    def __init__(self, message: str, *, status: int, reason: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.reason = reason


class Api:
    """A client of one namespace; for one thread.

    Attributes:
        patience_seconds: how long a request is repeated while the API server is busy or away.

    Raises:
        SandboxUnavailable: there is no usable configuration.
    """

    def __init__(self, access: ClusterAccess, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        found = _read_config(Path(access.config)) if access.config else _read_account(access)
        self.server, self.namespace, self.tls, self._token_file, self._token = found
        self._client = httpx.Client(
            base_url=self.server, verify=self.tls, timeout=LIMIT_SECONDS, trust_env=False, follow_redirects=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get_pod(self, name: str) -> Manifest | None:
        """Return a pod; None if there is none."""
        try:
            return self._ask("GET", self._path(name))
        except ApiRefusal as refusal:
            if refusal.status == httpx.codes.NOT_FOUND:
                return None
            raise

    def list_pods(self, labels: Mapping[str, str]) -> Iterator[Manifest]:
        """Yield the pods that have all these labels."""
        asked = {"labelSelector": ",".join(f"{name}={value}" for name, value in labels.items()), "limit": PAGE_SIZE}
        while True:
            page = self._ask("GET", self._path(), params=asked)
            yield from page.get("items") or ()
            following = page.get("metadata", {}).get("continue")
            if not following:
                return
            asked = {**asked, "continue": following}

    def create_pod(self, manifest: Manifest) -> Manifest:
        """Create a pod.

        Raises:
            ApiRefusal: it is not allowed, exceeds a quota, or there is one with its name (`AlreadyExists`).
        """
        return self._ask("POST", self._path(), body=manifest, params={"fieldValidation": "Strict"})

    def delete_pod(self, name: str, uid: str) -> None:
        """Request the end of a pod, unless another one has its name by now. Idempotent."""
        # A second, not none: without grace the pod would disappear here before its processes have ended.
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 1, "preconditions": {"uid": uid}}
        try:
            self._ask("DELETE", self._path(name), body=options)
        except ApiRefusal as refusal:
            if refusal.status not in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
                raise

    def find_exec_address(self, name: str, container: str, command: list[str]) -> str:
        """Return the WebSocket address that runs a command in a container."""
        asked = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        asked += [("command", word) for word in command]
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in asked)
        return f"ws{self.server.removeprefix('http')}{self._path(name)}/exec?{query}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        token = self._token
        if self._token_file is not None:
            try:
                token = self._token_file.read_text().strip()
            except OSError as error:
                raise SandboxUnavailable(f"The token {self._token_file} cannot be read: {error.strerror}.") from error
        return {"User-Agent": "deckhands", **({"Authorization": f"Bearer {token}"} if token else {})}

    def _path(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods{f'/{name}' if name else ''}"

    def _ask(
        self, verb: str, path: str, *, body: Manifest | None = None, params: Mapping[str, Any] | None = None
    ) -> Manifest:
        ends = SYSTEM_CLOCK.monotonic() + self.patience_seconds
        waits = FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = self._client.request(verb, path, json=body, params=params, headers=self.headers)
                if answer.status_code not in BUSY or SYSTEM_CLOCK.monotonic() + waits > ends:
                    return _read_answer(answer)
                waits = max(waits, _read_retry_after(answer))
            except httpx.TransportError as error:
                if SYSTEM_CLOCK.monotonic() + waits > ends:
                    raise SandboxUnavailable(
                        f"The API server {self.server} does not answer: {to_plain(str(error) or type(error).__name__)}"
                    ) from error
            pause(min(waits, max(0.0, ends - SYSTEM_CLOCK.monotonic())))
            waits = min(2 * waits, LONGEST_PAUSE_SECONDS)


def pause(seconds: float) -> None:
    """Wait before the next request."""
    threading.Event().wait(seconds)


def to_plain(text: object) -> str:
    """Return a text of the cluster on one line, shortened, without control characters."""
    words = " ".join(str(text).split())
    plain = "".join(character if character.isprintable() else "?" for character in words)
    return plain if len(plain) <= MAX_TEXT_CHARS else f"{plain[:MAX_TEXT_CHARS]}…"


def _read_answer(answer: httpx.Response) -> Manifest:
    try:
        answered = answer.json()
    except ValueError:
        answered = None
    if not answer.is_success or not isinstance(answered, dict):
        raise _make_refusal(answer.status_code, answered)
    return answered


def _read_retry_after(answer: httpx.Response) -> float:
    """Return for how many seconds the API server asks us to wait; 0 if it does not."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() and len(text) < MAX_NUMBER_CHARS else 0.0


def _make_refusal(status: int, answered: object) -> ApiRefusal:
    found = answered if isinstance(answered, dict) else {}
    message, reason = to_plain(found.get("message") or "no reason was given"), to_plain(found.get("reason") or "")
    remedy = ""
    if status == httpx.codes.UNAUTHORIZED:
        remedy = "Check the service account, or the kubeconfig of DECKHANDS_KUBERNETES_CONFIG."
    elif "exceeded quota" in message:
        remedy = "Raise the quota of the namespace, or the limits of DECKHANDS_WORKSPACE_MEMORY_BYTES and _CPUS."
    elif status == httpx.codes.FORBIDDEN and "cannot" in message:
        remedy = "Give the service account the rights of docs/kubernetes.md: pods create, get, list, delete and exec."
    elif status == httpx.codes.FORBIDDEN:
        remedy = "A policy of the cluster refuses the pod: change the policy, or DECKHANDS_KUBERNETES_TEMPLATE."
    return ApiRefusal(f"Kubernetes refuses: {message} ({status})", status=status, reason=reason, remedy=remedy)


_Found = tuple[str, str, ssl.SSLContext, Path | None, str]
"""Server, namespace, TLS, file of the token, token."""


def _read_account(access: ClusterAccess) -> _Found:
    folder = Path(access.account)
    if not access.address or not (folder / "token").exists():
        raise SandboxUnavailable(
            "this process runs in no pod with a service account",
            remedy="Run it in one (automountServiceAccountToken), or name a kubeconfig in DECKHANDS_KUBERNETES_CONFIG.",
        )
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        namespace = (folder / "namespace").read_text().strip()
    except OSError as error:
        raise SandboxUnavailable(f"The service account in {folder} cannot be read: {error}") from error
    return access.address, namespace, tls, folder / "token", ""


def _read_config(path: Path) -> _Found:
    """Read the current context of a kubeconfig: certificates and tokens, in it or in files; no programs."""
    try:
        config = yaml.safe_load(path.read_text())
        named = {
            kind: {each["name"]: each[kind] or {} for each in config.get(f"{kind}s") or ()}
            for kind in ("context", "cluster", "user")
        }
        context = named["context"][config["current-context"]]
        cluster, user = named["cluster"][context["cluster"]], named["user"][context.get("user", "")]
        server = str(cluster["server"]).rstrip("/")
        tls = ssl.create_default_context(cadata=_read_part(path, cluster, "certificate-authority"))
        if certificate := _read_part(path, user, "client-certificate"):
            with tempfile.NamedTemporaryFile("w") as file:  # the library reads certificates from files only
                file.write(f"{certificate}\n{_read_part(path, user, 'client-key') or ''}")
                file.flush()
                tls.load_cert_chain(file.name)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise SandboxUnavailable(
            f"DECKHANDS_KUBERNETES_CONFIG: {path} is no usable kubeconfig: {type(error).__name__}: {to_plain(error)}",
            remedy="It needs a current context with a cluster and a user; users by programs (`exec`) do not work.",
        ) from error
    if "exec" in user or not server.startswith(("https://", "http://")):
        raise SandboxUnavailable(
            f"DECKHANDS_KUBERNETES_CONFIG: the user of {path} is found by a program, or its server has no address.",
            remedy="Use a token or a certificate.",
        )
    token_file = path.parent / user["tokenFile"] if user.get("tokenFile") else None
    return server, str(context.get("namespace") or "default"), tls, token_file, str(user.get("token") or "")


def _read_part(config: Path, fields: Mapping[str, Any], name: str) -> str | None:
    if data := fields.get(f"{name}-data"):
        return base64.b64decode(data).decode()
    if file := fields.get(name):
        return Path(os.path.join(config.parent, file)).read_text()  # noqa: PTH118  (an absolute path replaces the folder)
    return None
