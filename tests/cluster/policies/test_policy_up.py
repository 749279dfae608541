"""The example of a scaling policy on a real cluster of stand-ins, and a wrong setting of it."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import pytest
from conftest import Command

from pdserve.cluster import processes
from pdserve.core.worker import Role
from pdserve.planner.limits import Targets
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.policy import ScalingContext

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PROGRAM = """
import os, runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
here, examples = Path(sys.argv[0]).parent, os.environ["EXAMPLES"]
runner = runpy.run_path(sys.argv[0], run_name="runner")
os.environ["PYTHONPATH"] = f"{here}:{examples}"
launch, cli = runner["launch"], runner["cli"]
launch.Cluster.__init__.__kwdefaults__.update(router_command=runner["ROUTER"], entries=runner["ENTRIES"])
cli.main(prog_name="pdserve")
"""
RUN_CLI = str(EXAMPLES.parent / "tests" / "cluster" / "run_cli.py")
POLICY = ("--set", "prefill.scaling_policy=scaling_policy:prefill_workers", "--set", "autoscaling.interval_s=1")


def test_the_example_grows_to_the_queue_and_shrinks_by_one() -> None:
    size = runpy.run_path(str(EXAMPLES / "scaling_policy.py"))["prefill_workers"]

    def asked(waiting: float | None, workers: int) -> int:
        seen = Observations(10.0, 10.0, DemandObserved(queued_prompt_tokens=waiting), PoolObserved(queued_tokens=1.0))
        return int(size(ScalingContext(Role.PREFILL, workers, 1, 9, seen, Targets())))

    assert [asked(50_000, 1), asked(20_000, 1), asked(None, 4), asked(0, 1)] == [3, 2, 3, 1]


@pytest.mark.slow
@pytest.mark.ray
def test_the_example_follows_the_queue(run_command: type[Command], short_tmp: Path) -> None:
    """(1) Prompts wait: the policy wants three prefill workers, and gets them. (2) Nothing waits: they leave one by one, while
    the planner keeps the other pool. (3) The cluster is killed, and the policy's process ends."""
    queued = short_tmp / "queued"
    queued.write_text("50000")
    arguments = ("up", "--port", "0", "--autoscaling", "--max-workers", "6", *POLICY)
    command = run_command(
        *arguments, program=("-c", PROGRAM, RUN_CLI), EXAMPLES=str(EXAMPLES), STANDIN_QUEUED_TOKENS=str(queued)
    )
    command.wait_for("ready; Ctrl-C stops it")
    command.wait_for(r"prefill 1 -> 3: The policy scaling_policy:prefill_workers wants 3 prefill workers")
    command.wait_for(r"prefill-2 [^\n]*ready")
    queued.write_text("0")
    command.wait_for(r"prefill 2 -> 1: The policy scaling_policy:prefill_workers wants 1 prefill worker\.")
    policies = [each for each in command.seen if "pdserve: policy" in processes.command(each)]
    assert policies
    os.kill(command.child.pid, signal.SIGKILL)
    assert not processes.wait_gone(policies, 60.0)
    command.end()


def test_a_policy_that_cannot_be_imported_stops_the_start(run_command: type[Command]) -> None:
    command = run_command("up", "--port", "0", "--set", "prefill.scaling_policy=scaling_policies:none")
    command.wait_for(r"prefill.scaling_policy is 'scaling_policies:none', and module scaling_policies cannot be imported")
    assert command.end() == 2
    assert "Ray starting" not in command.text
    command.assert_nothing_left()
