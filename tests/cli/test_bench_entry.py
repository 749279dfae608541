"""`pdserve bench` comes from a distribution of its own, which may be missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from pdserve import cli


@pytest.fixture
def alone(monkeypatch):
    """Let pdserve be installed without pdserve-bench."""
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())


def test_the_help_lists_the_command_with_and_without_its_distribution(monkeypatch):
    whole = CliRunner().invoke(cli.main, ["--help"]).output
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    assert CliRunner().invoke(cli.main, ["--help"]).output == whole
    assert "\n  bench " in whole


@pytest.mark.parametrize("args", [[], ["--help"], ["run", "--workload", "random:8/2"]], ids=["bare", "help", "run"])
def test_without_its_distribution_the_command_says_how_to_get_it(args, alone):
    result = CliRunner().invoke(cli.main, ["bench", *args])
    assert (result.exit_code, result.stderr) == (
        1, "error: `pdserve bench` is not installed: run `pip install 'pdserve[bench]'`\n",
    )  # fmt: skip


def test_other_commands_do_not_load_it():
    load = "import sys; from pdserve.cli import main"
    code = f"{load}; main(['up', '--help'], standalone_mode=False); print('pdserve_bench' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("False\n")
