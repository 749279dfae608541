"""A search over degrees: what it refuses before anything is started, which layouts it tries, and on which cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli import main
from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.degrees import DegreeSpace, degree_space
from pdserve_bench.search.goodput import GoodputSearch
from pdserve_bench.search.result import read_result
from pdserve_bench.search.settings import AUTO, SearchSettings, limits_of, prefill_ranks_of, split_ranks
from testkit.toy_models import write_shared
from tests.bench.search.servers import Bench, Server, Station
from tests.engine.engine_ways import COMPILED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four query heads and two KV heads: up to four ranks can share it."""
    folder = tmp_path_factory.mktemp("model")
    write_shared(folder)
    return str(folder)


@pytest.fixture
def config(model: str, tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    engine = {"model": model, "dtype": "bfloat16", "oversubscribe": True, "max_num_seqs": 16, "kv_cache_memory": "16MiB"}
    path.write_text(json.dumps({"engine": engine}))
    return path


def flags(config: Path | None, tp: str, **changes: Any) -> dict[str, Any]:
    asked = {"tensor_parallel_size": tp, "config": config, "model": None, "cores": 4, "gpus": None, "splits": AUTO}
    return asked | changes


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_every_split_uses_all_ranks(ranks: int, prefill_ranks: int, decode_ranks: int) -> None:
    colocated, apart = split_ranks(range(ranks), ranks, prefill_ranks, decode_ranks)
    assert bool(colocated) is (prefill_ranks == decode_ranks and ranks % decode_ranks == 0)
    for prefill in (*colocated, *apart):
        decode = (ranks - prefill * prefill_ranks) // decode_ranks
        assert decode >= 1
        assert Layout(prefill, decode, 1, 1, prefill_ranks, decode_ranks).ranks == ranks


def test_a_space_has_the_pairs_that_use_all_cores_and_starts_with_the_highest_degree(config: Path) -> None:
    space = degree_space(flags(config, "2,1"))
    assert (space.pairs, space.ranks, space.device) == (((1, 1), (2, 2), (1, 2), (2, 1)), 4, "core")
    assert space.first == Layout(0, 2, 1, 1, 2, 2)
    assert degree_space(flags(config, "1,2", cores=3)).pairs == ((1, 1), (1, 2), (2, 1))
    assert degree_space(flags(config, "1,2", splits="0:4")).pairs == ((1, 1), (2, 2))


def test_flips_lead_between_layouts_of_one_degree_alone() -> None:
    alike, mixed = Layout(0, 2, 1, 1, 2, 2), Layout(2, 1, 1, 1, 1, 2)
    assert DegreeSpace.fits(alike, Layout(1, 1, 512, 64, 2, 2))
    assert not DegreeSpace.fits(alike, Layout(0, 4, 512, 64))
    assert DegreeSpace.fits(mixed, Layout(2, 1, 512, 64, 1, 2))
    assert not DegreeSpace.fits(mixed, Layout(4, 1, 512, 64, 1, 2))


@pytest.mark.parametrize(
    ("tp", "changes", "settings", "said"),
    [
        (
            "1,8",
            {"cores": 8},
            {},
            r"--tensor-parallel-size: .*8 does not divide this model, with 4 query heads.* use 1 or 2 or 4",
        ),
        (
            "1,2",
            {"cores": 1},
            {},
            r"no split of 1 cores has workers of 2 ranks .* give --cores 2, other --splits, or leave 2 out",
        ),
        ("1,2", {"splits": "1:2"}, {}, r"--splits: '1:2' must have all 4 cores"),
        ("2", {}, {"address": "auto"}, r"address is auto: .* starts its clusters on this machine"),
        ("2", {}, {"decode": {"engine": {"threads": 2}}}, r"decode\.engine\.threads is 2: .* each rank one core"),
        ("2", {}, {"prefill": {"engine": {"pipeline_parallel_size": 2}}}, r"prefill\.engine\.pipeline_parallel_size is 2"),
    ],
)
def test_what_model_or_settings_do_not_allow_is_refused_by_name(
    config: Path, tp: str, changes: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    with pytest.raises(ConfigError, match=said):
        degree_space(flags(config, tp, **changes))


def state_of(*workers: tuple[int, int]) -> inference_pb2.GetClusterStateResponse:
    """Return a cluster of workers with these roles and ranks."""
    hellos = [{"role": role, "tensor_parallel_size": ranks, "max_num_seqs": 8} for role, ranks in workers]
    return inference_pb2.GetClusterStateResponse(workers=[{"hello": hello} for hello in hellos])


def test_gangs_of_a_running_cluster_count_their_ranks_and_flip_only_between_equal_pools() -> None:
    prefill, decode = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
    alike = limits_of(state_of((prefill, 2), (decode, 2), (decode, 2)))
    assert (alike.ranks, alike.degrees, prefill_ranks_of(AUTO, alike, None)) == (6, (2, 2), (0, 2, 4))
    mixed = limits_of(state_of((prefill, 4), (decode, 0), (decode, 1)))
    assert (mixed.ranks, mixed.degrees) == (6, (4, 1))
    assert prefill_ranks_of(AUTO, mixed, None) == prefill_ranks_of("1:2", mixed, None) == (4,)
    with pytest.raises(ConfigError, match=r"--splits: '2:1' needs workers that change their roles, .* 4 ranks, .* 1: give 1:2"):
        prefill_ranks_of("2:1", mixed, None)
    with pytest.raises(ConfigError, match="decode workers have 1 and 2 ranks"):
        limits_of(state_of((decode, 1), (decode, 2)))


def gang_server(layout: Layout) -> Server:
    """A prompt takes 0.2 s of one rank, and gangs compute it 1.5 times as fast: two of them do less than four workers."""
    service_s = 0.2 if layout.decode_ranks == 1 else 0.2 / 1.5
    if not layout.disaggregated:
        return Server(Station(service_s, layout.decode), 0.5)
    prompt_s = 0.2 if layout.prefill_ranks == 1 else 0.2 / 1.5
    return Server(Station(prompt_s, layout.prefill), 0.5, Station(service_s / 4, layout.decode), 0.5)


def test_the_best_layout_of_each_pair_of_degrees_is_settled() -> None:
    pairs = ((1, 1), (2, 2), (1, 2), (2, 1))
    settings = SearchSettings(
        Slo(0.7, None), 4, (0, 2, 1, 3), (512,), 512, 1, first_rate_per_s=5.0, mean_output_tokens=1.0, degrees=pairs
    )
    bench = Bench(settings, gang_server, 3)
    points, stop = bench.search()
    results = GoodputSearch(settings).results(points)
    assert stop.complete
    assert {one.layout.ranks for one in results} == {4}
    best = {}
    for one in results:
        best.setdefault((one.layout.disaggregated, one.layout.degrees), one)
    assert set(best) == {(False, (1, 1)), (False, (2, 2)), *((True, pair) for pair in pairs)}
    assert all(one.settled for one in best.values())
    assert best[False, (2, 2)].goodput_per_s < 0.9 * best[False, (1, 1)].goodput_per_s


@pytest.mark.slow
@pytest.mark.cluster
@COMPILED
def test_one_command_compares_degrees_on_real_clusters_and_one_page_tells_all(config: Path, tmp_path: Path) -> None:
    """No rate keeps a target of 1 us for the first token, so that some seconds of load decide each degree on any machine."""
    kept, page = tmp_path / "r.json", tmp_path / "page.html"
    asked = "--workload random:32/4 --tp 1,2 --cores 2 --splits 0:2 --chunks 128 --ttft 0.000001 --tpot 1 --max-point-s 15"
    known = ["--first-rate", "20", "--allow-late", "--budget-minutes", "9", "--result-file", str(kept)]
    done = CliRunner().invoke(
        main, ["bench", "verdict", *asked.split(), *known, "--config", str(config), "--html", str(page)], catch_exceptions=False
    )
    assert kept.exists(), done.output
    result = read_result(kept)
    assert {(one.layout.name, one.layout.ranks) for one in result.layouts} == {("2 colocated", 2), ("1 colocated (2 ranks)", 2)}
    assert result.device == "core"
    assert all(point.requests and not point.attained for point in result.points)
    assert "TP 2 for colocated workers was measured, and no rate was kept with it, nor with TP 1." in page.read_text()
