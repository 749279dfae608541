"""The settings of the pools' sizes: what is accepted, and what the message says when it is not."""

from __future__ import annotations

import pytest

from pdserve.config import MOST_WORKERS, ClusterConfig, PoolConfig, load
from pdserve.core.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("prefill.min_replicas=2", r"prefill\.min_replicas is 2, more than replicas \(1\)"),
        ("decode.max_replicas=1 decode.replicas=2", r"decode\.max_replicas is 1, fewer than replicas \(2\)"),
        ("decode.min_replicas=0", r"decode\.min_replicas must be at least 1: every request"),
        ("autoscaling.enabled=true", r"autoscaling\.enabled: .* set prefill\.max_replicas or autoscaling\.max_workers"),
        (
            "autoscaling.enabled=true autoscaling.max_gpus=4 decode.num_gpus=1 prefill.max_replicas=2 prefill.num_gpus=0 "
            "decode.num_gpus=0",
            r"nothing limits the pool; set decode\.max_replicas",
        ),
        ("autoscaling.max_workers=1", r"autoscaling\.max_workers is 1, but prefill\.min_replicas \(1\) and decode\.min_r"),
        (
            "autoscaling.max_workers=2 decode.replicas=2",
            r"max_workers is 2, but prefill\.replicas \(1\) and decode\.replicas \(2",
        ),
        ("autoscaling.max_gpus=1 decode.num_gpus=2", r"autoscaling\.max_gpus is 1, .* take 2"),
        (
            "autoscaling.max_cpus=4 prefill.num_cpus=1 decode.num_cpus=2 decode.engine.tensor_parallel_size=2",
            r"autoscaling\.max_cpus is 4, .* take 5",
        ),
        ("autoscaling.max_price_per_hour=3 prefill.price_per_hour=4", r"max_price_per_hour is 3, .* take 4"),
        ("autoscaling.slo_class=fast", r"autoscaling\.slo_class 'fast' is none of default, voice"),
        ("autoscaling.attainment=2", r"autoscaling\.attainment must be a number \(over 0 and under 1\), got 2"),
        (
            "router.placement=disaggregated prefill.min_replicas=0",
            r"disaggregated, so prefill\.min_replicas must be at least 1",
        ),
        ("autoscaling.max_worker=1", r"unknown setting autoscaling\.max_worker; known here: .*max_workers"),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(overrides: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(ClusterConfig, None, overrides.split())


def test_a_pool_without_limits_of_its_own_keeps_one_worker_and_may_grow() -> None:
    assert (PoolConfig().least, PoolConfig().most) == (1, MOST_WORKERS)
    assert (PoolConfig(replicas=0).least, PoolConfig(replicas=0).most) == (0, 0)
    assert (PoolConfig(replicas=0, max_replicas=3).least, PoolConfig(replicas=0, max_replicas=3).most) == (0, 3)


def test_one_limit_of_both_pools_is_enough_for_the_planner() -> None:
    assert load(ClusterConfig, None, ["autoscaling.enabled=true", "autoscaling.max_workers=2"]).autoscaling.enabled
    pools = ["prefill.max_replicas=2", "decode.max_replicas=2"]
    assert not load(ClusterConfig, None, ["autoscaling.enabled=true", *pools]).unlimited


def test_the_pools_are_sized_for_the_default_class_unless_another_is_named() -> None:
    assert load(ClusterConfig, None, ["router.default_class=chat"]).slo_class == "chat"
    assert load(ClusterConfig, None, ["router.default_class=chat", "autoscaling.slo_class=code"]).slo_class == "code"
