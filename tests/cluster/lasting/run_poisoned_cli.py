"""The real command line with decode workers that a request can end: `python run_poisoned_cli.py up --port 0`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2])]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2]), str(HERE)])

from pdserve import cli  # noqa: E402
from pdserve.cluster import launch, plan  # noqa: E402

if __name__ == "__main__":
    entries = {**plan.WORKER_ENTRIES, plan.DECODE: "poisoned_worker:start"}
    launch.Cluster.__init__.__kwdefaults__.update(entries=entries)
    cli.main(prog_name="pdserve")
