"""What a configuration asks for, worker by worker."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster import plan
from pdserve.cluster.events import Event
from pdserve.cluster.launch import Cluster
from pdserve.cluster.nodes import Node
from pdserve.config import ClusterConfig, EngineConfig, PoolConfig, RouterConfig, TransferConfig, VllmConfig
from pdserve.core.errors import ConfigError


def workers(config: ClusterConfig, nodes: Sequence[Node] = ()) -> tuple[plan.WorkerPlan, ...]:
    return plan.plan_workers(config, router_address="h:1", cluster_token="t", log_dir=Path("logs"), nodes=nodes)


def test_workers_get_the_limit_of_a_drain() -> None:
    assert {worker.config.drain_timeout_s for worker in workers(ClusterConfig(drain_timeout_s=7.5))} == {7.5}


def test_workers_serve_openengine_at_ports_that_go_by_their_ids() -> None:
    """A worker that has changed its role keeps its port. The planner may bring more workers than a pool began with."""
    pools = [PoolConfig(replicas=2, openengine_port=port) for port in (50100, 65535)]
    config = ClusterConfig(prefill=pools[0], decode=pools[1])
    ports = [plan.openengine_port(config, worker_id) for worker_id in ("prefill-0", "prefill-7", "decode-0")]
    assert ports == [50100, 50107, 65535]
    with pytest.raises(ConfigError, match=r"^decode\.openengine_port is 65535"):
        workers(config)
    assert {worker.config.openengine_port for worker in workers(ClusterConfig())} == {None}
    anywhere = ClusterConfig(prefill=PoolConfig(openengine_port=0), decode=PoolConfig(openengine_port=0))
    assert {worker.config.openengine_port for worker in workers(anywhere)} == {0}


def test_each_pool_gets_its_workers_with_its_own_engine() -> None:
    config = ClusterConfig(
        prefill=PoolConfig(replicas=1, engine={"max_num_batched_tokens": 2048}),
        decode=PoolConfig(replicas=2, resources={"big": 0.5}, max_restarts_per_hour=7),
    )
    prefill, first, second = workers(config)
    assert [worker.worker_id for worker in (prefill, first, second)] == ["prefill-0", "decode-0", "decode-1"]
    assert prefill.config.engine.max_num_batched_tokens == 2048
    assert first.config.engine.max_num_batched_tokens is None
    assert prefill.resources == {}, "an empty section once meant resources that no plain node offers"
    assert first.resources == {"big": 0.5}
    assert first.max_restarts_per_hour == 7
    assert {worker.config.cluster_token for worker in (prefill, first, second)} == {"t"}


@given(prefill=st.integers(0, 5), decode=st.integers(1, 5))
def test_a_private_ray_offers_what_its_workers_need(prefill: int, decode: int) -> None:
    config = ClusterConfig(
        prefill=PoolConfig(replicas=prefill, resources={"big": 0.5, "fast": 2}),
        decode=PoolConfig(replicas=decode, resources={"big": 1}, labels={"pool": "decode"}),
    )
    assert not any(worker.labels for worker in workers(config)), "one node cannot be of all kinds"
    needed: dict[str, float] = {}
    for worker in workers(config):
        for name, amount in worker.resources.items():
            needed[name] = needed.get(name, 0.0) + amount
    assert plan.local_resources(config) == needed


@given(count=st.integers(1, 20), nodes=st.integers(1, 20))
def test_workers_share_a_nodes_cores(count: int, nodes: int) -> None:
    config = ClusterConfig(address="auto", prefill=PoolConfig(replicas=0), decode=PoolConfig(replicas=count))
    share = workers(config, [node(str(number)) for number in range(nodes)])[0].share
    assert share * nodes >= count > (share - 1) * nodes


def test_workers_that_are_pinned_to_one_node_share_its_cores_alone() -> None:
    """Counted over all nodes, four of them took the cores of one machine four times."""
    nodes = [node("a", pool="prefill"), node("b", pool="decode"), node("c"), node("d")]
    prefill, decode = (PoolConfig(replicas=count, labels={"pool": role}) for role, count in (("prefill", 1), ("decode", 4)))
    assert [w.share for w in workers(ClusterConfig(address="auto", prefill=prefill, decode=decode), nodes)] == [1, 4, 4, 4, 4]


def node(name: str, **labels: str) -> Node:
    return Node(name, f"host-{name}", {}, {}, labels)


def test_threads_follow_what_was_asked_for() -> None:
    assert plan.threads_of(EngineConfig(threads=3), num_cpus=8, share=1) == 3
    assert plan.threads_of(EngineConfig(), num_cpus=8, share=1) == 8
    assert plan.threads_of(EngineConfig(), num_cpus=0, share=1000) == 1


def gangs(*, num_cpus: float = 0.0, address: str = "local", **engine: object) -> ClusterConfig:
    """Return a cluster of one prefill worker with 4 ranks and two decode workers with 1 rank each."""
    prefill = PoolConfig(num_cpus=num_cpus, engine={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **engine})
    return ClusterConfig(address=address, prefill=prefill, decode=PoolConfig(replicas=2, num_cpus=num_cpus))


def test_a_gang_asks_ray_for_the_cpus_of_all_its_ranks_at_once() -> None:
    assert [(w.ranks, w.num_cpus, w.needs.ranks) for w in workers(gangs(num_cpus=1.5))] == [
        (4, 6.0, 4),
        (1, 1.5, 1),
        (1, 1.5, 1),
    ]
    assert [w.needs.amounts for w in workers(gangs())] == [{}, {}, {}], "most clusters reserve nothing"


def test_the_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(18))
    alone = workers(gangs())
    assert [w.share for w in alone] == [6, 6, 6]
    assert [plan.on_this_node(w, "h").engine.threads for w in alone] == [3, 3, 3]
    apart = workers(gangs(address="auto"), [node("a"), node("b")])
    assert [w.share for w in apart] == [5, 1, 5]
    reserved = workers(gangs(num_cpus=2))
    assert [plan.on_this_node(w, "h").engine.threads for w in reserved] == [2, 2, 2], "each rank has those of its own"
    unplaced = workers(gangs(address="auto", num_cpus=2), [node(name) for name in "abcdef"])
    assert [w.share for w in unplaced] == [4, 1, 1], "a gang is on one node, wherever that will be"


def test_a_gang_is_refused_where_its_ranks_would_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    says = r"tensor_parallel_size 2 x pipeline_parallel_size 2 are 4 ranks, and this machine has 2 cores"
    with pytest.raises(ConfigError, match=rf"^prefill\.engine: {says}"):
        plan.check_cores(gangs())
    with pytest.raises(ConfigError, match=rf"^{says}"):
        plan.on_this_node(workers(gangs())[0], "10.0.0.7")
    with pytest.raises(ConfigError, match=r"4 ranks, and the node 10\.0\.0\.7 has 2 cores"):
        plan.on_this_node(workers(gangs(address="auto"))[0], "10.0.0.7")
    slow = gangs(oversubscribe=True)
    plan.check_cores(slow)
    assert [plan.on_this_node(w, "h").engine.threads for w in workers(slow)] == [1, 1, 1]
    plan.check_cores(ClusterConfig(decode=PoolConfig(replicas=99, engine={"threads": 64})))


def test_a_gang_without_cores_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    started: list[Event] = []
    cluster = Cluster(gangs(device="cpu"), stop=threading.Event(), listener=started.append)
    with pytest.raises(ConfigError, match="4 ranks, and this machine has 3 cores"), cluster:
        cluster.start()
    assert started == []


def test_only_workers_of_a_real_cluster_use_their_nodes_address() -> None:
    local, spread = workers(ClusterConfig())[0], workers(ClusterConfig(address="auto"))[0]
    assert plan.on_this_node(local, "10.0.0.7").host == "127.0.0.1"
    here = plan.on_this_node(spread, "10.0.0.7")
    assert (here.host, here.advertise_host, here.allow_public_bind) == ("10.0.0.7", "10.0.0.7", True)
    assert not plan.on_this_node(local, "10.0.0.7").allow_public_bind
    named = workers(ClusterConfig(address="auto", advertise_host="w.example"))[0]
    assert plan.on_this_node(named, "10.0.0.7").advertise_host == "w.example"
    assert local.env == {}  # it inherits what it needs
    assert spread.env == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (RouterConfig(), "127.0.0.1:7000"),
        (RouterConfig(host="0.0.0.0"), "10.0.0.7:7000"),
        (RouterConfig(host="0.0.0.0", link_host="10.9.9.9"), "10.9.9.9:7000"),
        (RouterConfig(link_host="0.0.0.0", advertise_host="router.example"), "router.example:7000"),
    ],
)
def test_workers_dial_an_address_that_leads_somewhere(router: RouterConfig, expected: str) -> None:
    assert plan.dial_address("0.0.0.0:7000", router, "10.0.0.7") == expected


def test_router_judges_by_the_smaller_pool() -> None:
    config = ClusterConfig(prefill=PoolConfig(engine={"kv_cache_memory": "64MiB"}))
    assert plan.router_config(config, "t", "10.0.0.7").engine.kv_cache_memory == 64 << 20


@pytest.mark.parametrize(
    ("prefill", "decode", "judged_by"), [("int8", "bf16", "bf16"), ("fp32", "int4", "fp32"), ("auto", "int8", "auto")]
)
def test_router_judges_by_the_pool_whose_blocks_are_larger(prefill: str, decode: str, judged_by: str) -> None:
    config = ClusterConfig(
        prefill=PoolConfig(engine={"kv_cache_dtype": prefill}), decode=PoolConfig(engine={"kv_cache_dtype": decode})
    )
    assert plan.router_config(config, "t", "10.0.0.7").engine.kv_cache_dtype == judged_by


def test_only_a_router_of_a_real_cluster_listens_for_workers_beyond_loopback() -> None:
    def link_host(config: ClusterConfig) -> str | None:
        return plan.router_config(config, "t", "10.0.0.7").router.link_host

    assert link_host(ClusterConfig()) is None
    assert link_host(ClusterConfig(address="auto")) == "10.0.0.7"
    assert link_host(ClusterConfig(address="auto", router=RouterConfig(link_host="10.1.1.1"))) == "10.1.1.1"


def test_workers_beat_as_often_as_their_router_expects() -> None:
    """It could not be set, and a router could be told to give workers up sooner than they speak."""
    config = ClusterConfig(router=RouterConfig(heartbeat_interval_s=0.25, heartbeat_lost_s=1.5))
    assert {(w.config.heartbeat_interval_s, w.config.router_lost_s) for w in workers(config)} == {(0.25, 1.5)}


def test_an_admin_port_for_others_needs_a_secret_that_they_know() -> None:
    """A secret that this process makes up is known to nobody else, so no call could ever be allowed."""
    config = ClusterConfig(router=RouterConfig(admin_host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"router\.admin_host .* --cluster-token"):
        Cluster(config, stop=threading.Event())
    Cluster(config, stop=threading.Event(), cluster_token="known")


ALIKE = {"num_cpus": 1.0, "engine": {"max_num_seqs": 8}}


def test_workers_of_pools_that_are_alike_may_change_their_role() -> None:
    config = ClusterConfig(prefill=PoolConfig(replicas=1, **ALIKE), decode=PoolConfig(replicas=3, labels={"a": "b"}, **ALIKE))
    assert {worker.config.flip_obstacle for worker in workers(config)} == {""}


def test_a_server_of_several_nodes_keeps_its_role() -> None:
    """The processes on the other nodes have it in their commands, and nobody starts them anew."""
    engine = EngineConfig(backend="vllm", tensor_parallel_size=2, vllm=VllmConfig(command=("vllm",), nodes=2))
    obstacle = "prefill.engine.vllm.nodes is 2, and the other nodes of a server keep their role"
    assert plan.flip_obstacle(ClusterConfig(address="auto", engine=engine)) == obstacle


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        (
            {"engine": {"kv_cache_dtype": "int8"}},
            "prefill.engine.kv_cache_dtype auto and decode.engine.kv_cache_dtype int8 differ",
        ),
        (
            {"engine": {"tensor_parallel_size": 2}},
            "prefill.engine.tensor_parallel_size 1 and decode.engine.tensor_parallel_size 2 differ",
        ),
        ({"num_gpus": 1.0}, "prefill.num_gpus 0.0 and decode.num_gpus 1.0 differ"),
        ({"resources": {"big": 1.0}}, "prefill.resources unset and decode.resources {'big': 1.0} differ"),
        ({"labels": {"zone": "a"}}, "prefill.labels unset and decode.labels {'zone': 'a'} differ"),
    ],
)
def test_a_worker_names_the_first_setting_in_which_the_pools_differ(change: dict[str, object], obstacle: str) -> None:
    config = ClusterConfig(address="auto", decode=PoolConfig(**change))  # type: ignore[arg-type]
    assert {worker.config.flip_obstacle for worker in workers(config)} == {obstacle}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ClusterConfig(engine=EngineConfig(model="nonexistent")), "model 'nonexistent' is not known"),
        (ClusterConfig(engine=EngineConfig(model="./nowhere")), "model './nowhere' does not exist"),
        (
            ClusterConfig(engine=EngineConfig(model=str(Path(__file__).parent))),
            "is not a model directory in Hugging Face layout",
        ),
        (
            ClusterConfig(router=RouterConfig(chat_template="/no/file")),
            "router.chat_template: cannot read /no/file: No such file",
        ),
        (ClusterConfig(router=RouterConfig(prefill_policy="best")), "router.prefill_policy must be one of"),
        (ClusterConfig(router=RouterConfig(decode_policy="best")), "router.decode_policy must be one of"),
        (ClusterConfig(transfer=TransferConfig(transport="pigeon")), "transfer.transport must be one of"),
    ],
)
def test_a_part_that_is_not_there_was_told_after_ray_had_started(config: ClusterConfig, says: str) -> None:
    started: list[Event] = []
    cluster = Cluster(config, stop=threading.Event(), listener=started.append)
    with pytest.raises(ConfigError, match=re.escape(says)), cluster:
        cluster.start()
    assert started == []


def test_parts_of_ones_own_and_models_to_download_are_not_looked_for() -> None:
    own = RouterConfig(prefill_policy="mine:score", decode_policy="mine:score")
    plan.check_parts(ClusterConfig(engine=EngineConfig(model="org/name"), router=own))
