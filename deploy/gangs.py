"""Kubernetes manifests for workers that drive servers of vLLM over one or several pods, each of which is replaced as a whole.

    python -m deploy.gangs --config examples/nodes-671b.yaml --image IMAGE --kind lws --model-claim models > manifest.yaml
    python -m deploy.gangs --config examples/nodes-671b.yaml --image IMAGE --kind ray --model-claim models > manifest.yaml

    --kind lws   without Ray, as deploy/keda.py: a LeaderWorkerSet NAME-ROLE for each pool, with a group of pods for each worker
    --kind ray   as deploy/raycluster.py: the group of a pool has `numOfHosts` pods for each worker, and a Service
                 NAME-ROLE-INDEX finds the first of them

A worker has `engine.vllm.nodes` pods. Its process is in the first one, and starts the first node of its server there; each
other pod runs `python -m pdserve.worker.vllm.follower`. LeaderWorkerSet makes a group anew when one of its containers has
ended. KubeRay does so when one of its pods is gone, with the feature gate RayMultiHostIndexing (in 1.5 off, in 1.6 on unless
somebody changes it), which also numbers the pods.

The image has vLLM beside pdserve (docs/engines.md), and the claim has the models. docs/multi-node.md has two examples.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Final

import yaml

from deploy import keda, pods, raycluster
from deploy.raycluster import DEFAULT_NAME, Manifest, changed, metadata, on_kubernetes, to_yaml
from pdserve.config import ClusterConfig, PoolConfig, load
from pdserve.core.errors import ConfigError

KINDS: Final = ("lws", "ray")
CONFIG: Final = "/etc/pdserve/cluster.yaml"
HOST_INDEX: Final = "ray.io/replica-host-index"
REPLICA_INDEX: Final = "ray.io/worker-group-replica-index"
"""KubeRay gives these labels to the pods of a group with several hosts."""


def render(config: ClusterConfig, *, image: str, name: str, kind: str, claim: str) -> list[Manifest]:
    """Return all objects. claim: the PersistentVolumeClaim with the models. Raises `ConfigError` that names a setting."""
    config = _checked(config)
    raycluster.check_name(name)
    if kind == "ray":
        return _on_ray(config, image, name, claim)
    config = on_kubernetes(config, name)
    files = keda.settings_files(config, name, _pools(config))
    files[CONFIG.rpartition("/")[2]] = yaml.safe_dump(changed(config), sort_keys=False)  # followers read it
    around = keda.around_workers(config, image, name, files)
    pods.mount_models(around[1]["spec"]["template"], claim)  # the router reads the tokenizer
    sets = [
        _leader_worker_set(config, role, pool, image=image, name=name, claim=claim, text=files[f"{role}.yaml"])
        for role, pool in _pools(config).items()
    ]
    return [*around, *sets]


def _pools(config: ClusterConfig) -> dict[str, PoolConfig]:
    return {role: pool for role, pool in (("prefill", config.prefill), ("decode", config.decode)) if pool.replicas}


def _checked(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with a GPU for each rank. Raises `ConfigError` for what such pods cannot be."""
    if config.autoscaling.enabled:
        raise ConfigError("autoscaling.enabled: the numbers of gangs over pods are fixed; leave it out and set replicas")
    for role, pool in _pools(config).items():
        engine = config.engine_for(pool)
        if engine.backend != "vllm" or engine.vllm.url:
            raise ConfigError(f"{role}.engine.backend must be vllm, without vllm.url: only vLLM computes over several pods")
        if not engine.vllm.command:
            raise ConfigError(f"{role}.engine.vllm.command must name the image's vLLM: see examples/nodes-671b.yaml")
        if not engine.model.startswith(f"{pods.MODELS}/"):
            raise ConfigError(f"{role}.engine.model must be a directory of the claim, {pods.MODELS}/NAME, got {engine.model!r}")
        if engine.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{role}.engine.pipeline_parallel_size {engine.pipeline_parallel_size}: vLLM's NixlConnector hands over no KV "
                f"of stages; use tensor_parallel_size {engine.degrees.ranks} and pipeline_parallel_size 1"
            )
        if pool.num_gpus not in (0, engine.ranks):
            raise ConfigError(f"{role}.num_gpus {pool.num_gpus:g}: a pod has {engine.ranks} ranks, each on a GPU; leave it out")
    with_gpus = {
        role: dataclasses.replace(pool, num_gpus=float(config.engine_for(pool).ranks)) for role, pool in _pools(config).items()
    }
    return dataclasses.replace(config, **with_gpus)


