"""Manifests of workers over several pods: valid for Kubernetes and for both operators, and what the pods run is there."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from crd_schema import strict_validator

from deploy.gangs import KINDS, main, render
from deploy.raycluster import to_yaml
from pdserve.checkpoint.resolve import resolve
from pdserve.config import (
    AutoscalingConfig,
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    RouterProcessConfig,
    VllmConfig,
    WorkerConfig,
    load,
)
from pdserve.core.errors import ConfigError
from pdserve.worker.vllm import follower, server

ROOT = Path(__file__).resolve().parents[2]
CRDS = Path(__file__).parent / "crds"
KUBERNETES = kubernetes_validate.latest_version()
EXAMPLES = ("nodes-70b", "nodes-671b")
COMMAND = ("/opt/vllm/bin/python", "-m", server.MODULE)


def objects(example: str, kind: str) -> dict[str, Any]:
    """Parsed back from the YAML that would be applied."""
    config = load(ClusterConfig, ROOT / "examples" / f"{example}.yaml")
    manifests = render(config, image="pdserve:test", name="pd", kind=kind, claim="models")
    return {
        f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in yaml.safe_load_all(to_yaml(manifests))
    }


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """All templates of pods in a manifest."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "LeaderWorkerSet":
            gang = spec["leaderWorkerTemplate"]
            return [gang[name] for name in ("leaderTemplate", "workerTemplate") if name in gang]
        case "RayCluster":
            return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return [spec["template"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_object_is_valid_strictly(example: str, kind: str) -> None:
    own = {
        "LeaderWorkerSet": strict_validator(CRDS / "leaderworkersets.yaml", "v1"),
        "RayCluster": strict_validator(CRDS / "rayclusters.yaml", "v1"),
    }
    found = objects(example, kind)
    for manifest in found.values():
        if manifest["kind"] not in own:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            continue
        assert [f"{error.json_path}: {error.message}" for error in own[manifest["kind"]].iter_errors(manifest)] == []
        for template in pods_of(manifest):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **template}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    kinds = {"lws": ["LeaderWorkerSet"] * 2, "ray": ["RayCluster"]}[kind]
    assert [manifest["kind"] for manifest in found.values() if manifest["kind"] in own] == kinds


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_without_workers_has_no_pods(kind: str) -> None:
    config = load(ClusterConfig, ROOT / "examples" / "nodes-671b.yaml", ["prefill.replicas=0", "decode.replicas=2"])
    manifests = render(config, image="i", name="pd", kind=kind, claim="models")
    found = {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}
    assert not [name for name in found if "prefill" in name]
    if kind == "lws":
        assert found["LeaderWorkerSet/pd-decode"]["spec"]["replicas"] == 2
        return
    (group,) = found["RayCluster/pd"]["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["numOfHosts"]) == ("decode", 2, 2)
    assert {"Service/pd-decode-0", "Service/pd-decode-1"} <= set(found)


@pytest.mark.parametrize(("kind", "place"), [("lws", ("leaderWorkerTemplate",)), ("ray", ("workerGroupSpecs", 0))])
def test_the_validators_refuse_a_planted_field(kind: str, place: tuple[Any, ...]) -> None:
    found = objects("nodes-671b", kind)
    manifest = found["LeaderWorkerSet/pd-decode" if kind == "lws" else "RayCluster/pd"]
    validator = strict_validator(CRDS / ("leaderworkersets.yaml" if kind == "lws" else "rayclusters.yaml"), "v1")
    inner = manifest["spec"]
    for key in place:
        inner = inner[key]
    inner["sizze"] = 1
    assert [error for error in validator.iter_errors(manifest) if "sizze" in error.message]


def test_each_worker_has_as_many_pods_as_nodes_and_each_pod_the_gpus_of_its_ranks() -> None:
    sets = objects("nodes-671b", "lws")
    for role in ("prefill", "decode"):
        spec = sets[f"LeaderWorkerSet/pd-{role}"]["spec"]
        assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 2)
        assert gpus(pods_of(sets[f"LeaderWorkerSet/pd-{role}"])) == ["8", "8"]
    alone = objects("nodes-70b", "lws")["LeaderWorkerSet/pd-decode"]
    assert alone["spec"]["leaderWorkerTemplate"]["size"] == 1
    assert gpus(pods_of(alone)) == ["4"]
    for example, hosts, each in (("nodes-671b", 2, "8"), ("nodes-70b", 1, "4")):
        groups = objects(example, "ray")["RayCluster/pd"]["spec"]["workerGroupSpecs"]
        assert [group["numOfHosts"] for group in groups] == [hosts, hosts]
        assert gpus(group["template"] for group in groups) == [each, each]
        assert {group["rayStartParams"]["num-gpus"] for group in groups} == {each}


def gpus(templates: Any) -> list[str]:
    return [template["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for template in templates]


def written(found: dict[str, Any], folder: Path) -> dict[str, Path]:
    """The files of the ConfigMap, as pods see them."""
    for name, text in found["ConfigMap/pd-config"]["data"].items():
        (folder / name).write_text(text)
    return {name: folder / name for name in found["ConfigMap/pd-config"]["data"]}


def run_script(container: dict[str, Any], folder: Path, **variables: str) -> list[list[str]]:
    """Run a container's command by its own shell, with programs that write down how they were called. Return these calls."""
    calls = folder / "calls"
    for name in ("python", "ray", "pdserve", "sleep"):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >> {calls}; echo >> {calls}\n')
        program.chmod(0o755)
    shell, flag, script = container["command"]
    script = script.replace("/tmp/", f"{folder}/own-").replace("/etc/pdserve/", f"{folder}/")
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
    subprocess.run([shell, flag, script], check=True, env=environment, timeout=60)
    return [line.rstrip("\0").split("\0") for line in calls.read_text().splitlines()]


def test_the_leader_runs_a_worker_whose_settings_pdserve_takes(tmp_path: Path) -> None:
    found = objects("nodes-671b", "lws")
    written(found, tmp_path)
    leader = pods_of(found["LeaderWorkerSet/pd-decode"])[0]["spec"]["containers"][0]
    variables = {"POD_NAME": "pd-decode-0", "POD_IP": "10.1.2.3", "PDSERVE_CLUSTER_TOKEN": "s3cret"}
    assert run_script(leader, tmp_path, **variables) == [
        ["python", "-m", "decode_worker", "--config", f"{tmp_path}/own-decode.yaml"]
    ]
    config = load(WorkerConfig, tmp_path / "own-decode.yaml")
    assert (config.worker_id, config.host, config.router_address) == ("pd-decode-0", "10.1.2.3", "pd-link:50052")
    assert (config.engine.device, config.engine.ranks, config.engine.vllm.nodes) == ("cuda", 8, 2)
    assert load(RouterProcessConfig, tmp_path / "router.yaml", settings={"cluster_token": "t"}).router.http_port == 8000


def test_a_follower_runs_vllm_with_the_flags_of_its_leader_and_no_http(tmp_path: Path) -> None:
    """Both commands come from the pods' own command lines, which the installed pdserve parses."""
    found = objects("nodes-671b", "lws")
    files = written(found, tmp_path)
    for path in files.values():
        path.write_text(path.read_text().replace("/models/deepseek-v3", "tiny"))
    pod = pods_of(found["LeaderWorkerSet/pd-decode"])[1]["spec"]["containers"][0]
    variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "pd-decode-0.pd-decode.space", "POD_IP": "127.0.0.1"}
    (call,) = run_script(pod, tmp_path, **variables)
    assert call[:3] == ["python", "-m", "pdserve.worker.vllm.follower"]
    command, environment = follower.prepared(call[3:])
    assert command[:4] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]
    engine = load(WorkerConfig, tmp_path / "decode.yaml", settings={"worker_id": "w"}).engine
    directory = resolve("tiny")
    first = [*server._flags(engine, "decode", directory, 0), *server._node_flags(engine, 0, "10.1.2.3")]
    ours = {"--node-rank": "1", "--master-addr": "pd-decode-0.pd-decode.space"}
    swapped = [ours.get(before, word) for before, word in zip(["", *first], first, strict=False)]
    assert command[4:] == ["--headless", *swapped]
    given = dict(itertools.pairwise(command))
    assert (given["--nnodes"], given["--tensor-parallel-size"], given["--master-port"]) == ("2", "16", "29501")
    assert "--enable-expert-parallel" in command
    assert json.loads(given["--kv-transfer-config"])["kv_role"] == "kv_consumer"
    assert (environment["VLLM_HOST_IP"], environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == ("127.0.0.1",) * 2


def test_on_ray_the_first_pod_joins_and_the_others_follow_it(tmp_path: Path) -> None:
    found = objects("nodes-671b", "ray")
    group = found["RayCluster/pd"]["spec"]["workerGroupSpecs"][1]
    assert group["template"]["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    container = group["template"]["spec"]["containers"][0]
    start = f"ray start --block --resources={group['rayStartParams']['resources']}"
    variables = {"KUBERAY_GEN_RAY_START_CMD": start, "REPLICA_INDEX": "0", "POD_IP": "10.1.2.3"}
    (call,) = run_script(container, tmp_path, HOST_INDEX="0", **variables)
    assert call[:3] == ["ray", "start", "--block"]
    assert json.loads(call[3].partition("=")[2]) == {"pd_decode": 1.0}
    (tmp_path / "calls").unlink()
    (call,) = run_script(container, tmp_path, HOST_INDEX="1", **variables)
    arguments = dict(itertools.pairwise(call))
    assert (arguments["--role"], arguments["--node-rank"], arguments["--first"]) == ("decode", "1", "pd-decode-0")
    selector = found["Service/pd-decode-0"]["spec"]["selector"]
    labels = {
        each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "fieldRef" in each.get("valueFrom", {})
    }
    for name in ("ray.io/replica-host-index", "ray.io/worker-group-replica-index"):
        assert name in selector
        assert f"metadata.labels['{name}']" in labels
    assert len([name for name in found if name.startswith("Service/pd-decode-")]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_pods_of_a_worker_end_after_its_server(kind: str, tmp_path: Path) -> None:
    """The hook waits while the first node listens, and ends once it does not."""
    found = objects("nodes-671b", kind)
    template = pods_of(found["LeaderWorkerSet/pd-decode" if kind == "lws" else "RayCluster/pd"])[-1]
    command = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert template["spec"]["terminationGracePeriodSeconds"] > 300
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        script = re.sub(r"/dev/tcp/[^/]+/29501", f"/dev/tcp/127.0.0.1/{port}", command[-1])
        variables = {"HOST_INDEX": "1", "REPLICA_INDEX": "0", "PATH": os.environ["PATH"]}
        with subprocess.Popen([*command[:-1], script.replace("sleep 2", "sleep 0.01")], env=variables) as waiting:
            listening.settimeout(60)
            for _ in range(3):  # it looks again and again
                listening.accept()[0].close()
            assert waiting.poll() is None
            listening.close()
            assert waiting.wait(60) == 0


def engine_of(**changes: Any) -> EngineConfig:
    usual = {"backend": "vllm", "model": "/models/m", "vllm": VllmConfig(command=COMMAND)}
    return EngineConfig(**(usual | changes))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"engine": EngineConfig(model="/models/m")}, r"prefill\.engine\.backend must be vllm"),
        ({"engine": engine_of(vllm=VllmConfig(nodes=1))}, r"prefill\.engine\.vllm\.command must name"),
        ({"engine": engine_of(model="org/name")}, r"prefill\.engine\.model must be a directory of the claim, /models/NAME"),
        ({"engine": engine_of(tensor_parallel_size=8, pipeline_parallel_size=2)}, r"use tensor_parallel_size 16 and"),
        (
            {"engine": engine_of(tensor_parallel_size=2), "decode": PoolConfig(num_gpus=4)},
            r"decode\.num_gpus 4: a pod has 2 ranks",
        ),
        ({"engine": engine_of(), "autoscaling": AutoscalingConfig(enabled=True)}, r"autoscaling\.enabled"),
    ],
    ids=str,
)
def test_what_such_pods_cannot_be_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=words):
            render(ClusterConfig(**config), image="i", name="n", kind=kind, claim="models")


@pytest.mark.parametrize("rank", ["0", "2", "-1"])
def test_a_follower_refuses_a_rank_that_its_server_does_not_have(rank: str) -> None:
    words = f"--config {ROOT}/examples/nodes-671b.yaml --role decode --node-rank={rank} --first a --host b"
    with pytest.raises(ConfigError, match=rf"--node-rank {rank}: decode\.engine\.vllm\.nodes is 2 .* ranks are 1 to"):
        follower.prepared(shlex.split(words))


def test_a_wrong_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.yaml"), "--image", "i", "--kind", "lws", "--model-claim", "m"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
