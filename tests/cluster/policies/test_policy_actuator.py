"""Pools that follow policies of the operator's own, on the actuator's simulated cluster: policies are real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scaling_world import World

from pdserve.cluster import processes
from pdserve.cluster.events import PolicyChanged, PolicyFault, PoolsResized
from pdserve.cluster.scaling.policy import PolicyState
from pdserve.config import ClusterConfig, load
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from pdserve.rpc.v1 import scaling_pb2

HERE = Path(__file__).resolve().parent
WAIT_S = 60.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., World]]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("POLICY_NOTE", str(tmp_path / "note"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()  # where the simulated cluster has its logs
    made: list[World] = []

    def make(*overrides: str) -> World:
        limits = ("prefill.max_replicas=4", "decode.max_replicas=4", "autoscaling.enabled=true")
        made.append(World(load(ClusterConfig, None, (*limits, *overrides))))
        return made[-1]

    yield make
    for one in made:
        one.actuator.close()
    assert children() == []


def children() -> list[str]:
    found = [processes.command(each) for each in processes.descendants(os.getpid())]
    return [each for each in found if "policy" in each]


def run(here: World, seconds: int = 60) -> None:
    """Let time pass. No policy is late unless it never answers: the clock stands while one starts or thinks."""
    for _ in range(seconds):
        here.step()
        deadline = time.monotonic() + WAIT_S
        for policy in here.actuator._planning._policies.values():
            while policy._state is PolicyState.STARTING or (policy.is_asked and not policy._name.endswith(":hangs")):
                assert time.monotonic() < deadline
                time.sleep(0.005)
                policy.follow(here.now_s)


def history(here: World) -> list[str]:
    state = here.mailbox.state(here.now_s)
    assert state is not None
    return [event.text for event in state.history]


def test_one_pool_follows_its_policy_and_the_planner_decides_the_other(world: Callable[..., World]) -> None:
    here = world("prefill.scaling_policy=odd_policies:three")
    run(here)
    assert here.sizes() == (3, 1)
    plan = here.state().scaling.report.plan
    assert "The policy odd_policies:three wants 3 prefill workers." in plan.reasons
    assert history(here) == ["prefill 1 -> 3: The policy odd_policies:three wants 3 prefill workers."]


def test_intervals_as_short_as_a_poll_end_in_plans(world: Callable[..., World]) -> None:
    """A plan waits for the policy's answer until the next poll, when the next interval has ended already."""
    here = world("prefill.scaling_policy=odd_policies:three", "autoscaling.interval_s=1")
    run(here, 20)
    assert here.sizes() == (3, 1)


def test_limits_hold_for_policies_of_both_pools(world: Callable[..., World]) -> None:
    many = ("prefill.scaling_policy=odd_policies:many", "decode.scaling_policy=odd_policies:many")
    here = world(*many, "autoscaling.max_workers=5")
    run(here)
    assert sum(here.sizes()) == 5
    reasons = " ".join(here.state().scaling.report.reasons)
    assert "The policy odd_policies:many wants 9999 decode workers." in reasons
    assert "autoscaling.max_workers is 5" in reasons


@pytest.mark.parametrize(("function", "fault"), [("hangs", PolicyFault.LATE), ("dies", PolicyFault.ENDED)])
def test_a_policy_that_fails_keeps_the_size_and_everybody_is_told_once(
    world: Callable[..., World], function: str, fault: PolicyFault
) -> None:
    here = world("prefill.replicas=2", f"prefill.scaling_policy=odd_policies:{function}")
    run(here)
    assert (here.sizes(), here.asked) == ((2, 1), [])
    assert [event.fault for event in here.events if isinstance(event, PolicyChanged)] == [fault]
    assert not [event for event in here.events if isinstance(event, PoolsResized)], "nobody is told twice"
    (text,) = history(here)
    assert text.startswith(f"prefill.scaling_policy: odd_policies:{function} gives no size, so the pool keeps")
    assert any(f"The policy odd_policies:{function} gives no size" in each for each in here.state().scaling.report.reasons)


def test_an_order_ends_the_process_of_the_policy_and_auto_starts_it_again(world: Callable[..., World]) -> None:
    """(1) The policy decides. (2) An operator orders: nobody asks the policy. (3) It decides again."""
    here = world("prefill.scaling_policy=odd_policies:three")
    run(here)
    here.order(prefill=1)
    run(here)
    assert (here.sizes(), children()) == ((1, 1), [])
    here.order(automatic=True)
    run(here)
    assert here.sizes() == (3, 1)


def test_an_actuator_that_another_one_replaced_runs_no_policy(world: Callable[..., World]) -> None:
    here = world("prefill.scaling_policy=odd_policies:three")
    run(here, 2)
    assert len(children()) == 1
    here.mailbox.actuate(scaling_pb2.ActuateRequest(actuator="another"), here.now_s)
    here.step(5)
    assert children() == []


def test_a_router_that_is_away_does_not_keep_a_late_policy_alive(world: Callable[..., World]) -> None:
    here = world("prefill.scaling_policy=odd_policies:hangs")
    policy = here.actuator._planning._policies[Role.PREFILL]
    for _ in range(60):
        if not policy.is_asked:
            run(here, 1)
    assert policy.is_asked
    here.router_up = False
    here.step(5)
    assert policy.fault is PolicyFault.LATE


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prefill.scaling_policy=own", "prefill.scaling_policy must be planner, or module:function"),
        ("decode.scaling_policy=os:1", "decode.scaling_policy must be planner, or module:function"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(ClusterConfig, None, ("decode.scaling_policy=a:b", override))
