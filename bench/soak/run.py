"""`make soak MINUTES=10` puts a real cluster under random load and random faults, and reports all that was wrong.

The cluster has two prefill and two decode workers and is batch-invariant, so that every token can be compared with the
undisturbed run of the same request. Faults and requests follow from `--seed`. The exit status is 1 after a wrong token, a hang,
an error without a reason that a client can act on, a block that is not free at the end, a process that has grown, or a lost
task.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.soak.faults import Injector
from bench.soak.leaks import Growth, block_leaks, complaints
from bench.soak.load import Case, Clients, random_cases, with_oracle
from bench.soak.report import Report
from pdserve.config import MIB, EngineConfig
from testkit.client import generate_all
from testkit.faults import Supervisor
from testkit.processes import ProcessCluster

LOOK_S: Final = 1.0
HEAL_TIMEOUT_S: Final = 120.0


def engine(model: str) -> EngineConfig:
    """Return the settings of the engine of all workers."""
    small = model == "tiny"
    return EngineConfig(
        model=model,
        dtype="float32" if small else "auto",
        batch_invariant=True,
        kv_cache_memory=(8 if small else 256) * MIB,
        max_num_batched_tokens=32 if small else 256,
        max_model_len=2048,
        threads=1,
    )


def main() -> int:
    """Run the soak. Return 0 when it passed, else 1."""
    args = parse()
    console = Console()
    rng = random.Random(args.seed)
    # NIXL runs over TCP, as between machines: by CMA (copies within the host) a stopped peer could still be read.
    env = {"UCX_TLS": "tcp,self"} if args.tcp else {}
    with ProcessCluster(engine(args.model), prefill=2, decode=2, env=env) as cluster:
        console.print(f"the undisturbed runs of {args.cases} requests")
        cases = with_oracle(cluster.grpc, random_cases(rng, args.cases))
        cluster.assert_empty()
        report = soak(cluster, cases, args, console)
        if not report.passed:
            kept = Path(args.logs)
            shutil.copytree(cluster.folder, kept, dirs_exist_ok=True)
            console.print(f"logs kept in {kept}")
    report.show(console)
    return 0 if report.passed else 1


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="tiny", help="tiny, default, or any value that `pdserve up --model` takes")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--cases", type=int, default=64, help="number of different requests")
    parser.add_argument("--tcp", action=argparse.BooleanOptionalAction, default=True, help="KV over TCP instead of CMA")
    parser.add_argument("--logs", default="soak-logs", help="folder that gets the logs when something was wrong")
    return parser.parse_args()


def soak(cluster: ProcessCluster, cases: list[Case], args: argparse.Namespace, console: Console) -> Report:
    """Run load and faults for the given minutes, then let the cluster heal. Return what was found; everything must have come
    back.
    """
    growth = Growth(cluster, clients=args.clients)
    with Supervisor(cluster) as supervisor:
        with (
            Clients(cluster.grpc, cases, count=args.clients, seed=args.seed) as clients,
            Injector(cluster, args.seed) as injector,
        ):
            watch(60 * args.minutes, growth, clients, injector, console)
        report = Report(args.minutes, args.seed, clients.tally, injector.counts, supervisor.restarts)
        report.broken += [repr(error) for error in (injector.error, supervisor.error) if error is not None]
        console.print("healing")
        try:
            cluster.wait_whole(HEAL_TIMEOUT_S)
        except TimeoutError as exc:
            report.broken.append(f"not healed: {exc}")
            return report
    report.leaks += block_leaks(cluster)
    growth.look()
    report.broken += serves_as_before(cluster, cases)
    report.leaks += block_leaks(cluster) + growth.found() + complaints(cluster.folder)
    report.growth, report.num_watched = growth.rows(), growth.num_watched
    return report


def watch(seconds: float, growth: Growth, clients: Clients, injector: Injector, console: Console) -> None:
    """Show the progress and measure the processes for `seconds`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("soak", total=seconds)
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < seconds:
            tally = clients.tally
            words = (
                f"ok {tally.ok}, recovered {tally.recovered}, faults {injector.counts.total()}, wrong {tally.num_violations}"
            )
            progress.update(bar, completed=passed_s, description=words)
            growth.look()
            time.sleep(min(LOOK_S, seconds - passed_s))


def serves_as_before(cluster: ProcessCluster, cases: list[Case]) -> list[str]:
    """Send all requests to the healed cluster again. Return a line when any answer is wrong."""
    answers = generate_all(cluster.grpc, [case.message for case in cases], concurrency=16)
    wrong = sum(tuple(answer.ids) != case.expected for answer, case in zip(answers, cases, strict=True))
    return [f"{wrong} of {len(cases)} requests were wrong after healing"] if wrong else []


if __name__ == "__main__":
    sys.exit(main())
