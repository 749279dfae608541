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
