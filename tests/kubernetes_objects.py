"""What the API server of Kubernetes refuses in an object although its schema allows it.

Source: the validation of the kinds that our chart has, as Kubernetes' API reference describes it. Each check raises
`ValueError` with the field.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import cel

Object = dict[str, Any]

RESOURCES = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("apps/v1", "Deployment"): "deployments",
    ("apps/v1", "StatefulSet"): "statefulsets",
    ("batch/v1", "Job"): "jobs",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "horizontalpodautoscalers",
    ("networking.k8s.io/v1", "Ingress"): "ingresses",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicies",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    ("rbac.authorization.k8s.io/v1", "Role"): "roles",
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): "rolebindings",
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"): "validatingadmissionpolicies",
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"): "validatingadmissionpolicybindings",
}
"""The collection of each kind, from the paths of the API."""
CLUSTER_WIDE = frozenset(("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"))
LABEL_NAME = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
FACTORS = {
    "": 1,
    "m": Decimal("0.001"),
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    **{f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
}
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
MAX_DATA_BYTES = 2**20


def path_of(found: Object, namespace: str) -> str:
    """Return the path of the collection in which an object is created."""
    version = found["apiVersion"]
    base = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    within = "" if found["kind"] in CLUSTER_WIDE else f"/namespaces/{namespace}"
    return f"{base}{within}/{RESOURCES[version, found['kind']]}"


def check_object(found: Object) -> None:
    """Refuse an object that its schema allows."""
    kind, spec = found["kind"], found.get("spec", {})
    name = found["metadata"]["name"]
    is_label = kind == "Service"
    _demand(bool((DNS_LABEL if is_label else DNS_SUBDOMAIN).fullmatch(name)), f"metadata.name: {name!r}")
    _check_labels(found)
    if template := spec.get("template"):
        claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])]
        _check_pod(template["spec"], claims)
        if kind == "Job":
            _demand(template["spec"].get("restartPolicy") in ("Never", "OnFailure"), "spec.template.spec.restartPolicy")
        else:
            chosen = spec["selector"]["matchLabels"]
            _demand(chosen.items() <= template["metadata"]["labels"].items(), "spec.selector: not in the template")
    if kind == "Service":
        ports = spec.get("ports", [])
        _demand(bool(ports) or spec.get("clusterIP") == "None", "spec.ports: required")
        _demand(len({each.get("name") for each in ports}) == len(ports), "spec.ports: a name twice")
    if kind == "HorizontalPodAutoscaler":
        _demand(spec["minReplicas"] <= spec["maxReplicas"], "spec.maxReplicas")
    if kind == "PodDisruptionBudget":
        _demand(len({"minAvailable", "maxUnavailable"} & set(spec)) == 1, "spec: minAvailable or maxUnavailable")
    if kind == "NetworkPolicy":
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                _demand(bool(peer), "spec: a peer that names nothing")
                if block := peer.get("ipBlock"):
                    network = ipaddress.ip_network(block["cidr"])
                    parts = [ipaddress.ip_network(each) for each in block.get("except", [])]
                    _demand(all(part.subnet_of(network) and part != network for part in parts), "ipBlock.except")
    if kind in ("Secret", "ConfigMap"):
        data = found.get("data") or {}
        size = sum(len(value) for value in data.values())
        if kind == "Secret":
            size = sum(len(base64.b64decode(value, validate=True)) for value in data.values())
        _demand(size <= MAX_DATA_BYTES, "data: too long")
        _demand(all(re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) for key in data), "data: a key")
    if kind == "ValidatingAdmissionPolicy":
        for each in [*spec.get("matchConditions", []), *spec.get("variables", []), *spec["validations"]]:
            cel.compile(each["expression"])
    if kind == "RoleBinding":
        _demand(all(each["kind"] != "ServiceAccount" or each["namespace"] for each in found["subjects"]), "subjects")


def _demand(is_met: bool, field: str) -> None:
    if not is_met:
        raise ValueError(field)


def _walk(found: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for key, value in found.items():
            yield key, value
            yield from _walk(value)
    elif isinstance(found, list):
        for value in found:
            yield from _walk(value)


def _check_labels(found: Object) -> None:
    for field, value in _walk(found):
        if field in ("labels", "matchLabels") and isinstance(value, dict):
            for key, text in value.items():
                _demand(bool(LABEL_NAME.fullmatch(key) and LABEL_VALUE.fullmatch(text)), f"{field}: {key}={text}")
        if field == "matchExpressions":
            _demand(
                all(each["operator"] not in ("In", "NotIn") or each["values"] for each in value), "matchExpressions"
            )


def _check_pod(spec: Object, claims: list[str]) -> None:
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    _demand(len(set(volumes)) == len(volumes), f"volumes: a name twice: {volumes}")
    for volume in spec.get("volumes", []):
        _demand(len(volume) <= 2, f"volumes: {volume['name']} has two sources")  # without one, it is an `emptyDir`
        _demand(bool(DNS_LABEL.fullmatch(volume["name"])), f"volumes: {volume['name']}")
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    _demand(len({each["name"] for each in containers}) == len(containers), "containers: a name twice")
    for container in containers:
        _demand(bool(DNS_LABEL.fullmatch(container["name"])), f"containers: {container['name']}")
        mounts = container.get("volumeMounts", [])
        _demand({mount["name"] for mount in mounts} <= {*volumes, *claims}, f"{container['name']}: volumeMounts")
        _demand(len({mount["mountPath"] for mount in mounts}) == len(mounts), f"{container['name']}: mountPath twice")
        for env in container.get("env", []):
            _demand(bool(re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", env["name"])), f"env: {env['name']}")
            _demand(not (env.get("value") and env.get("valueFrom")), f"env: {env['name']} has a value and a source")
        ports = [port for port in container.get("ports", []) if port.get("name")]
        _demand(all(re.fullmatch(r"(?=.*[a-z])[a-z0-9-]{1,15}", port["name"]) for port in ports), "ports: a name")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                _demand(len(HANDLERS & set(container[probe])) == 1, f"{container['name']}: {probe}")
        resources = container.get("resources", {})
        for resource, amount in resources.get("requests", {}).items():
            limit = resources.get("limits", {}).get(resource, amount)
            _demand(_to_number(amount) <= _to_number(limit), f"{container['name']}: requests.{resource}")


def _to_number(amount: Any) -> Decimal:
    found = QUANTITY.fullmatch(str(amount))
    if found is None:
        raise ValueError(f"quantity {amount!r}")
    return Decimal(found[1]) * FACTORS[found[2] or ""]
