"""Kubernetes manifests for one cluster configuration: a KubeRay RayCluster, and the router beside it.

    python -m deploy.raycluster --config examples/cluster.yaml --image registry.example/pdserve:0.1.0 > manifest.yaml
    kubectl apply -f manifest.yaml

    ConfigMap NAME-config     the configuration, with the settings that Kubernetes decides: address auto, all interfaces
    RayCluster NAME           the head, and one group of pods for each pool, with one pod for each replica
    Deployment NAME-router    the driver `pdserve up`, and the router that it runs
    Service NAME              http and grpc, for clients
    Service NAME-link         the port that workers dial, and the one that drains them; it reaches the router before it is
                              ready as well, because the router is ready only once workers are there
    NetworkPolicy NAME-workers, NAME-router   only the cluster's pods reach each other; clients, which are the pods with the
                              label pdserve/client: NAME, reach http and grpc

KubeRay 1.5.1 or newer makes the token (Secret NAME) by which Ray's processes authenticate, and ours as well. Workers
are Ray actors, started by the driver: changing a pool means applying a new manifest, which replaces the router's pod. With
`autoscaling.enabled`, Ray's autoscaler adds pods for the workers that `pdserve up` asks for, and removes empty ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from deploy import network, pods
from pdserve.config import ADMIN_PORT, ClusterConfig, PoolConfig, load
from pdserve.core.errors import ConfigError
from pdserve.observe.log_files import STDOUT

Manifest = dict[str, Any]

DEFAULT_NAME: Final = "pdserve"
AUTOSCALER: Final = {
    "enableInTreeAutoscaling": True,
    # A pod without a worker is removed after the time. A worker that died is started again within a minute and finds its pod.
    # Version 2 asks each node itself whether it is idle.
    "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 120, "upscalingMode": "Default"},
}
FIXED_PORTS: Final = {
    "http": 8000,
    "grpc": 50051,
    "link": 50052,
    "admin": ADMIN_PORT,
}  # they replace a port 0 of the configuration, which means any free one
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # names that a Service may have, by RFC 1035
MAX_NAME: Final = 40  # KubeRay makes longer names from it, and a label has at most 63 characters


def render(config: ClusterConfig, *, image: str, name: str) -> list[Manifest]:
    """Return all objects, in an order that can be applied. Raises `ConfigError` for a name or labels that fit no pod."""
    check_name(name)
    config = on_kubernetes(config, name)
    text = yaml.safe_dump(changed(config), sort_keys=False)
    return [
        _config_map(name, text),
        _ray_cluster(config, image, name),
        _router(config, image, name, text),
        service(name, name, {"http": config.router.http_port, "grpc": config.router.grpc_port}),
        service(
            f"{name}-link",
            name,
            {"link": config.router.link_port, "admin": config.router.admin_port_or_default},
            publishNotReadyAddresses=True,
        ),
        network.worker_policy(metadata(f"{name}-workers", name, "ray"), name, labels(name, "router")),
        network.router_policy(metadata(f"{name}-router", name, "router"), name, labels(name, "router")),
    ]


def check_name(name: str) -> None:
    """Check that objects may have names that begin with this one. Raises `ConfigError`."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ConfigError(f"--name must be lower-case letters, digits and dashes, at most {MAX_NAME}, got {name!r}")


def on_kubernetes(config: ClusterConfig, name: str) -> ClusterConfig:
    """Return the configuration with the settings that Kubernetes decides, and with ports that a Service can name. Raises
    `ConfigError` for a pool with labels.
    """
    router = dataclasses.replace(
        config.router,
        host="0.0.0.0",
        link_host=None,
        advertise_host=f"{name}-link",
        http_port=config.router.http_port or FIXED_PORTS["http"],
        grpc_port=config.router.grpc_port or FIXED_PORTS["grpc"],
        link_port=config.router.link_port or FIXED_PORTS["link"],
        admin_host="0.0.0.0",
        admin_port=config.router.admin_port_or_default or FIXED_PORTS["admin"],
    )
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.labels:
            raise ConfigError(f"{role}.labels: on Kubernetes each pool has pods of its own; leave it out")
    return dataclasses.replace(
        config,
        address="auto",
        advertise_host=None,
        log_dir=config.log_dir or STDOUT,  # what is written to a file of a pod goes with the pod
        router=router,
        prefill=_on_own_pods("prefill", _with_threads(config, config.prefill)),
        decode=_on_own_pods("decode", _with_threads(config, config.decode)),
    )


def _on_own_pods(role: str, pool: PoolConfig) -> PoolConfig:
    """Give the pool a resource that only its own pods offer, each for one worker. Ray knows no other way to tie them
    together.
    """
    return pool if pool.resources else dataclasses.replace(pool, resources={f"pd_{role}": 1.0})


