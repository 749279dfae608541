"""NetworkPolicies of the manifest: who may reach the pods of one cluster. docs/threat-model.md says why it matters.

Workers trust whoever reaches them, and so do Ray's own processes: only pods of this cluster may. Clients reach the router's
two front ends and nothing else; a client is a pod of the same namespace with the label CLIENT_LABEL: NAME.
What pods send is not restricted. A cluster whose network plugin does not enforce policies ignores all of this.
"""

from __future__ import annotations

from typing import Any, Final

Manifest = dict[str, Any]

CLIENT_LABEL: Final = "pdserve/client"
RAY_CLUSTER_LABEL: Final = "ray.io/cluster"
"""KubeRay gives it to every pod of a RayCluster, with the cluster's name."""


def worker_policy(metadata: Manifest, name: str, router_labels: Manifest) -> Manifest:
    """Ray's head and the workers' pods: from each other and the router, at any port."""
    return _policy(metadata, _ray_pods(name), [{"from": _own_pods(name, router_labels)}])


def router_policy(metadata: Manifest, name: str, router_labels: Manifest) -> Manifest:
    """The router's pod, which is a Ray node as well: all from the cluster's own pods, its front ends from clients."""
    clients = {
        "from": [{"podSelector": {"matchLabels": {CLIENT_LABEL: name}}}],
        "ports": [{"protocol": "TCP", "port": port} for port in ("http", "grpc")],
    }
    return _policy(metadata, {"matchLabels": router_labels}, [{"from": _own_pods(name, router_labels)}, clients])


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
