"""The manifests without Ray: valid for Kubernetes and KEDA, and their processes take the settings as they are written."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from crd_schema import strict_validator
from prometheus_client.parser import text_string_to_metric_families

from deploy.keda import main, render
from deploy.raycluster import to_yaml
from pdserve.config import (
    AutoscalingConfig,
    ClusterConfig,
    EngineConfig,
    PoolConfig,
    RouterProcessConfig,
    WorkerConfig,
    load,
)
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import ConfigError
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.slo import DemandCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.metrics import Metrics
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot

CRD = Path(__file__).resolve().parents[3] / "shared" / "data" / "crds" / "keda.sh_scaledobjects.yaml"
KUBERNETES = kubernetes_validate.latest_version()
CONFIG = ClusterConfig(
    engine=EngineConfig(max_num_seqs=100),
    prefill=PoolConfig(replicas=2, max_replicas=6, num_gpus=1),
    decode=PoolConfig(replicas=3, min_replicas=2, max_replicas=9, num_cpus=4),
)
PROMETHEUS = "http://prometheus:9090"


def objects(config: ClusterConfig = CONFIG) -> dict[str, Any]:
    manifests = list(yaml.safe_load_all(to_yaml(render(config, image="pdserve:test", name="pd", prometheus=PROMETHEUS))))
    return {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in manifests}


def test_scaled_objects_match_the_published_crd_and_nothing_else_would() -> None:
    if not CRD.exists():
        pytest.skip(f"the published CRDs are not at {CRD.parent}")
    validator = strict_validator(CRD, "v1alpha1")
    found = [manifest for manifest in objects().values() if manifest["kind"] == "ScaledObject"]
    assert len(found) == 2
    for manifest in found:
        assert [error.message for error in validator.iter_errors(manifest)] == []
        manifest["spec"]["triggers"][0]["querry"] = "x"
        assert list(validator.iter_errors(manifest))


def test_core_kinds_are_valid_strictly() -> None:
    core = [manifest for manifest in objects().values() if manifest["kind"] != "ScaledObject"]
    kinds = sorted(manifest["kind"] for manifest in core)
    assert kinds == ["ConfigMap", *["Deployment"] * 3, *["NetworkPolicy"] * 3, *["Service"] * 2]
    for manifest in core:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_each_pool_is_scaled_by_its_own_metrics_within_its_limits() -> None:
    found = objects()
    prefill, decode = (found[f"ScaledObject/pd-{role}"]["spec"] for role in ("prefill", "decode"))
    assert (prefill["minReplicaCount"], prefill["maxReplicaCount"]) == (1, 6)
    assert (decode["minReplicaCount"], decode["maxReplicaCount"]) == (2, 9)
    assert [trigger["metadata"]["threshold"] for trigger in decode["triggers"]] == ["0.8", "90"]
    for role, spec in (("prefill", prefill), ("decode", decode)):
        assert "replicas" not in found[f"Deployment/{spec['scaleTargetRef']['name']}"]["spec"], "KEDA alone decides"
        for trigger in spec["triggers"]:
            assert 'app_kubernetes_io_instance="pd"' in trigger["metadata"]["query"]
            assert f'role="{role}"' in trigger["metadata"]["query"]
            assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_the_rule_of_prefill_has_a_value_in_an_idle_pool_and_counts_no_prompt_that_it_did_not_compute() -> None:
    """Decode workers have computed every prompt. The rule still has a value, 0, by which the pool shrinks."""
    trigger = objects()["ScaledObject/pd-prefill"]["spec"]["triggers"][0]["metadata"]
    names = re.findall(r"pdserve_\w+", trigger["query"])
    assert "/" not in trigger["query"], "a quotient has no value while its divisor is missing"
    hello = WorkerHello(WorkerId("d"), Role.DECODE, Incarnation(1), "h:1", "m", 16, 9, 64, 4, "bfloat16", 8)
    load_ = WorkerLoad(BlockCounts(9, 9, 0, 0, 0), computed_prompt_tokens=5_000, prompt_busy_s=9.0, uptime_s=20.0)
    demand = DemandCounts(20.0, 40, 28_960, placed_prompt_tokens=28_960)
    snapshot = ClusterSnapshot(1, 0, 0, (WorkerSnapshot(hello, load_, 0.1, 0),), demand=demand)
    page = Metrics(lambda: snapshot).render().decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert [sample.value for sample in samples if sample.name in names and sample.labels == {"role": "prefill"}] == [0.0]


def test_metrics_of_the_rules_exist() -> None:
    source = (Path(__file__).resolve().parents[2] / "docs" / "autoscaling.md").read_text()
    for manifest in objects().values():
        for trigger in manifest["spec"].get("triggers", []) if manifest["kind"] == "ScaledObject" else []:
            for word in trigger["metadata"]["query"].replace("(", " ").replace("{", " ").split():
                assert not word.startswith("pdserve_") or f"`{word}`" in source


@pytest.mark.parametrize(
    ("role", "kind"), [("prefill", WorkerConfig), ("decode", WorkerConfig), ("router", RouterProcessConfig)]
)
def test_a_pods_script_writes_settings_that_its_process_takes(role: str, kind: type[Any], tmp_path: Path) -> None:
    """Run as a pod runs it, with a program that shows its arguments instead of Python."""
    found = objects()
    mounted, bin_folder = tmp_path / "mounted", tmp_path / "bin"
    mounted.mkdir()
    bin_folder.mkdir()
    (mounted / f"{role}.yaml").write_text(found["ConfigMap/pd-config"]["data"][f"{role}.yaml"])
    (bin_folder / "python").write_text('#!/bin/sh\necho "$@"\n')
    (bin_folder / "python").chmod(0o755)
    container = found[f"Deployment/pd-{role}"]["spec"]["template"]["spec"]["containers"][0]
    shell, flag, script = container["command"]
    script = script.replace("/tmp/", f"{tmp_path}/").replace("/etc/pdserve", str(mounted))
    own = {"POD_NAME": "pd-prefill-7f-x", "POD_IP": "10.0.0.9", "PDSERVE_CLUSTER_TOKEN": "0123456789" * 4}
    environment = {**os.environ, **own, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run([shell, flag, script], env=environment, capture_output=True, text=True, check=True, timeout=120)
    module = role if role == "router" else f"{role}_worker"
    assert done.stdout.split() == ["-m", module, "--config", f"{tmp_path}/{role}.yaml"]
    file = tmp_path / f"{role}.yaml"
    assert file.stat().st_mode & 0o077 == 0
    config = load(kind, str(file))
    assert config.cluster_token == own["PDSERVE_CLUSTER_TOKEN"]
    if role != "router":
        assert (config.worker_id, config.host, config.advertise_host) == (own["POD_NAME"], own["POD_IP"], own["POD_IP"])
        assert (config.router_address, config.allow_public_bind) == ("pd-link:50052", True)
        assert config.flip_obstacle, "a worker's Deployment would go on counting it"


def test_a_pod_has_the_time_that_a_drain_may_take() -> None:
    found = objects(dataclasses.replace(CONFIG, drain_timeout_s=900.0))
    for role in ("prefill", "decode"):
        spec = found[f"Deployment/pd-{role}"]["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > 900.0
        assert "drain_timeout_s: 900.0" in found["ConfigMap/pd-config"]["data"][f"{role}.yaml"]
        assert "exec python" in spec["containers"][0]["command"][-1], "SIGTERM reaches the worker itself"


def test_policies_let_in_workers_and_clients_only() -> None:
    found = objects()
    clients = {"podSelector": {"matchLabels": {"pdserve/client": "pd"}}}
    for part in ("router", "prefill", "decode"):
        spec = found[f"NetworkPolicy/pd-{part}"]["spec"]
        pod = found[f"Deployment/pd-{part}"]["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"] == pod
        sources = [peer["podSelector"]["matchLabels"] for peer in spec["ingress"][0]["from"]]
        assert [source["app.kubernetes.io/component"] for source in sources] == ["router", "prefill", "decode"]
        assert {source["app.kubernetes.io/instance"] for source in sources} == {"pd"}
        assert [rule["from"] for rule in spec["ingress"][1:]] == ([[clients]] if part == "router" else [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            ClusterConfig(prefill=PoolConfig(min_replicas=0, max_replicas=2), decode=PoolConfig(max_replicas=2)),
            r"prefill\.min_replicas must be at least 1",
        ),
        (ClusterConfig(), r"prefill\.max_replicas must be set"),
        (ClusterConfig(decode=PoolConfig(max_replicas=2, scaling_policy="a:b")), "scaling_policy belong to `pdserve up`"),
        (
            ClusterConfig(
                prefill=PoolConfig(max_replicas=2), decode=PoolConfig(max_replicas=2), autoscaling=AutoscalingConfig(max_gpus=4)
            ),
            r"autoscaling\.max_gpus: KEDA knows no limit",
        ),
    ],
)
def test_a_setting_that_nobody_would_follow_is_refused(config: ClusterConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render(config, image="i", name="pd", prometheus=PROMETHEUS)


def test_a_wrong_configuration_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--config", str(tmp_path / "none.yaml"), "--image", "i", "--prometheus", PROMETHEUS]) == 2
    assert "none.yaml" in capsys.readouterr().err