def _with_threads(config: ClusterConfig, pool: PoolConfig) -> PoolConfig:
    """Give the pool's workers as many threads as their pods ask cores for, which their ranks divide. Otherwise a worker counts
    the cores of the whole node.
    """
    engine = config.engine_for(pool)
    if engine.threads:
        return pool
    return dataclasses.replace(pool, engine={**pool.engine, "threads": pods.cpus_of(pool, engine) // engine.ranks})


def changed(config: Any) -> Manifest:
    """Return the settings that differ from the defaults, in the form that `load` reads."""
    rows: Manifest = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if value == default:
            continue
        rows[field.name] = changed(value) if dataclasses.is_dataclass(value) else value
    return rows


def _ray_cluster(config: ClusterConfig, image: str, name: str) -> Manifest:
    roles = {"prefill": config.prefill, "decode": config.decode}
    router = f"{name}-link:{config.router.admin_port_or_default}"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata(name, name, "ray"),
        "spec": {
            "rayVersion": ray_version(),
            "authOptions": {"mode": "token"},
            **(AUTOSCALER if config.autoscaling.enabled else {}),
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": pods.head_template(image, autoscaling=config.autoscaling.enabled),
            },
            "workerGroupSpecs": [
                _group(role, pool, config, image, name, router) for role, pool in roles.items() if sizes_of(config, pool)[2]
            ],
        },
    }


def sizes_of(config: ClusterConfig, pool: PoolConfig) -> tuple[int, int, int]:
    """Return the least, the first and the largest number of the pool's pods. They differ only where the sizes may change by
    themselves: Ray's autoscaler then adds pods for workers that wait, and removes those without one.
    """
    if not config.autoscaling.enabled:
        return pool.replicas, pool.replicas, pool.replicas
    limit = config.autoscaling.max_workers
    return pool.least, pool.replicas, pool.most if limit is None else min(pool.most, limit)


def _group(role: str, pool: PoolConfig, config: ClusterConfig, image: str, name: str, router: str) -> Manifest:
    """Return a group with one pod for each worker. Each pod offers exactly what one worker of the pool asks Ray for."""
    least, replicas, most = sizes_of(config, pool)
    return {
        "groupName": role,
        "replicas": replicas,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": pods.ray_start_params(pool, config.engine_for(pool)),
        "template": pods.worker_template(
            image,
            pool,
            config.engine_for(pool),
            router=router,
            token_secret=name,
            drain_timeout_s=config.drain_timeout_s,
        ),
    }


def _router(config: ClusterConfig, image: str, name: str, config_text: str) -> Manifest:
    ports = {
        "http": config.router.http_port,
        "grpc": config.router.grpc_port,
        "link": config.router.link_port,
        "admin": config.router.admin_port_or_default,
    }
    template = pods.router_template(image, head=f"{name}-head-svc", token_secret=name, ports=ports, config_map=f"{name}-config")
    digest = hashlib.sha256(config_text.encode()).hexdigest()[:16]
    template["metadata"] = {"labels": labels(name, "router"), "annotations": {"pdserve/config": digest}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(f"{name}-router", name, "router"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # two drivers would both ask Ray for every worker
            "selector": {"matchLabels": labels(name, "router")},
            "template": template,
        },
    }


def _config_map(name: str, text: str) -> Manifest:
    own = metadata(f"{name}-config", name, "config")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": own, "data": {"cluster.yaml": text}}


def service(own: str, name: str, ports: dict[str, int], **spec: Any) -> Manifest:
    """Return a Service of the cluster's router under its own name. Beats pass over UDP at the number of the link's port."""
    numbers: list[Manifest] = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
    if "link" in ports:
        numbers.append({"name": "beats", "protocol": "UDP", "port": ports["link"], "targetPort": "beats"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(own, name, "router"),
        "spec": {
            "selector": labels(name, "router"),
            "ports": numbers,
            **spec,
        },
    }


def metadata(own: str, name: str, component: str) -> Manifest:
    """Return the name and the labels of an object of the cluster."""
    return {"name": own, "labels": labels(name, component)}


def labels(name: str, component: str) -> dict[str, str]:
    """Return the labels of one part of the cluster."""
    return {
        "app.kubernetes.io/name": "pdserve",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
    }


def ray_version() -> str:
    """Return the pinned version of Ray, which is the one in the image. KubeRay decides by it which options Ray understands."""
    constraints = Path(__file__).resolve().parents[1] / "requirements" / "constraints.txt"
    match = re.search(r"^ray==(\S+)$", constraints.read_text(), re.MULTILINE)
    assert match is not None, "requirements/constraints.txt pins ray"
    return match[1]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """Return one stream of YAML documents. Shared parts are written out, without anchors."""
    return yaml.dump_all(manifests, Dumper=_PlainDumper, sort_keys=False, explicit_start=True, width=120)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a text of several lines as a block: a file inside a manifest is readable only so."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_PlainDumper.add_representer(str, _text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifests. Return 0, or 2 when the configuration is wrong."""
    parser = argparse.ArgumentParser(description="Print the Kubernetes manifests of one cluster configuration.")
    parser.add_argument("--config", required=True, help="the YAML that `pdserve up` takes")
    parser.add_argument("--image", required=True, help="the image, built from deploy/Containerfile")
    parser.add_argument("--name", default=DEFAULT_NAME)
    args = parser.parse_args(argv)
    try:
        manifests = render(load(ClusterConfig, args.config), image=args.image, name=args.name)
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 2
    sys.stdout.write(to_yaml(manifests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
