"""Which worker gets which GPU: by rules on numbers, with faked environments, and under a real Ray."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.gpus import assigned, gpus_here, gpus_of, workers_of_a_gpu
from pdserve.cluster.nodes import Node
from pdserve.cluster.plan import WorkerPlan, flip_obstacle, plan_workers
from pdserve.config import MIB, ClusterConfig, EngineConfig, PoolConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.runner import device_of

HERE = Path(__file__).resolve().parent


def config_of(prefill: int = 1, decode: int = 1, *, gpus: int | None = None, device: str = "auto") -> ClusterConfig:
    return ClusterConfig(
        prefill=PoolConfig(replicas=prefill), decode=PoolConfig(replicas=decode), gpus=gpus, engine=EngineConfig(device=device)
    )


def planned(config: ClusterConfig, present: int) -> tuple[WorkerPlan, ...]:
    return plan_workers(assigned(config, present), router_address="h:1", cluster_token="t", log_dir=Path("logs"))


@given(prefill=st.integers(0, 9), decode=st.integers(1, 9), present=st.integers(1, 9), gpus=st.none() | st.integers(1, 9))
def test_all_workers_find_a_place_and_no_gpu_is_promised_twice(
    prefill: int, decode: int, present: int, gpus: int | None
) -> None:
    """Place the plans as Ray does, on one GPU after the other: nobody is left over, and no memory is given away twice."""
    workers = planned(config_of(prefill, decode, gpus=gpus), present)
    most = min(present, gpus or present)
    free = [1.0] * most
    memory: Counter[int] = Counter()
    for worker in workers:
        place = next(index for index, left in enumerate(free) if left >= worker.num_gpus - 1e-9)
        free[place] -= worker.num_gpus
        memory[place] += worker.config.engine.gpu_memory_utilization  # type: ignore[assignment]
    assert max(memory.values()) <= 0.9 + 1e-9
    assert {worker.config.engine.device for worker in workers} == {"cuda"}
    assert len({(worker.num_gpus, worker.config.engine.gpu_memory_utilization) for worker in workers}) == 1
    if prefill + decode <= most:
        assert workers[0].num_gpus == 1.0
    assert not flip_obstacle(assigned(config_of(prefill, decode, gpus=gpus), present))


@given(workers=st.integers(1, 99), gpus=st.integers(1, 99))
def test_no_more_workers_share_a_gpu_than_must(workers: int, gpus: int) -> None:
    sharing = workers_of_a_gpu(workers, gpus)
    assert sharing * gpus >= workers > (sharing - 1) * gpus


def test_the_default_cluster_on_one_gpu_halves_it() -> None:
    """Both workers took 0.9 of the same memory once, so the second one found no room."""
    workers = planned(config_of(), 1)
    assert [(one.num_gpus, one.config.engine.gpu_memory_utilization) for one in workers] == [(0.5, 0.45)] * 2


@pytest.mark.parametrize(("gpus", "present"), [(0, 4), (None, 0), (2, 0)])
def test_without_gpus_nothing_is_reserved(gpus: int | None, present: int) -> None:
    workers = planned(config_of(gpus=gpus), present)
    assert {(one.num_gpus, one.config.engine.device) for one in workers} == {(0.0, "cpu" if gpus == 0 else "auto")}


def test_pools_on_the_cpu_get_none_and_leave_them_to_the_other_pool() -> None:
    config = dataclasses.replace(config_of(2, 2), prefill=PoolConfig(replicas=2, engine={"device": "cpu"}))
    assert [(one.num_gpus, one.config.engine.device) for one in planned(config, 2)] == [(0.0, "cpu")] * 2 + [(1.0, "cuda")] * 2


def test_pools_that_name_their_gpus_are_left_as_they_are() -> None:
    """The other pool then has none: its workers would otherwise compute on a GPU that is another worker's."""
    config = dataclasses.replace(config_of(), prefill=PoolConfig(num_gpus=2))
    assert [(one.num_gpus, one.config.engine.device) for one in planned(config, 4)] == [(2.0, "cuda"), (0.0, "cpu")]


def test_later_workers_find_room_too() -> None:
    config = dataclasses.replace(config_of(), decode=PoolConfig(replicas=1, max_replicas=3))
    assert {one.num_gpus for one in planned(config, 4)} == {1.0}
    assert {one.num_gpus for one in planned(config, 2)} == {0.5}


def test_a_machine_with_too_few_gpus_is_an_error_and_a_joined_cluster_may_grow() -> None:
    local = ClusterConfig(prefill=PoolConfig(replicas=3, num_gpus=1), decode=PoolConfig(replicas=1, num_gpus=1))
    with pytest.raises(ConfigError, match=r"ask for 4 GPUs \(prefill: 3 x num_gpus 1 and decode: 1 x num_gpus 1\), and 2 may"):
        assigned(local, 2)
    joined = dataclasses.replace(local, address="auto")
    assert assigned(joined, 2).prefill.num_gpus == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"prefill": PoolConfig(num_gpus=1, engine={"device": "cpu"})},
            r"prefill\.num_gpus is 1 and its engine\.device is cpu",
        ),
        ({"gpus": 0, "decode": PoolConfig(num_gpus=1)}, r"gpus is 0 and decode\.num_gpus is 1"),
        ({"gpus": 0, "engine": EngineConfig(device="cuda")}, r"gpus is 0 and prefill\.engine\.device is cuda"),
        ({"decode": PoolConfig(num_gpus=0.5)}, r"decode\.num_gpus is 0\.5, so 2 workers share a GPU.*to 0\.5 or less"),
    ],
)
def test_settings_that_contradict_each_other_are_errors(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**changed)  # type: ignore[arg-type]


