"""The manifests say what the configuration says, and Kubernetes would take them as they are."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from crd_schema import strict_validator
from jsonschema import Draft7Validator

from deploy.raycluster import MAX_NAME, main, on_kubernetes, ray_version, render, to_yaml
from pdserve.cluster.keeping.guard import NODE_LEAVING
from pdserve.config import AutoscalingConfig, ClusterConfig, EngineConfig, PoolConfig, RouterConfig, load
from pdserve.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cluster.yaml"
CRD = ROOT.parent / "shared" / "data" / "crds" / "ray.io_rayclusters.yaml"
KUBERNETES = kubernetes_validate.latest_version()

CONFIGS = {
    "example": load(ClusterConfig, EXAMPLE),
    "defaults": ClusterConfig(),
    "colocated": ClusterConfig(prefill=PoolConfig(replicas=0)),
    "gpus": ClusterConfig(
        engine=EngineConfig(kv_cache_memory=64 << 30, threads=2),
        router=RouterConfig(http_port=0, grpc_port=0),
        prefill=PoolConfig(replicas=3, num_cpus=4, num_gpus=1, resources={"pd_prefill": 1, "rack_a": 0.5}),
        decode=PoolConfig(replicas=5, num_gpus=2, engine={"max_num_seqs": 256}),
    ),
}

CONFIGS["autoscaling"] = ClusterConfig(
    prefill=PoolConfig(replicas=2, min_replicas=0, max_replicas=20),
    decode=PoolConfig(replicas=2, max_replicas=6),
    autoscaling=AutoscalingConfig(enabled=True, max_workers=12),
)


def objects(config: ClusterConfig, name: str = "pd") -> dict[str, Any]:
    """Parsed back from the YAML that would be applied."""
    manifests = list(yaml.safe_load_all(to_yaml(render(config, image="pdserve:test", name=name))))
    return {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in manifests}


@pytest.fixture(scope="module")
def ray_validator() -> Draft7Validator:
    if not CRD.exists():
        pytest.skip(f"the published CRDs are not at {CRD.parent}")
    return strict_validator(CRD, "v1")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_raycluster_matches_the_published_crd(config: ClusterConfig, ray_validator: Draft7Validator) -> None:
    errors = [f"{error.json_path}: {error.message}" for error in ray_validator.iter_errors(objects(config)["RayCluster/pd"])]
    assert errors == []


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("spec",),
        ("spec", "authOptions"),
        ("spec", "headGroupSpec"),
        ("spec", "workerGroupSpecs", 0),
        ("spec", "workerGroupSpecs", 0, "template", "spec"),
        ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0),
        ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "livenessProbe", "tcpSocket"),
    ],
)
def test_the_validator_refuses_a_planted_field(path: tuple[Any, ...], ray_validator: Draft7Validator) -> None:
    cluster = copy.deepcopy(objects(ClusterConfig())["RayCluster/pd"])
    place = cluster
    for key in path:
        place = place[key]
    place["replicaz"] = 1
    assert [error for error in ray_validator.iter_errors(cluster) if "replicaz" in error.message]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_core_kinds_are_valid_strictly(config: ClusterConfig) -> None:
    found = objects(config)
    core = [manifest for manifest in found.values() if manifest["kind"] != "RayCluster"]
    kinds = ["ConfigMap", "Deployment", "Service", "Service", "NetworkPolicy", "NetworkPolicy"]
    assert [manifest["kind"] for manifest in core] == kinds
    spec = found["RayCluster/pd"]["spec"]
    templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **template} for template in templates]
    for manifest in [*core, *pods]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_core_validator_refuses_a_planted_field() -> None:
    service = objects(ClusterConfig())["Service/pd"]
    service["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(service, KUBERNETES, strict=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_config_map_holds_the_configuration(config: ClusterConfig, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(objects(config)["ConfigMap/pd-config"]["data"]["cluster.yaml"])
    loaded = load(ClusterConfig, file)
    assert loaded == on_kubernetes(config, "pd")
    assert loaded.address == "auto"
    assert loaded.lease == config.lease
    assert dataclasses.replace(loaded.engine, threads=0) == dataclasses.replace(config.engine, threads=0)
    assert 0 not in (loaded.router.http_port, loaded.router.grpc_port, loaded.router.link_port, loaded.router.admin_port)


def test_a_workers_pod_is_drained_before_ray_is_told_to_end() -> None:
    """The hook names the router's Service, finds the worker by the pod's own address, and has the time that a drain may
    take."""
    found = objects(ClusterConfig(router=RouterConfig(admin_port=7777), drain_timeout_s=900.0))
    router = found["Deployment/pd-router"]["spec"]["template"]["spec"]["containers"][0]
    for group in found["RayCluster/pd"]["spec"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        container = spec["containers"][0]
        shell, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("/bin/sh", "-c")
        assert script == f'touch {NODE_LEAVING}; exec pdserve drain --on-host "$POD_IP" --router pd-link:7777'
        assert token_of(container) == token_of(router)
        assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"], "Ray would start the worker at 15"
        assert spec["terminationGracePeriodSeconds"] > 900.0
    link, _, beats = found["Service/pd-link"]["spec"]["ports"]
    assert beats == {"name": "beats", "protocol": "UDP", "port": link["port"], "targetPort": "beats"}
    assert found["Service/pd-link"]["spec"]["ports"][1] == {"name": "admin", "port": 7777, "targetPort": "admin"}


def token_of(container: dict[str, Any]) -> Any:
    (variable,) = [variable for variable in container["env"] if variable["name"] == "PDSERVE_CLUSTER_TOKEN"]
    return variable["valueFrom"]["secretKeyRef"]


def test_each_pool_is_a_group_that_offers_what_its_workers_ask_for() -> None:
    config = CONFIGS["gpus"]
    prefill, decode = objects(config)["RayCluster/pd"]["spec"]["workerGroupSpecs"]
    assert (prefill["groupName"], prefill["replicas"], decode["groupName"], decode["replicas"]) == ("prefill", 3, "decode", 5)
    assert custom_resources(prefill) == {"pd_prefill": 1, "rack_a": 0.5}
    assert custom_resources(decode) == {"pd_decode": 1}
    assert prefill["rayStartParams"]["num-cpus"] == "4"
    assert decode["rayStartParams"]["num-gpus"] == "2"
    container = decode["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["resources"]["requests"]["cpu"] == "2"
    assert [group["groupName"] for group in objects(CONFIGS["colocated"])["RayCluster/pd"]["spec"]["workerGroupSpecs"]] == [
        "decode"
    ]


@pytest.mark.parametrize(
    ("engine", "cpus", "threads"), [({}, 4, 2), ({"threads": 3}, 6, 3), ({"tensor_parallel_size": 1}, 2, 2)]
)
def test_a_gang_has_a_pod_with_the_cores_and_the_memory_of_all_its_ranks(
    engine: dict[str, int], cpus: int, threads: int
) -> None:
    pool = PoolConfig(num_cpus=2, engine={"tensor_parallel_size": 2, **engine})
    config = ClusterConfig(prefill=pool)
    prefill, decode = objects(config)["RayCluster/pd"]["spec"]["workerGroupSpecs"]
    ranks = config.engine_for(pool).ranks
    assert prefill["rayStartParams"]["num-cpus"] == str(2 * ranks), "as many as the gang's actor asks for"
    asked = [group["template"]["spec"]["containers"][0]["resources"]["requests"] for group in (prefill, decode)]
    assert asked[0]["cpu"] == str(cpus)
    more_mib = [int(each["memory"].removesuffix("Mi")) for each in asked]
    assert more_mib[0] - more_mib[1] == 1024 * (ranks - 1)
    adapted = on_kubernetes(config, "pd")
    assert adapted.engine_for(adapted.prefill).threads == threads


def test_rays_autoscaler_adds_pods_within_the_limits_of_the_pools() -> None:
    """And only where the sizes may change by themselves. Its container in the head's pod has an account."""
    spec = objects(CONFIGS["autoscaling"])["RayCluster/pd"]["spec"]
    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["version"]) == (True, "v2")
    assert spec["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True
    sizes = [(group["minReplicas"], group["replicas"], group["maxReplicas"]) for group in spec["workerGroupSpecs"]]
    assert sizes == [(0, 2, 12), (1, 2, 6)]
    assert all(group["template"]["spec"]["automountServiceAccountToken"] is False for group in spec["workerGroupSpecs"])
    fixed = objects(ClusterConfig())["RayCluster/pd"]["spec"]
    assert "enableInTreeAutoscaling" not in fixed
    assert fixed["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_configuration_asks_for_what_the_pods_offer() -> None:
    """Workers that asked for nothing would run on any pod, the head's too."""
    found = objects(ClusterConfig())
    config = yaml.safe_load(found["ConfigMap/pd-config"]["data"]["cluster.yaml"])
    for group in found["RayCluster/pd"]["spec"]["workerGroupSpecs"]:
        assert custom_resources(group) == config[group["groupName"]]["resources"] == {f"pd_{group['groupName']}": 1.0}


def test_labels_of_nodes_are_refused_for_pods() -> None:
    with pytest.raises(ConfigError, match=r"decode\.labels: on Kubernetes"):
        render(ClusterConfig(decode=PoolConfig(labels={"pool": "decode"})), image="i", name="n")


def custom_resources(group: dict[str, Any]) -> Any:
    """As Ray's autoscaler for KubeRay reads them: the outer quotes and the backslashes are for a shell."""
    text = group["rayStartParams"]["resources"]
    return json.loads(text[1:-1].replace("\\", ""))


def test_every_reference_finds_its_object() -> None:
    """Names, ports and labels that one object uses are what another has."""
    found = objects(CONFIGS["gpus"])
    pod = found["Deployment/pd-router"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert f"ConfigMap/{pod['spec']['volumes'][0]['configMap']['name']}" in found
    assert container["env"][1]["valueFrom"]["secretKeyRef"]["name"] == found["RayCluster/pd"]["metadata"]["name"]
    assert "--address=pd-head-svc:6379" in container["command"][-1]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("Service/pd", "Service/pd-link"):
        spec = found[name]["spec"]
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
    config = yaml.safe_load(found["ConfigMap/pd-config"]["data"]["cluster.yaml"])
    assert f"Service/{config['router']['advertise_host']}" in found
    assert found["Service/pd-link"]["spec"]["publishNotReadyAddresses"] is True
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_only_the_clusters_own_pods_reach_workers_and_only_clients_the_front_ends() -> None:
    """Each pod is selected by a policy, so that it refuses what no rule lets in."""
    found = objects(CONFIGS["gpus"])
    router = found["Deployment/pd-router"]["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in router["spec"]["containers"][0]["ports"]}
    policies = [manifest for manifest in found.values() if manifest["kind"] == "NetworkPolicy"]
    router_pod, worker = router["metadata"]["labels"], {"ray.io/cluster": "pd", "ray.io/group": "decode"}
    client, stranger, of_another = (
        {"pdserve/client": "pd"},
        {"app": "x"},
        {"ray.io/cluster": "other", "pdserve/client": "other"},
    )
    any_port = {*ports.values(), 6379, 40_000}

    def reached(source: dict[str, str], target: dict[str, str]) -> set[int]:
        return {port for port in any_port if admitted(policies, source, target, port, ports)}

    assert reached(worker, worker) == reached(router_pod, worker) == reached(worker, router_pod) == any_port
    assert reached(client, router_pod) == {ports["http"], ports["grpc"]}
    assert reached(client, worker) == set()
    for outsider in (stranger, of_another):
        assert reached(outsider, worker) == reached(outsider, router_pod) == set()
    assert len(policies) == 2
    assert admitted([], stranger, worker, 6379, ports), "without a policy everybody is let in"


def admitted(policies: list[Any], source: dict[str, str], target: dict[str, str], port: int, names: dict[str, int]) -> bool:
    """What a cluster's network does with ingress policies: for a pod that none selects, let everybody in; else by a rule."""
    selecting = [policy["spec"] for policy in policies if selects(policy["spec"]["podSelector"], target)]
    rules = [rule for spec in selecting if "Ingress" in spec["policyTypes"] for rule in spec["ingress"]]
    return not selecting or any(
        any(selects(peer["podSelector"], source) for peer in rule["from"])
        and ("ports" not in rule or port in [names.get(row["port"], row["port"]) for row in rule["ports"]])
        for rule in rules
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) == {"matchLabels"}
    return bool(selector["matchLabels"].items() <= labels.items())


def test_a_changed_configuration_replaces_the_router_pod() -> None:
    def annotations(config: ClusterConfig) -> Any:
        return objects(config)["Deployment/pd-router"]["spec"]["template"]["metadata"]["annotations"]

    assert annotations(ClusterConfig()) == annotations(ClusterConfig())
    assert annotations(ClusterConfig()) != annotations(ClusterConfig(decode=PoolConfig(replicas=2)))


def test_no_container_runs_as_root() -> None:
    found = objects(ClusterConfig())
    spec = found["RayCluster/pd"]["spec"]
    templates = [spec["headGroupSpec"]["template"], found["Deployment/pd-router"]["spec"]["template"]]
    for template in [*templates, *(group["template"] for group in spec["workerGroupSpecs"])]:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert all(not c["securityContext"]["allowPrivilegeEscalation"] for c in template["spec"]["containers"])


@pytest.mark.parametrize("name", ["", "Upper", "1digit", "dash-", "x" * (MAX_NAME + 1), "a_b", "a\n"])
def test_a_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        render(ClusterConfig(), image="i", name=name)


def test_the_checked_in_manifest_is_made_from_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Stale? python -m deploy.raycluster --config examples/cluster.yaml --image pdserve:0.1.0 > deploy/raycluster.yaml"""
    assert main(["--config", str(EXAMPLE), "--image", "pdserve:0.1.0"]) == 0
    assert capsys.readouterr().out == (ROOT / "deploy" / "raycluster.yaml").read_text()


def test_a_wrong_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.yaml"), "--image", "i"]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_ray_is_new_enough_for_tokens() -> None:
    assert tuple(map(int, ray_version().split(".")[:2])) >= (2, 52)
