"""`pdserve up --autoscaling` on a Ray cluster whose nodes Ray's own autoscaler adds and removes. Everything is real but the
renting of machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from ray_autoscaler import POOLS, AutoscaledRay, Traffic
from ray_nodes import ROOT
from test_real_up import FREE, REAL, address, wait_for

from pdserve.cli import main
from pdserve.client import AdminClient
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import generate_all, request

pytestmark = [pytest.mark.ray, pytest.mark.alone]  # sizes follow from the times of steps

APART = common_pb2.PLACEMENT_DISAGGREGATED
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
CONFIG: dict[str, Any] = {
    "engine": {
        "model": "tiny",
        "dtype": "float32",
        "batch_invariant": True,
        "kv_cache_memory": "64MiB",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "threads": 1,
        "enable_prefix_caching": False,
    },
    "autoscaling": {
        "interval_s": 1.0,
        "planner": {
            "start_s": 1,
            "smoothing_s": 2,
            "trend_s": 8,
            "memory_s": 2,  # the next phase has other requests
            "season_s": 0,
            "max_utilisation": 0.2,
            "sequences_share": 0.2,
            "max_correction": 1,
            "downscale_delay_s": 5,
            "flip_delay_s": 5,
            "cooldown_s": 2,
        },
    },
    **{role: pool | {"max_replicas": 2} for role, pool in POOLS.items()},
}
LONG_PROMPTS = [[(7 * i + n) % 250 for i in range(1500)] for n in range(3)]
SHORT_PROMPTS = [[(5 * i + n) % 250 for i in range(8)] for n in range(3)]


class Service:
    """The nodes, and `pdserve up` on them."""

    def __init__(self, nodes: AutoscaledRay, command: Any) -> None:
        self.nodes, self.command = nodes, command
        self.grpc = address(command.text, "gRPC")
        self.admin = AdminClient(address(command.text, "admin"))
        prompts = {"prefill": (LONG_PROMPTS, 4), "decode": (SHORT_PROMPTS, 500)}
        self._messages = {
            role: [request(prompt, APART, max_tokens=tokens, temperature=0.0, ignore_eos=True) for prompt in each]
            for role, (each, tokens) in prompts.items()
        }

    def traffic(self, role: str, interval_s: float) -> Traffic:
        """Traffic that needs workers of the role, whose answers must be those of the cluster before it."""
        quiet = generate_all(self.grpc, self._messages[role])
        return Traffic(self.grpc, self._messages[role], [answer.ids for answer in quiet], interval_s)

    def ready(self, role: str) -> dict[str, inference_pb2.WorkerState]:
        """The workers of the pool that take requests, by the ids of their nodes."""
        states = [w for w in self.admin.cluster_state().workers if w.hello.role == ROLES[role] and w.ready]
        by_node = {self.nodes.node_of(state.hello.pid): state for state in states}
        return {node_id: state for node_id, state in by_node.items() if node_id}

    def up_and_down(self, role: str, interval_s: float) -> None:
        """(1) Traffic that needs a second worker of the pool adds one node, whose worker serves. (2) The traffic ends: the node
        of the worker that drained goes, and no other. (3) The other pool has not changed, and no request was lost."""
        (other,) = ROLES.keys() - {role}
        before, untouched, told = self.nodes.nodes(role).keys(), self.nodes.nodes(other), len(self.command.text)
        with self.traffic(role, interval_s) as traffic:
            added = self.added(role, before)
            wait_for(lambda: added in (now := self.ready(role)) and now[added].requests_placed > 0)
            assert self.nodes.nodes(role).keys() == before | {added}
        traffic.assert_none_lost()
        self.left(role)
        assert self.nodes.nodes(other) == untouched
        assert f"{other} 1 -> 2" not in self.command.text[told:]

    def added(self, role: str, before: Iterable[str]) -> str:
        """Wait for exactly one more node of the pool."""
        now = wait_for(lambda: (nodes := self.nodes.nodes(role).keys()) > before and nodes)
        (node_id,) = now - before
        return str(node_id)

    def left(self, role: str) -> None:
        """Wait until one worker is left, then until its node alone is left."""
        (stays,) = wait_for(lambda: len(now := self.ready(role)) == 1 and now)
        wait_for(lambda: self.nodes.nodes(role).keys() == {stays})


@pytest.fixture
def nodes(short_tmp: Path) -> Iterator[AutoscaledRay]:
    """The cluster, once the node of each pool that is always there has come."""
    made = AutoscaledRay(short_tmp)
    try:
        wait_for(lambda: all(made.nodes(role) for role in ROLES))
        yield made
    finally:
        made.close()


@pytest.fixture
def service(nodes: AutoscaledRay, run_command: Any, short_tmp: Path) -> Iterator[Service]:
    config = short_tmp / "pdserve.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    arguments = ("up", "--address", nodes.address, "--config", str(config), *FREE)
    command = run_command(*arguments, "--autoscaling", program=REAL, PYTHONPATH=str(ROOT), **nodes.token)
    command.wait_for("ready; Ctrl-C stops it")
    made = Service(nodes, command)
    with made.admin:
        yield made
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()


def scale(service: Service, order: str) -> None:
    result = CliRunner().invoke(main, ["scale", *order.split(), "--address", address(service.command.text, "admin")])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_an_ordered_worker_gets_a_node_of_its_own_and_leaves_it(service: Service) -> None:
    """(1) An order for a second prefill worker adds its node, and the worker serves. (2) An order for one: the node goes."""
    before, decode = service.nodes.nodes("prefill").keys(), service.nodes.nodes("decode")
    with service.traffic("prefill", 0.5) as traffic:
        scale(service, "prefill=2")
        added = service.added("prefill", before)
        wait_for(lambda: service.ready("prefill")[added].requests_placed > 0)
        scale(service, "prefill=1")
    traffic.assert_none_lost()
    service.left("prefill")
    assert service.nodes.nodes("decode") == decode


@pytest.mark.slow
def test_each_pool_gets_a_node_for_its_own_load_and_gives_it_back(service: Service) -> None:
    service.up_and_down("prefill", 0.25)
    service.up_and_down("decode", 0.15)


@pytest.mark.slow
def test_a_node_that_dies_under_load_is_replaced(service: Service) -> None:
    """(1) The planner has added a prefill worker. (2) Its node dies: SIGKILL of its raylet and of the worker. (3) Another node
    comes, and the pool has its size again. No request was lost."""
    before = service.nodes.nodes("prefill").keys()
    with service.traffic("prefill", 0.25) as traffic:
        added = service.added("prefill", before)
        wait_for(lambda: added in service.ready("prefill"))
        worker = service.ready("prefill")[added]
        service.nodes.nodes("prefill")[added].kill()
        os.kill(worker.hello.pid, signal.SIGKILL)
        wait_for(lambda: len(service.ready("prefill")) == 2 and added not in service.nodes.nodes("prefill"))
    traffic.assert_none_lost()
