"""The real command line over the stand-ins: `python run_cli.py up --port 0`. For tests of processes and signals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]
os.environ["PYTHONPATH"] = str(HERE)  # so that the workers' processes find their stand-in

from pdserve import cli  # noqa: E402
from pdserve.cluster import launch, plan  # noqa: E402

ROUTER = (sys.executable, str(HERE / "standin_router.py"))
ENTRIES = {plan.PREFILL: "standin_worker:start_prefill", plan.DECODE: "standin_worker:start_decode"}

if __name__ == "__main__":
    launch.Cluster.__init__.__kwdefaults__.update(router_command=ROUTER, entries=ENTRIES)
    cli.main(prog_name="pdserve")
