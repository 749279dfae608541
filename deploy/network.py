"""NetworkPolicies of the manifest: who may reach the pods of one cluster. docs/threat-model.md says why it matters.

Workers and Ray's own processes trust everybody who reaches them, so only pods of this cluster may reach them. Clients reach
the router's two front ends and nothing else; a client is a pod of the same namespace with the label CLIENT_LABEL: NAME.
The traffic that pods send is not restricted. A cluster whose network plugin enforces no policies ignores all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

Manifest = dict[str, Any]

CLIENT_LABEL: Final = "pdserve/client"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
RAY_CLUSTER_LABEL: Final = "ray.io/cluster"
"""KubeRay gives this label to every pod of a RayCluster; its value is the cluster's name."""


def worker_policy(metadata: Manifest, name: str, router_labels: Manifest) -> Manifest:
    """Return the policy of Ray's head and the workers' pods: they accept the cluster's own pods, at any port."""
    return _policy(metadata, _ray_pods(name), [{"from": _own_pods(name, router_labels)}])


def router_policy(metadata: Manifest, name: str, router_labels: Manifest) -> Manifest:
    """Return the policy of the router's pod, which is a Ray node as well: it accepts the cluster's own pods at any port, and
    clients at its front ends.
    """
    clients = {
        "from": [{"podSelector": {"matchLabels": {CLIENT_LABEL: name}}}],
        "ports": [{"protocol": "TCP", "port": port} for port in ("http", "grpc")],
    }
    return _policy(metadata, {"matchLabels": router_labels}, [{"from": _own_pods(name, router_labels)}, clients])


def standalone_policies(
    name: str, router_labels: Manifest, metadata: Callable[[str, str, str], Manifest], roles: Sequence[str]
) -> list[Manifest]:
    """Return the same policies for pods without Ray: workers are the pods with the labels of a role."""
    own = [{"podSelector": {"matchLabels": {**router_labels, COMPONENT_LABEL: each}}} for each in ("router", *roles)]
    clients = {
        "from": [{"podSelector": {"matchLabels": {CLIENT_LABEL: name}}}],
        "ports": [{"protocol": "TCP", "port": port} for port in ("http", "grpc")],
    }
    router = _policy(metadata(f"{name}-router", name, "router"), {"matchLabels": router_labels}, [{"from": own}, clients])
    return [
        router,
        *(
            _policy(metadata(f"{name}-{role}", name, role), pods["podSelector"], [{"from": own}])
            for role, pods in zip(roles, own[1:], strict=True)
        ),
    ]


def _own_pods(name: str, router_labels: Manifest) -> list[Manifest]:
    return [{"podSelector": _ray_pods(name)}, {"podSelector": {"matchLabels": router_labels}}]


def _ray_pods(name: str) -> Manifest:
    return {"matchLabels": {RAY_CLUSTER_LABEL: name}}


def _policy(metadata: Manifest, pods: Manifest, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }
