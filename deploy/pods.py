"""Containers and pods of the manifest: what each kind of process needs, and which probes ask for its health."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from pdserve.cluster.keeping.guard import NODE_LEAVING
from pdserve.config import MIB, EngineConfig, PoolConfig
from pdserve.worker.vllm.server import NODES_PORT

Manifest = dict[str, Any]

GCS_PORT: Final = 6379
RAYLET_PORT: Final = 6380  # fixed, so that a probe can find it; Ray would choose a random one
PROBE_PERIOD_S: Final = 10
START_LIMIT_S: Final = 300  # a first start may convert or download a model
TERMINATION_GRACE_S: Final = 30  # `pdserve up` stops all its processes in less than 10
RAY_DRAIN_S: Final = "1"
"""Seconds that Ray waits for a node to become idle. A node with an actor never does, and Ray's default is 30 s. With 0 Ray
would not even mark the node as leaving, and the worker's loss would count as one of its restarts of the hour."""

MODELS: Final = "/models"
"""The folder at which pods of gangs find the claim with the models."""

HEAD_MEMORY_MIB: Final = 2048  # Ray's own processes
ROUTER_MEMORY_MIB: Final = 2048  # a Ray node without workers, the driver, the router with its tokenizer
WORKER_BASE_MEMORY_MIB: Final = 4096
"""Memory of a worker's pod beside the KV pool: a Ray node (1 GiB), torch and its buffers (1 GiB), and weights (2 GiB, which
is four times the default model in fp32). A larger model needs more; set it in the manifest."""
GPU_RANK_MEMORY_MIB: Final = 16 * 1024
"""Memory of each GPU of a server of vLLM: a process with torch and CUDA, its pinned buffers, and its share of /dev/shm. It is a
guess: no such pod has run. Weights are read from mapped files, whose pages the kernel takes back."""
RANK_MEMORY_MIB: Final = 1024
"""Memory of each further rank of a worker: torch and its buffers. Ranks divide the weights, and share the KV pool."""

_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_POD_SECURITY: Final = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}


def head_template(image: str, *, autoscaling: bool = False) -> Manifest:
    """Return the pod of Ray's head, which only controls the cluster. It offers no resources, so Ray places nothing of ours on
    it. autoscaling: KubeRay adds Ray's autoscaler to the pod, which needs the account that KubeRay makes for it.
    """
    ports = [{"containerPort": GCS_PORT, "name": "gcs"}]
    container = _container("ray-head", image, _resources(cpus=1, memory_mib=HEAD_MEMORY_MIB))
    return _template([{**container, "ports": ports, **_tcp_probes(GCS_PORT)}], automountServiceAccountToken=autoscaling)


def worker_template(
    image: str, pool: PoolConfig, engine: EngineConfig, *, router: str, token_secret: str, drain_timeout_s: float
) -> Manifest:
    """Return the pod of one worker. Ray starts our actor in it because no other pod offers the pool's resource.

    The pod's SIGTERM goes to Ray, which does not pass it on and ends our worker after a while. Therefore a hook drains the
    worker before: it asks `router` (host:port of its administration), and leaves a mark that the node goes. Ray then finds the
    worker lost with its node, and starts it on another pod.
    """
    resources = _resources(cpus=cpus_of(pool, engine), memory_mib=_memory_mib(pool, engine), gpus=math.ceil(pool.num_gpus))
    script = f'touch {NODE_LEAVING}; exec pdserve drain --on-host "$POD_IP" --router {router}'
    container = {
        **_container("ray-worker", image, resources),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            _cluster_token(token_secret),
            {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": RAY_DRAIN_S},
            {"name": "RAY_worker_niceness", "value": "0"},  # Ray's default is 15: other pods of the node would go first
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}},
        **_tcp_probes(RAYLET_PORT),
    }
    return _template([container], terminationGracePeriodSeconds=_drain_grace_s(drain_timeout_s))


def cpus_of(pool: PoolConfig, engine: EngineConfig) -> int:
    """Return the cores that a worker of the pool may count on. Each of its ranks has as many as Ray sets aside for it, and no
    fewer than its threads."""
    return max(1, math.ceil(pool.num_cpus), engine.threads) * engine.ranks


def _memory_mib(pool: PoolConfig, engine: EngineConfig) -> int:
    """Return the memory of a worker's pod. The KV of a worker on a GPU is in the device's memory."""
    if engine.backend == "vllm" and pool.num_gpus > 0:
        return WORKER_BASE_MEMORY_MIB + engine.ranks * GPU_RANK_MEMORY_MIB
    kv_mib = 0 if pool.num_gpus > 0 else math.ceil(engine.cpu_kv_bytes / MIB)
    return WORKER_BASE_MEMORY_MIB + (engine.ranks - 1) * RANK_MEMORY_MIB + kv_mib


def ray_start_params(pool: PoolConfig, engine: EngineConfig) -> dict[str, str]:
    """Return the arguments of `ray start` on a pool's pods. KubeRay wants the JSON of custom resources quoted once more."""
    params = {
        "num-cpus": str(math.ceil(pool.num_cpus) * engine.ranks),
        "node-manager-port": str(RAYLET_PORT),
        "resources": json.dumps(json.dumps(pool.resources)),
    }
    if pool.num_gpus:
        params["num-gpus"] = str(math.ceil(pool.num_gpus))
    return params