def test_gangs_on_gpus_say_how_large_their_pool_is_and_compute_on_cpus_where_gpus_are_left_out() -> None:
    config = dataclasses.replace(config_of(), decode=PoolConfig(engine={"tensor_parallel_size": 2}))
    with pytest.raises(
        ConfigError, match=r"^decode\.engine\.device is auto, there are GPUs, and .* are 2 ranks, .*: set kv_cache_memory"
    ):
        assigned(config, 3)
    sized = dataclasses.replace(config, decode=PoolConfig(engine={"tensor_parallel_size": 2, "kv_cache_memory": MIB}))
    assert [one.num_gpus for one in planned(sized, 3)] == [1, 2]
    with pytest.raises(ConfigError, match="ask for 3 GPUs"):
        assigned(sized, 2)
    assert [one.ranks for one in planned(config, 0)] == [1, 2]
    assert [one.config.engine.device for one in planned(dataclasses.replace(config, gpus=0), 1)] == ["cpu", "cpu"]
    other = dataclasses.replace(config, prefill=PoolConfig(num_gpus=1))
    assert [one.config.engine.device for one in planned(other, 1)] == ["cuda", "cpu"]


def test_each_rank_of_a_server_of_vllm_gets_a_gpu() -> None:
    engine = EngineConfig(backend="vllm", tensor_parallel_size=2)
    config = ClusterConfig(engine=engine, decode=PoolConfig(engine={"tensor_parallel_size": 1}))
    got = [(one.num_gpus, one.config.engine.device, one.config.engine.gpu_memory_utilization) for one in planned(config, 4)]
    assert got == [(2.0, "cuda", 0.9), (1.0, "cuda", 0.9)]
    with pytest.raises(ConfigError, match="ask for 3 GPUs"):
        assigned(config, 2)
    assert assigned(dataclasses.replace(config, address="auto"), 2).prefill.num_gpus == 2


def test_the_nodes_of_a_cluster_tell_their_gpus() -> None:
    nodes = [Node(str(count), "h", {"GPU": count} if count else {}, {}, {}) for count in (0, 2.0, 8.0)]
    assert gpus_of(nodes) == 10


@pytest.mark.parametrize(
    ("listed", "count"),
    [(None, 4), ("", 0), ("0,1", 2), ("3", 1), ("0,-1,2", 1), ("GPU-a,GPU-b", 2), ("0,1,2,3,4,5,6,7", 4), ("NoDevFiles", 1)],
)
def test_the_machine_and_its_environment_are_counted(tmp_path: Path, listed: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert gpus_here({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == count


def test_a_variable_alone_is_no_gpu(tmp_path: Path) -> None:
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, tmp_path) == 0


def test_a_worker_with_a_gpu_that_cuda_cannot_use_says_where_and_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never computes on the CPU instead, without a word, at a hundredth of the speed."""
    (worker, _) = planned(config_of(), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    with pytest.raises(ConfigError, match=r"no CUDA device on node-7: torch .* was built without CUDA.*--gpus 0"):
        device_of(worker.config.engine.device)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES is '3'; see what `nvidia-smi` says.*CUDA 12\.8.*--gpus 0"):
        device_of(worker.config.engine.device)


PROGRAM = """
import os, runpy, sys
from pathlib import Path
from typing import Any
sys.argv = sys.argv[1:]
runner = runpy.run_path(sys.argv[0], run_name="runner")
here = Path(sys.argv[0]).parent
os.environ["PYTHONPATH"] = f"{here}:{here / 'gpus'}"
launch, cli = runner["launch"], runner["cli"]
launch.gpus_here = lambda environment: int(environment["GPUS_HERE"])
entries = {role: name.replace("standin_worker", "seen_gpus") for role, name in runner["ENTRIES"].items()}
launch.Cluster.__init__.__kwdefaults__.update(router_command=runner["ROUTER"], entries=entries)
cli.main(prog_name="pdserve")
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), [("4", 1), ("5", 1), ("6", 1), ("7", 1)]),
        (("--gpus", "2"), [("4", 2), ("5", 2)]),
        (("--gpus", "0"), [("4,5,6,7", 4)]),
    ],
    ids=["one each", "shared", "none"],
)
def test_ray_shows_each_worker_its_own_gpu(
    run_command: Any, tmp_path: Path, arguments: tuple[str, ...], expected: list[tuple[str, int]]
) -> None:
    """Four workers and four GPUs, which do not exist: each sees one of them. With two, each is seen by two workers."""
    up = ("up", "--port", "0", "--prefill", "2", "--decode", "2", *arguments)
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "GPUS_HERE": "4", "SEEN": str(tmp_path)}
    run_cli = str(HERE.parent / "run_cli.py")
    run_command(*up, program=("-c", PROGRAM, run_cli), **environment).wait_for("ready; Ctrl-C stops it")
    seen = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert sorted(Counter(visible for visible, _, _ in seen).items()) == expected
    memory = {"--gpus 2": "0.450"}.get(" ".join(arguments), "0.900")
    assert {(device, share) for _, device, share in seen} == {("cpu" if "0" in arguments else "cuda", memory)}
