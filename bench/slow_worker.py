"""Real workers on slow machines: a step computes as ever, and then the engine waits until it has lasted as a cost model says.

`python -m bench.slow_worker up ...` is `pdserve up` with such workers. `SLOW` in its environment names the folder with their
costs, where each worker notes the work and the time of all its steps. Only the engine's thread waits: links, heartbeats, reads
of KV and the start of a process are as fast as ever. So several workers share a core, and one more of them adds to the
capacity, as it would on a machine of its own.

To stop processes for a share of the time (SIGSTOP) was tried first. It needs nothing inside a worker, but steps then depend on
all that the machine does: with two cores that others used too, steps of eight sequences took 65 ms in one minute and 113 ms in
another one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import WorkerConfig
from pdserve.core.step_plan import StepPlan
from sim.perf.costs import CostModel, StepWork, work_of

if TYPE_CHECKING:  # only a worker's process loads torch
    from pdserve.engine.runner import ModelRunner, Pending
    from pdserve.worker.process import RunningWorker

SLOW: Final = "PDSERVE_BENCH_SLOW"
"""The variable with the folder. Ray's processes inherit it from `pdserve up`."""
IDLE_S: Final = 0.01
"""An engine with work begins its next step within a few milliseconds. After a longer pause it had none."""
ENTRIES: Final = {"prefill": "bench.slow_worker:start_prefill", "decode": "bench.slow_worker:start_decode"}

Step = tuple[StepWork, float]
"""The work of a step, and the seconds that it took."""


def write_costs(folder: Path, costs: CostModel) -> None:
    """Write the costs that all workers of a cluster will have."""
    (folder / "costs.json").write_text(json.dumps(asdict(costs)))


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of all workers until now. A line that is being written is left out."""
    lines = [line for file in sorted(folder.glob("steps-*")) for line in file.read_text().splitlines(keepends=True)]
    return list(_steps(line.split() for line in lines if line.endswith("\n")))


def _steps(rows: Iterable[list[str]]) -> Iterable[Step]:
    for tokens, pairs, decodes, context, took_s in rows:
        yield StepWork(int(tokens), int(pairs), int(decodes), int(context)), float(took_s)


def start_prefill(config: WorkerConfig, progress: Progress = silent) -> RunningWorker:
    """Start a slow prefill worker."""
    import prefill_worker.main

    slow_down(Path(os.environ[SLOW]))
    return prefill_worker.main.start(config, progress)


def start_decode(config: WorkerConfig, progress: Progress = silent) -> RunningWorker:
    """Start a slow decode worker."""
    import decode_worker.main

    slow_down(Path(os.environ[SLOW]))
    return decode_worker.main.start(config, progress)


def slow_down(folder: Path) -> None:
    """Let each step of this process last as long as the costs in `folder` say, and note it there."""
    from pdserve.engine.runner import ModelRunner

    costs = CostModel(**json.loads((folder / "costs.json").read_text()))
    notes = os.open(folder / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    launch = ModelRunner.launch
    ended_s = 0.0

    def launch_slowly(self: ModelRunner, plan: StepPlan) -> Pending:
        nonlocal ended_s
        began_s = time.perf_counter()
        pending = launch(self, plan)
        if plan.slices:
            work = work_of(plan)
            time.sleep(max(0.0, began_s + costs.step_s(work) - time.perf_counter()))
            before_s, ended_s = ended_s, time.perf_counter()
            if began_s - before_s < IDLE_S:
                began_s = before_s  # what a busy engine does between two steps is a part of the later one
            took_s = ended_s - began_s
            line = f"{work.prompt_tokens} {work.prompt_pairs} {work.decodes} {work.context_tokens} {took_s:.6f}\n"
            os.write(notes, line.encode())
        return pending

    ModelRunner.launch = launch_slowly  # type: ignore[method-assign]


def main() -> None:
    """Run the command line of pdserve, whose clusters have slow workers."""
    from pdserve import cli
    from pdserve.cluster.launch import Cluster

    assert Cluster.__init__.__kwdefaults__ is not None
    Cluster.__init__.__kwdefaults__["entries"] = ENTRIES
    cli.main(prog_name="pdserve")


if __name__ == "__main__":
    main()