def router_template(image: str, *, head: str, token_secret: str, ports: dict[str, int], config_map: str) -> Manifest:
    """Return the router's pod: a Ray node without resources that runs the driver, `pdserve up`, which runs the router.

    The pod does not belong to the RayCluster: so Ray's head can stay while the router is rolled, and the driver's signals and
    exit status are the pod's own. `ray start` leaves its daemons running, and then the driver replaces the shell.
    """
    script = (
        f"ray start --address={head}:{GCS_PORT} --num-cpus=0 --num-gpus=0 && exec pdserve up --config /etc/pdserve/cluster.yaml"
    )
    container = {
        **_container("router", image, _resources(cpus=1, memory_mib=ROUTER_MEMORY_MIB)),
        "command": ["/bin/bash", "-c", script],
        "env": [
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "valueFrom": _token(token_secret)},
            _cluster_token(token_secret),
        ],
        "ports": _ports(ports),
        "volumeMounts": [{"name": "config", "mountPath": "/etc/pdserve", "readOnly": True}],
        **_router_probes(),
    }
    return _template([container], volumes=[{"name": "config", "configMap": {"name": config_map}}])


def standalone_router_template(image: str, *, token_secret: str, ports: dict[str, int], config_map: str) -> Manifest:
    """Return the pod of a router that no `pdserve up` runs. Workers of other pods dial it."""
    container = {
        **_container("router", image, _resources(cpus=1, memory_mib=ROUTER_MEMORY_MIB)),
        "command": ["/bin/sh", "-c", _with_secret("router", [], "router")],
        "env": [_cluster_token(token_secret)],
        "ports": _ports(ports),
        "volumeMounts": [{"name": "config", "mountPath": "/etc/pdserve", "readOnly": True}],
        **_router_probes(),
    }
    return _template([container], volumes=[{"name": "config", "configMap": {"name": config_map}}])


def standalone_worker_template(
    image: str,
    role: str,
    pool: PoolConfig,
    engine: EngineConfig,
    *,
    token_secret: str,
    config_map: str,
    drain_timeout_s: float,
) -> Manifest:
    """Return the pod of one worker without Ray. Its process is the container's first one, so that the pod's SIGTERM drains it;
    the grace period is longer than a drain may take. A worker that gave itself up ends, and is started again.
    """
    resources = _resources(cpus=cpus_of(pool, engine), memory_mib=_memory_mib(pool, engine), gpus=math.ceil(pool.num_gpus))
    own = ['worker_id: "$POD_NAME"', 'host: "$POD_IP"', 'advertise_host: "$POD_IP"']
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    container = {
        **_container("worker", image, resources),
        "command": ["/bin/sh", "-c", _with_secret(role, own, f"{role}_worker")],
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
            _cluster_token(token_secret),
        ],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/pdserve", "readOnly": True}],
    }
    volumes = [{"name": "config", "configMap": {"name": config_map}}]
    return _template([container], terminationGracePeriodSeconds=_drain_grace_s(drain_timeout_s), volumes=volumes)


# Gangs over pods: a server of vLLM has a node in each, and the worker is in the first one (deploy/gangs.py).


def mount_models(template: Manifest, claim: str) -> None:
    """Let all containers of a pod read the claim with the models."""
    _mount(template, "models", MODELS, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}})


def share_memory(template: Manifest) -> None:
    """Give a pod memory that its processes share, within its limit: GPUs of one machine exchange data by it, and a plain
    container has 64 MiB."""
    _mount(template, "shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}})


def _mount(template: Manifest, name: str, path: str, source: Manifest) -> None:
    spec = template["spec"]
    spec["volumes"] = [*spec.get("volumes", []), {"name": name, **source}]
    for container in spec["containers"]:
        read_only = {"readOnly": True} if name == "models" else {}
        container["volumeMounts"] = [*container.get("volumeMounts", []), {"name": name, "mountPath": path, **read_only}]


def follower_template(
    image: str, pool: PoolConfig, engine: EngineConfig, *, script: str, first: str, config_map: str, drain_timeout_s: float
) -> Manifest:
    """Return a further pod of a gang. Its process is vLLM's; it ends after the first pod's, whose worker may drain before.

    script: the shell's command. first: the address of the first pod.
    """
    resources = _resources(cpus=cpus_of(pool, engine), memory_mib=_memory_mib(pool, engine), gpus=math.ceil(pool.num_gpus))
    container = {
        **_container("follower", image, resources),
        "command": ["/bin/bash", "-c", script],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/bash", "-c", _until_ends(first)]}}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/pdserve", "readOnly": True}],
    }
    volumes = [{"name": "config", "configMap": {"name": config_map}}]
    return _template([container], terminationGracePeriodSeconds=_drain_grace_s(drain_timeout_s), volumes=volumes)


