"""Joining a Ray cluster that `ray start` has started, with the very commands of docs/tutorial-ray.md.

One cluster that asks for a token serves all tests: a head, a second node of another kind, and what a test adds.
"""

from __future__ import annotations

import re
import secrets
import shlex
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import ROOT, RayNode, free_ports
from test_real_up import FREE, REAL, address, generate, wait_for

from pdserve.client import AdminClient, InferenceClient

pytestmark = pytest.mark.ray

TINY = ("--model", "tiny", "--kv-cache-memory", "16MiB")
BLOCKS = [
    block.strip().splitlines()
    for block in re.findall(r"^```\n(.*?)^```", (ROOT / "docs" / "tutorial-ray.md").read_text(), re.MULTILINE | re.DOTALL)
]
ONE_MACHINE, MORE_MACHINES = BLOCKS


@dataclass
class RayCluster:
    """Its head and whatever nodes were added. Environment: of whoever knows its token."""

    folder: Path
    nodes: list[RayNode] = field(default_factory=list)
    token: dict[str, str] = field(default_factory=lambda: {"RAY_AUTH_TOKEN": secrets.token_hex(32)})

    def __post_init__(self) -> None:
        self.port, client_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        head = {"port": self.port, "ray_client_server_port": client_port, "include_dashboard": "false"}
        self._start(ONE_MACHINE[0], self.token, **head)

    def join(self, command: str) -> RayNode:
        """A further node; `command` names the head as HEAD:6379, or by the address that Ray told."""
        mode = {} if "RAY_AUTH_MODE" in command else {"RAY_AUTH_MODE": "token"}
        return self._start(command.replace("HEAD:6379", self.address), {**self.token, **mode})

    def _start(self, command: str, environment: dict[str, str], **flags: object) -> RayNode:
        """Its workers must not see this machine's GPUs, nor count its CPUs unless the command does: none asks for any."""
        flags = flags if "--num-cpus" in command else {"num_cpus": 0, **flags}
        environment = {**environment, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        name = f"node-{len(self.nodes)}"
        node = RayNode(command, self.folder / "ray", name=name, environment=environment, **flags)
        self.nodes.append(node)
        return node.wait_started()

    @property
    def visitor(self) -> dict[str, str]:
        """Environment of `pdserve up --address auto`, which on this machine could find somebody else's Ray."""
        return {**self.token, "RAY_ADDRESS": self.address}

    def actors(self) -> list[str]:
        return [actor for node in self.nodes for actor in node.actors()]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        made = RayCluster(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def second(cluster: RayCluster) -> RayNode:
    """Of another kind than the head, and started without a word about niceness."""
    return cluster.join(MORE_MACHINES[1].replace("RAY_worker_niceness=0 ", ""))


def up(command: str) -> list[str]:
    """Arguments of the `pdserve up ...` of the tutorial."""
    program, *arguments = shlex.split(command)
    assert program == "pdserve"
    return arguments


def stop(command: Any, *, status: int = 0) -> None:
    command.signal(signal.SIGINT)
    assert command.end() == status, command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_a_plain_ray_cluster_could_not_be_joined(run_command: Any, cluster: RayCluster) -> None:
    """The tutorial's two commands: (1) `ray start --head`. (2) `pdserve up --address auto` comes up and serves.
    (3) Ctrl-C leaves the cluster running, without an actor of ours."""
    arguments = (*up(ONE_MACHINE[1]), *TINY, *FREE, "--config", str(ROOT / "examples" / "cluster.yaml"), "--decode", "1")
    command = run_command(*arguments, program=REAL, **cluster.visitor)
    command.wait_for("ready; Ctrl-C stops it")
    assert len(cluster.actors()) == 2
    with InferenceClient(address(command.text, "gRPC")) as client, AdminClient(address(command.text, "admin")) as admin:
        assert generate(client).report.kv_bytes > 0
        assert {worker.hello.niceness for worker in admin.cluster_state().workers} == {0}
    assert "niceness" not in command.text
    stop(command)
    wait_for(lambda: not cluster.actors())
    assert cluster.nodes[0].child.poll() is None
    socket.create_connection(("127.0.0.1", cluster.port), timeout=60.0).close()


@pytest.mark.slow
def test_pools_are_pinned_to_nodes_by_labels(run_command: Any, cluster: RayCluster, second: RayNode) -> None:
    """Joined as HOST:PORT, with the cluster's token. The second node's workers are niced, which `up` and their log say."""
    cluster_of_two = cluster.join(MORE_MACHINES[0].replace("--head", "--address=HEAD:6379"))  # as a head with this label is
    arguments = [word.replace("auto", cluster.address) for word in up(MORE_MACHINES[2])]
    command = run_command(*arguments, *FREE, "--decode", "2", **cluster.token)
    command.wait_for("ready; Ctrl-C stops it")
    with AdminClient(address(command.text, "admin")) as admin:
        pids = {worker.hello.worker_id: worker.hello.pid for worker in admin.cluster_state().workers}
    assert {pids["prefill-0"]} == {process.pid for process in cluster_of_two.processes()} & set(pids.values())
    assert {pids["decode-0"], pids["decode-1"]} == {process.pid for process in second.processes()} & set(pids.values())
    said = "decode-0, decode-1: niceness 15, so ordinary processes"
    assert said in " ".join(command.text.split())
    assert "RAY_worker_niceness=0" in (logs(command) / "decode-0.log").read_text()
    assert "RAY_worker_niceness" not in (logs(command) / "prefill-0.log").read_text()
    stop(command)


@pytest.mark.slow
def test_pools_without_a_pin_are_spread_evenly(run_command: Any, cluster: RayCluster, second: RayNode) -> None:
    """Ray itself puts actors that ask for nothing on nodes by chance."""
    count = len(cluster.nodes)
    command = run_command(*up(ONE_MACHINE[1]), *FREE, "--prefill", str(count), "--decode", str(count), **cluster.visitor)
    command.wait_for("ready; Ctrl-C stops it")
    assert [len(node.actors()) for node in cluster.nodes] == [2] * count
    stop(command)


@pytest.mark.slow
def test_what_no_node_offers_is_told_with_the_command_that_mends_it(run_command: Any, cluster: RayCluster) -> None:
    """(1) A worker needs what no node offers (by a selector with a space, which Ray would take for part of the value): `up`
    says so and which command helps. (2) That command is run: `up` is ready. (3) Another `up` needs the same: it says that
    others use it. (4) The first ends: the second is ready."""
    wants = (*up(ONE_MACHINE[1]), *FREE, "--set", "decode.resources={big: 1}", "--set", 'decode.labels={kind: "in(b, a)"}')
    command = run_command(*wants, **cluster.visitor)
    told = command.wait_for(r"(?s)decode-0 waiting for a node; .*Start one with: (.*?) ; or\s+change decode\.resources")
    ray_start = " ".join(told[1].split())
    assert ray_start.startswith("RAY_worker_niceness=0 RAY_AUTH_MODE=token ray start "), ray_start
    node = cluster.join(ray_start)
    command.wait_for("ready; Ctrl-C stops it")
    assert len(node.actors()) == 1
    later = run_command(*wants, **cluster.visitor)
    later.wait_for(r"(?s)decode-0 waiting for a node; it needs big: 1, kind=in\(a,b\), which\s+others\s+use")
    stop(command)
    later.wait_for("ready; Ctrl-C stops it")
    stop(later)


@pytest.mark.slow
def test_a_gang_is_placed_whole_on_the_first_node_with_cpus_for_all_its_ranks(run_command: Any, cluster: RayCluster) -> None:
    """(1) A node has the CPU of one rank: `up` says what a gang of two needs, and which command helps. (2) That command is run:
    the gang is one actor, on the new node."""
    cluster.join(f"ray start --address={cluster.address} --num-cpus=1")
    gang = ("decode.num_cpus=1", "decode.engine.tensor_parallel_size=2", "engine.oversubscribe=true", "engine.device=cpu")
    wants = (*up(ONE_MACHINE[1]), *FREE, "--decode", "1", *(word for each in gang for word in ("--set", each)))
    command = run_command(*wants, **cluster.visitor)
    told = command.wait_for(
        r"(?s)decode-0 waiting for a node; its\s+gang\s+of\s+2\s+ranks\s+needs\s+CPU:\s+2\s+on\s+one\s+node, .*Start one with: "
        r"(.*?) ; or\s+change\s+decode\.num_cpus,\s+or\s+the\s+degrees\s+in\s+decode\.engine"
    )
    wide = cluster.join(" ".join(told[1].split()))
    command.wait_for("ready; Ctrl-C stops it")
    with AdminClient(address(command.text, "admin")) as admin:
        pids = {worker.hello.worker_id: worker.hello.pid for worker in admin.cluster_state().workers}
    assert pids["decode-0"] in {process.pid for process in wide.processes()}
    stop(command)


@pytest.mark.slow  # test_ray_errors.py has the errors that Ray raises then
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "wants its token: set RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "0" * 64}, "refuses the token of RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "disabled"}, "unset RAY_AUTH_MODE"),
    ],
)
def test_a_missing_token_was_reported_as_a_lost_connection(
    run_command: Any, cluster: RayCluster, short_tmp: Path, environment: dict[str, str], said: str
) -> None:
    home = {"HOME": str(short_tmp), "RAY_AUTH_TOKEN": "", **environment}  # whoever runs the tests may have a token there
    command = run_command(*up(ONE_MACHINE[1]), *FREE, RAY_ADDRESS=cluster.address, **home)
    assert command.end() == 1
    assert said in " ".join(command.text.split())
    assert re.search(rf"Ray at \S+:{cluster.port} ", command.text), command.text
    assert "Traceback" not in command.text


def logs(command: Any) -> Path:
    return Path(re.search(r"^logs +(\S+)", command.text, re.MULTILINE)[1])  # type: ignore[index]
