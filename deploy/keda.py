"""Kubernetes manifests for one cluster configuration without Ray: Deployments of both pools, whose sizes KEDA decides.

    python -m deploy.keda --config examples/cluster.yaml --image IMAGE --prometheus http://prometheus.monitoring:9090 > m.yaml
    kubectl create secret generic pdserve --from-literal=auth_token=$(openssl rand -hex 32)
    kubectl apply -f m.yaml

    ConfigMap NAME-config                the settings of the router and of the workers of each role
    Deployment NAME-router, NAME-ROLE    the router, and the workers of each pool
    ScaledObject NAME-ROLE               KEDA's rules for the sizes, over the router's metrics in Prometheus
    Service, NetworkPolicy               as in deploy/raycluster.py; Prometheus needs the label of a client

The planner of `pdserve up` has no part in it, so `autoscaling.enabled` and policies of your own are refused.
docs/autoscaling.md says which way suits when.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from deploy import network, pods
from deploy.raycluster import DEFAULT_NAME, Manifest, changed, check_name, labels, metadata, on_kubernetes, service, to_yaml
from pdserve.cluster.plan import WORKER_ENTRIES, Blueprint, router_config
from pdserve.config import PLANNER, ClusterConfig, PoolConfig, load
from pdserve.core.errors import ConfigError

BUSY: Final = "0.7"
"""The share of the time in which prefill workers should be busy. The rest keeps the waits for the first token short."""
KV_USED: Final = "0.8"
SEQUENCES_SHARE: Final = 0.9  # the planner's default
POLL_S: Final = 15
SHRINK_AFTER_S: Final = 300  # the planner's default: a pool shrinks to the largest need of so long a time


def render(config: ClusterConfig, *, image: str, name: str, prometheus: str, matcher: str | None = None) -> list[Manifest]:
    """Return all objects. matcher: the labels by which Prometheus tells this cluster's series. Raises `ConfigError`."""
    check_name(name)
    if config.autoscaling.enabled or {config.prefill.scaling_policy, config.decode.scaling_policy} != {PLANNER}:
        raise ConfigError(
            "autoscaling.enabled and scaling_policy belong to `pdserve up`, which does not run here: leave them out"
        )
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.replicas and pool.max_replicas is None:
            raise ConfigError(f"{role}.max_replicas must be set: KEDA would add pods without a limit")
    if config.prefill.most and not config.prefill.least:
        raise ConfigError("prefill.min_replicas must be at least 1: an empty pool is never busy, so KEDA would never start it")
    for limit in ("max_workers", "max_cpus", "max_gpus", "max_price_per_hour"):
        if getattr(config.autoscaling, limit) is not None:
            raise ConfigError(f"autoscaling.{limit}: KEDA knows no limit of both pools together; set max_replicas of each")
    config = on_kubernetes(config, name)
    pools = {role: pool for role, pool in (("prefill", config.prefill), ("decode", config.decode)) if pool.most}
    files = settings_files(config, name, pools)
    matcher = matcher if matcher is not None else f'app_kubernetes_io_instance="{name}"'
    return [
        *around_workers(config, image, name, files),
        *(_workers(config, image, name, role, pool, files[f"{role}.yaml"]) for role, pool in pools.items()),
        *(_scaled(config, name, role, pool, prometheus, matcher) for role, pool in pools.items()),
    ]


def around_workers(config: ClusterConfig, image: str, name: str, files: dict[str, str]) -> list[Manifest]:
    """Return the objects around workers without Ray: their settings, the router, its Services, and who may reach whom.

    files: `settings_files`, one for the router and one for each role that has workers.
    """
    ports = {
        "http": config.router.http_port,
        "grpc": config.router.grpc_port,
        "link": config.router.link_port,
        "admin": config.router.admin_port_or_default,
    }
    front = {port: ports[port] for port in ("http", "grpc")}
    link = {port: ports[port] for port in ("link", "admin")}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(f"{name}-config", name, "config"),
        "data": files,
    }
    router = pods.standalone_router_template(image, token_secret=name, ports=ports, config_map=f"{name}-config")
    return [
        config_map,
        _deployment(name, "router", 1, router, files["router.yaml"]),
        service(name, name, front),
        service(f"{name}-link", name, link, publishNotReadyAddresses=True),
        *network.standalone_policies(
            name, labels(name, "router"), metadata, [role for role in ("prefill", "decode") if f"{role}.yaml" in files]
        ),
    ]