def _leader_worker_set(
    config: ClusterConfig, role: str, pool: PoolConfig, *, image: str, name: str, claim: str, text: str
) -> Manifest:
    """Return the groups of one pool. A group of one pod has no followers, so its leader's template is the only one."""
    engine = config.engine_for(pool)
    leader = pods.standalone_worker_template(
        image,
        role,
        pool,
        engine,
        token_secret=name,
        config_map=f"{name}-config",
        drain_timeout_s=config.drain_timeout_s,
    )
    follower = pods.follower_template(
        image,
        pool,
        engine,
        script=_follow(role, "$LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS"),
        first="$LWS_LEADER_ADDRESS",
        config_map=f"{name}-config",
        drain_timeout_s=config.drain_timeout_s,
    )
    for template in (leader, follower):
        keda.mark(template, name, role, text)
        pods.mount_models(template, claim)
        pods.share_memory(template)
    templates = {"workerTemplate": leader}
    if engine.vllm.nodes > 1:
        templates = {"leaderTemplate": leader, "workerTemplate": follower}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(f"{name}-{role}", name, role),
        "spec": {
            "replicas": pool.replicas,
            "leaderWorkerTemplate": {
                "size": engine.vllm.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                **templates,
            },
        },
    }


def _follow(role: str, rank: str, first: str) -> str:
    """Return the shell's command of a further pod. rank, first: variables of the pod."""
    module = "exec python -m pdserve.worker.vllm.follower"
    return f'{module} --config {CONFIG} --role {role} --node-rank "{rank}" --first "{first}" --host "$POD_IP"'


def _on_ray(config: ClusterConfig, image: str, name: str, claim: str) -> list[Manifest]:
    """Return the objects of deploy/raycluster.py, in which each worker has a pod for each of its nodes."""
    manifests = raycluster.render(config, image=image, name=name)
    found = {manifest["kind"]: manifest for manifest in manifests}
    pods.mount_models(found["Deployment"]["spec"]["template"], claim)
    services = []
    for group in found["RayCluster"]["spec"]["workerGroupSpecs"]:
        role, template = group["groupName"], group["template"]
        pool = _pools(config)[role]
        engine = config.engine_for(pool)
        group["numOfHosts"] = engine.vllm.nodes
        pods.mount_models(template, claim)
        pods.share_memory(template)
        if engine.vllm.nodes > 1:
            first = f"{name}-{role}-$REPLICA_INDEX"
            pods.as_one_of_several(
                template,
                follow=_follow(role, "$HOST_INDEX", first),
                first=first,
                config_map=f"{name}-config",
                host_label=HOST_INDEX,
                replica_label=REPLICA_INDEX,
            )
            services += [_first_pod(name, role, index) for index in range(pool.replicas)]
    return [*manifests, *services]


def _first_pod(name: str, role: str, index: int) -> Manifest:
    """Return the Service by which the other pods of one worker find its first one, before that is ready."""
    selector = {"ray.io/cluster": name, "ray.io/group": role, REPLICA_INDEX: str(index), HOST_INDEX: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(f"{name}-{role}-{index}", name, role),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifests. Return 0, or 2 when the configuration is wrong."""
    parser = argparse.ArgumentParser(description="Print Kubernetes manifests of workers over several pods.")
    parser.add_argument("--config", required=True, help="the YAML that `pdserve up` takes, with engine.vllm.nodes")
    parser.add_argument("--image", required=True, help="an image with pdserve and vLLM")
    parser.add_argument("--kind", required=True, choices=KINDS, help="LeaderWorkerSets without Ray, or a RayCluster")
    parser.add_argument("--model-claim", required=True, help=f"the PersistentVolumeClaim that is mounted at {pods.MODELS}")
    parser.add_argument("--name", default=DEFAULT_NAME)
    args = parser.parse_args(argv)
    try:
        config: Any = load(ClusterConfig, args.config)
        manifests = render(config, image=args.image, name=args.name, kind=args.kind, claim=args.model_claim)
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
        return 2
    sys.stdout.write(to_yaml(manifests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
