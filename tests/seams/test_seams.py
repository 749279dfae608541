"""Parts of an operator's own, in a cluster of real processes: a transport and two policies from a folder beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import plugged_member
import pytest

from pdserve.config import MIB, EngineConfig, RouterConfig, TransferConfig
from pdserve.rpc.v1 import common_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import Place, ProcessCluster

pytestmark = pytest.mark.cluster

APART = common_pb2.PLACEMENT_DISAGGREGATED
PROMPT = list(range(64))
READS = "PDSERVE_TESTING_READS"

TRANSPORT = f'''
import os
import subprocess
from kvtransfer.backends.cma import CmaTransport

class Counting(CmaTransport):
    """A transport of the operator's own. It notes each read in a file."""

    def post_read(self, peer, region, remote, local, into):
        with open(os.environ["{READS}"], "a") as file:
            print(len(local), file=file)
        return super().post_read(peer, region, remote, local, into)

def prepare(host, allow_public):
    return Counting
'''
POLICIES = """
def first_worker(candidate, request):
    return -candidate.link

def broken(candidate, request):
    raise KeyError("a bug of the operator's")
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder on the path of every member, and the file in which the transport notes its reads."""
    (tmp_path / "my_transport.py").write_text(TRANSPORT)
    (tmp_path / "my_policies.py").write_text(POLICIES)
    return tmp_path


def member_of(plugins: Path, **worker: Any) -> Place:
    env = {plugged_member.FOLDER: str(plugins), READS: str(plugins / "reads")}
    return Place(env=env, module=plugged_member.__name__, worker=worker)


def cluster_of(plugins: Path, transport: str, **router: Any) -> ProcessCluster:
    engine = EngineConfig(model="tiny", dtype="float32", kv_cache_memory=16 * MIB, threads=1, enable_prefix_caching=False)
    worker = {"transfer": TransferConfig(transport), "heartbeat_interval_s": 0.05}
    places = dict.fromkeys(("router", "prefill-0", "decode-0", "decode-1"), member_of(plugins))
    return ProcessCluster(engine, prefill=1, decode=2, router=RouterConfig(**router), worker=worker, places=places)


def ask(cluster: ProcessCluster, placement: int = APART) -> Answer:
    (answer,) = generate_all(cluster.grpc, [request(PROMPT, placement, max_tokens=4, temperature=0.0, ignore_eos=True)])
    return answer


def test_a_cluster_serves_over_parts_of_the_operators_own(plugins: Path) -> None:
    """(1) Probes and requests go over the transport; (2) the decode policy picks the same worker each time, where the built-in
    would take turns; (3) the prefill policy always raises, which is counted and costs nothing; (4) the tokens are right."""
    own = {"prefill_policy": "my_policies:broken", "decode_policy": "my_policies:first_worker"}
    with cluster_of(plugins, "my_transport:prepare", **own) as cluster:
        expected = ask(cluster, common_pb2.PLACEMENT_COLOCATED).ids
        probes = (plugins / "reads").read_text().splitlines()
        answers = [ask(cluster) for _ in range(4)]
        assert [answer.ids for answer in answers] == [expected] * 4
        assert [answer.report.placement for answer in answers] == [APART] * 4
        assert len({answer.report.decode_worker for answer in answers}) == 1
        reads = (plugins / "reads").read_text().splitlines()[len(probes) :]
        assert sum(map(int, reads)) == 4 * 4, "each handoff reads blocks over the operator's transport"
        with urllib.request.urlopen(f"http://{cluster.http}/metrics", timeout=60) as response:
            metrics = response.read().decode()
        faults = 'pdserve_placement_policy_faults_total{reason="raised",role="prefill"}'
        assert f"{faults} 4.0" in metrics
        assert cluster.processes["router"].log().count("the policy raised KeyError") == 1


@pytest.mark.slow
def test_a_worker_with_another_transport_is_never_paired(plugins: Path) -> None:
    """(1) A decode worker comes back with another transport; (2) its pair is set aside for ever, and the reason names both
    transports; (3) the other decode worker serves."""
    with cluster_of(plugins, "my_transport:prepare") as cluster:
        cluster.move("decode-1", member_of(plugins, transfer=TransferConfig("cma")))
        cluster.start("decode-1")
        state = cluster.wait_state(lambda state: any(pair.decode_worker == "decode-1" for pair in state.set_aside_pairs))
        (pair,) = state.set_aside_pairs
        assert "transfer.transport is my_transport:prepare at" in pair.reason
        assert "and cma at this worker" in pair.reason
        assert pair.remaining_s == float("inf")
        assert ask(cluster).report.decode_worker == "decode-0"


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        pytest.param(
            "transfer.transport",
            "nixxl",
            "transfer.transport must be one of nixl, cma, fake, or module:function",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "transfer.transport", "no_such_module:f", "module no_such_module cannot be imported", marks=pytest.mark.slow
        ),
        (
            "router.decode_policy",
            "fullest",
            "router.decode_policy must be one of prefix_aware, session_affinity, ",
        ),
    ],
)
def test_a_wrong_name_ends_the_start_with_its_message(setting: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    worker = "worker_id: w\nrouter_address: 127.0.0.1:1\n" if setting.startswith("transfer") else ""
    path.write_text(f"{worker}engine: {{model: tiny}}\n")
    module = "decode_worker" if worker else "router"
    command = [sys.executable, "-m", module, "--config", str(path), "--set", f"{setting}={name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert message in done.stderr