def settings_files(config: ClusterConfig, name: str, pools: dict[str, PoolConfig]) -> dict[str, str]:
    """Return the files of settings. The token and what only a pod knows are added in the pods."""
    link = f"{name}-link:{config.router.link_port}"
    blueprint = Blueprint(config, link, "", Path(), WORKER_ENTRIES)
    router = changed(router_config(config, "in-the-secret", ""))
    files = {"router.yaml": {key: value for key, value in router.items() if key != "cluster_token"}}
    for role in pools:
        worker = dataclasses.replace(blueprint.plan(role, role).config, allow_public_bind=True)
        files[f"{role}.yaml"] = {
            key: value for key, value in changed(worker).items() if key not in ("worker_id", "advertise_host")
        }
    return {file: yaml.safe_dump(rows, sort_keys=False) for file, rows in files.items()}


def _workers(config: ClusterConfig, image: str, name: str, role: str, pool: PoolConfig, text: str) -> Manifest:
    template = pods.standalone_worker_template(
        image,
        role,
        pool,
        config.engine_for(pool),
        token_secret=name,
        config_map=f"{name}-config",
        drain_timeout_s=config.drain_timeout_s,
    )
    return _deployment(name, role, None, template, text)


def mark(template: Manifest, name: str, component: str, text: str) -> None:
    """Give the pods of a template their labels, and a mark that changes with their settings."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    template["metadata"] = {"labels": labels(name, component), "annotations": {"pdserve/config": digest}}


def _deployment(name: str, component: str, replicas: int | None, template: Manifest, text: str) -> Manifest:
    """Return a Deployment, whose pods are replaced when their settings change. replicas None: KEDA alone decides."""
    mark(template, name, component, text)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(f"{name}-{component}", name, component),
        "spec": {
            **({} if replicas is None else {"replicas": replicas, "strategy": {"type": "Recreate"}}),
            "selector": {"matchLabels": labels(name, component)},
            "template": template,
        },
    }


def _scaled(config: ClusterConfig, name: str, role: str, pool: PoolConfig, prometheus: str, matcher: str) -> Manifest:
    """Return KEDA's rules for one pool. While Prometheus does not answer, or knows no value, the pool keeps its size."""
    queries = _prefill_queries(matcher) if role == "prefill" else _decode_queries(config, matcher)
    shrink = {"stabilizationWindowSeconds": SHRINK_AFTER_S, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(f"{name}-{role}", name, role),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-{role}"},
            "minReplicaCount": pool.least,
            "maxReplicaCount": pool.most,
            "pollingInterval": POLL_S,
            "fallback": {"failureThreshold": 3, "replicas": pool.replicas, "behavior": "currentReplicas"},
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": shrink}}},
            "triggers": [
                {
                    "type": "prometheus",
                    "name": trigger,
                    "metricType": "AverageValue",  # the value over the threshold is the number of workers
                    "metadata": {
                        "serverAddress": prometheus,
                        "query": query,
                        "threshold": threshold,
                        "ignoreNullValues": "false",  # a value that nobody knows is no 0
                    },
                }
                for trigger, query, threshold in queries
            ],
        },
    }


def _prefill_queries(matcher: str) -> list[tuple[str, str, str]]:
    """Return name, query and value for one worker of each trigger. Prefill is bound by compute, so busy workers are measured.

    They are 0 in an idle pool, and cached prompts and those that decode workers compute keep nobody busy.
    """
    busy_s = f'pdserve_pool_prompt_busy_seconds_total{{{_and(matcher)}role="prefill"}}'
    return [("busy-workers", f"sum(rate({busy_s}[1m]))", BUSY)]


def _decode_queries(config: ClusterConfig, matcher: str) -> list[tuple[str, str, str]]:
    """Return the same for decode, which is bound by KV memory and by the sequences of a step."""
    decode = f'{{{_and(matcher)}role="decode"}}'
    sequences = SEQUENCES_SHARE * config.engine_for(config.decode).max_num_seqs
    waiting = f"sum(pdserve_num_requests_waiting{{{matcher}}})"
    return [
        ("kv-used", f"sum(pdserve_pool_kv_used{decode} * pdserve_pool_workers_ready{decode})", KV_USED),
        ("sequences", f"sum(pdserve_pool_running_sequences{decode}) + {waiting}", f"{sequences:g}"),
    ]


def _and(matcher: str) -> str:
    return f"{matcher}," if matcher else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifests. Return 0, or 2 when the configuration is wrong."""
    parser = argparse.ArgumentParser(description="Print Kubernetes manifests whose pools KEDA sizes.")
    parser.add_argument("--config", required=True, help="the YAML that `pdserve up` takes")
    parser.add_argument("--image", required=True, help="the image, built from deploy/Containerfile")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--prometheus", required=True, help="the URL of the Prometheus that scrapes the router")
    parser.add_argument("--matcher", help='the labels of this cluster in it; default: app_kubernetes_io_instance="NAME"')
    args = parser.parse_args(argv)
    try:
        config: Any = load(ClusterConfig, args.config)
        manifests = render(config, image=args.image, name=args.name, prometheus=args.prometheus, matcher=args.matcher)
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 2
    sys.stdout.write(to_yaml(manifests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