def as_one_of_several(
    template: Manifest, *, follow: str, first: str, config_map: str, host_label: str, replica_label: str
) -> None:
    """Make the template of a worker's pod on Ray that of all pods of its gang: KubeRay has one for both.

    The first pod, with index 0, is the node of Ray. The others are none, so Ray starts no worker there; they run `follow`. The
    annotation leaves the command to us, and KubeRay puts its own into a variable.
    """
    template["metadata"] = {"annotations": {"ray.io/overwrite-container-cmd": "true"}}
    (container,) = template["spec"]["containers"]
    join = 'ulimit -n 65536; eval "exec $KUBERAY_GEN_RAY_START_CMD"'
    container["command"] = ["/bin/bash", "-c", _by_index(join, follow)]
    container["env"] = [
        *container["env"],
        *(
            {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
            for variable, label in (("HOST_INDEX", host_label), ("REPLICA_INDEX", replica_label))
        ),
    ]
    drain = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/bash", "-c", _by_index(drain, _until_ends(first))]}}}
    look = _by_index(f'exec 3<>"/dev/tcp/$POD_IP/{RAYLET_PORT}"', "exit 0")
    for probe in ("readinessProbe", "livenessProbe"):
        timing = {key: value for key, value in container[probe].items() if key != "tcpSocket"}
        container[probe] = {"exec": {"command": ["/bin/bash", "-c", look]}, **timing}
    _mount(template, "config", "/etc/pdserve", {"configMap": {"name": config_map}})


def _by_index(first: str, others: str) -> str:
    return f'if [ "$HOST_INDEX" = 0 ]; then {first}; else {others}; fi'


def _until_ends(first: str) -> str:
    """Return a script that waits until the server of vLLM in the first pod has ended. The pod's grace period bounds it."""
    return f'while (exec 3<>"/dev/tcp/{first}/{NODES_PORT}") 2>/dev/null; do sleep 2; done'


def _drain_grace_s(drain_timeout_s: float) -> int:
    """Return the grace period of a worker's pod. It includes the time of the preStop hook, which drains the worker."""
    return math.ceil(drain_timeout_s) + TERMINATION_GRACE_S


def _with_secret(file: str, lines: list[str], module: str) -> str:
    """Return a script that adds what only the pod knows to a file of settings, and becomes the process of the module."""
    added = "\n".join([*lines, 'cluster_token: "$PDSERVE_CLUSTER_TOKEN"'])
    made = f"/tmp/{file}.yaml"
    copied = f"umask 077\ncat /etc/pdserve/{file}.yaml > {made}\ncat >> {made} <<END\n{added}\nEND"
    return f"set -eu\n{copied}\nexec python -m {module} --config {made}"


def _ports(ports: dict[str, int]) -> list[Manifest]:
    """Return the ports of the router's container. Beats pass over UDP at the number of the link's port."""
    listed: list[Manifest] = [{"containerPort": port, "name": name} for name, port in ports.items()]
    return [*listed, {"containerPort": ports["link"], "name": "beats", "protocol": "UDP"}]


def _router_probes() -> Manifest:
    """Return the probes of the router. Ready means that a request would be served; alive means that the router answers at all.

    /health must not decide about life: it is 503 while the last decode worker is being restarted, and killing the router then
    would kill every worker that is still fine.
    """
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 2}
    alive = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5}
    start = {**alive, "failureThreshold": START_LIMIT_S // PROBE_PERIOD_S}
    return {"startupProbe": start, "readinessProbe": health, "livenessProbe": {**alive, "failureThreshold": 6}}


def _token(secret: str) -> Manifest:
    return {"secretKeyRef": {"name": secret, "key": "auth_token"}}


def _cluster_token(secret: str) -> Manifest:
    """Return the variable with the cluster's token, which is Ray's own: whoever has Ray's can run code on every worker
    anyway.
    """
    return {"name": "PDSERVE_CLUSTER_TOKEN", "valueFrom": _token(secret)}


def _tcp_probes(port: int) -> Manifest:
    """Return probes of a TCP port. KubeRay's own probes ask Ray's dashboard agent, which a plain `pip install ray` does not
    have.
    """
    probe = {"tcpSocket": {"port": port}, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5}
    return {
        "readinessProbe": {**probe, "initialDelaySeconds": 5, "failureThreshold": 6},
        "livenessProbe": {**probe, "initialDelaySeconds": 60, "failureThreshold": 12},
    }


def _container(name: str, image: str, resources: Manifest) -> Manifest:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "resources": resources,
        "securityContext": _SECURITY,
    }


def _resources(*, cpus: int, memory_mib: int, gpus: int = 0) -> Manifest:
    """Return requests and limits. The request is as large as the memory limit: a worker over its limit would be killed, and all
    that it serves with it.
    """
    memory = f"{memory_mib}Mi"
    limits: Manifest = {"memory": memory}
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    return {"requests": {"cpu": str(cpus), "memory": memory}, "limits": limits}


def _template(containers: list[Manifest], **spec: Any) -> Manifest:
    return {
        "spec": {
            "containers": containers,
            "securityContext": _POD_SECURITY,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
            **spec,
        }
    }
