"""The flags of `pdserve bench goodput`: wrong ones are refused by name, before anything is asked or measured."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pdserve.cli import main

WORKLOAD = ["bench", "goodput", "--workload", "random:8/2"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--budget-minutes", "0"], "--budget-minutes"),
        (["--budget-minutes", "nan"], "--budget-minutes"),
        (["--ttft", "-1"], "--ttft"),
        (["--tpot", "inf"], "--tpot"),
        (["--result-file", "/nowhere/at/all.json"], "--result-file"),
        (["--seed", "-1"], "--seed"),
        (["--config", "c.yaml"], "--config is for clusters that the search starts"),
        (["--cores", "2"], "--cores is for clusters that the search starts"),
        (["--tp", "1,2", "--address", "a:1"], "--address is of a running cluster"),
        (["--tp", "1,x"], "--tensor-parallel-size: '1,x' is not a list of numbers from 1 to 8"),
        (["--tp", "2", "--cores", "100000"], "--cores: 100000 is more than this machine has"),
        (["--tp", "2", "--model", "tiny", "--gpus", "2"], "--gpus: gangs of pdserve's own engine compute on CPUs"),
        (["--tp", "2", "--gpus", "2", "--cores", "2"], "--cores and --gpus"),
    ],
)
def test_a_wrong_flag_is_named(flags, named):
    done = CliRunner().invoke(main, [*WORKLOAD, *flags])
    assert done.exit_code == 2
    assert named in done.output


def test_a_cluster_that_does_not_answer_is_named():
    done = CliRunner().invoke(main, [*WORKLOAD, "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.output
