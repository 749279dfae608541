"""A verdict that searches first: flags go to the search, and each status of the search has its own end."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from results import usual

from pdserve.cli import main
from pdserve_bench.commands import verdict_search
from pdserve_bench.commands.goodput import UNFINISHED


@pytest.fixture
def search(monkeypatch):
    """A search that takes no time: it keeps a result and ends with a status. It returns what it was called with."""
    seen: dict[str, object] = {"status": 0, "result": usual()}

    @click.command()
    @click.option("--workload", required=True)
    @click.option("--result-file", type=Path)
    @click.option("--address")
    @click.option("--admin-address")
    @click.option("--tp")
    @click.option("--config")
    def goodput(result_file: Path, **flags: object) -> None:
        seen.update(flags)
        click.echo("searching")
        if seen["result"] is not None:
            result_file.write_bytes(msgspec.json.encode(seen["result"]))
        raise SystemExit(seen["status"])

    monkeypatch.setattr(verdict_search, "goodput", goodput)
    return seen


def verdict(*flags: str):
    return CliRunner().invoke(main, ["bench", "verdict", *flags])


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (UNFINISHED, 0), (130, 130), (1, 1), (2, 2)])
def test_the_status_of_the_search_decides_how_the_command_ends(search, status, ends):
    search["status"] = status
    done = verdict("--workload", "random:1024/128")
    assert (done.exit_code, search["workload"]) == (ends, "random:1024/128")
    assert ("two pools serve more" in done.output) is (ends in (0, 130))


def test_json_alone_is_on_standard_output(search):
    done = verdict("--workload", "w", "--json")
    assert json.loads(done.stdout)["decision"] == "disaggregate"
    assert "searching" in done.stderr


def test_an_interrupt_before_the_first_point_has_no_verdict(search):
    search.update(status=130, result=None)
    assert verdict("--workload", "w").exit_code == 130


def test_a_search_over_degrees_gets_the_settings_of_its_clusters(search):
    done = verdict("--workload", "w", "--tp", "1,2", "--config", "c.yaml")
    assert (done.exit_code, search["tp"], search["config"]) == (0, "1,2", "c.yaml")


def test_workers_start_a_cluster_of_both_pools(search, monkeypatch):
    class Cluster:
        address, admin_address = "127.0.0.1:1", "127.0.0.1:2"

        def __init__(self, *sizes: object) -> None:
            search["sizes"] = sizes

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            search["stopped"] = True

    monkeypatch.setattr(verdict_search, "OwnCluster", Cluster)
    assert verdict("--workload", "w", "--workers", "5").exit_code == 0
    assert (search["sizes"], search["stopped"]) == ((2, 3, None), True)
    assert (search["address"], search["admin_address"]) == ("127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "give --from FILE, or --workload"),
        (("--from", "x", "--workers", "2"), "--workers is of a search"),
        (("--from", "x", "--workload", "w"), "--workload w is of a search"),
        (("--workers", "2", "--workload", "w", "--tp", "1,2"), "--workers starts one cluster, and --tensor-parallel-size"),
        (("--workload", "w", "--htlm", "x"), "No such option"),
        (("--workload", "w", "--dark"), "--dark needs --png"),
        (("--workload", "w", "--price-per-hour", "nan"), "--price-per-hour must be"),
        (("--workload", "w", "--workers", "1"), "--workers"),
    ],
)
def test_a_wrong_flag_is_refused_by_its_name_before_anything_runs(search, flags, said):
    done = verdict(*flags)
    assert (done.exit_code, "searching" in done.output) == (2, False)
    assert said in done.output
