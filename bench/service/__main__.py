"""`make bench-peers` measures our service beside vLLM's CPU server, over HTTP and by one load generator.

    python -m bench.service --peers [--rounds 7] [--auto] [--niced] [--int8] [--streams 1 8 32]

Our layouts are one colocated worker of two threads, two of one thread, and one prefill with one decode worker. vLLM gets
two threads, bound to cores. All run at niceness 0; `--niced` adds a colocated worker at niceness 15, Ray's default, `--auto`
a pair that may compute prompts in either worker, and `--int8` a colocated worker with 8-bit weights. In each round all get the
same prompts of random token ids, in turns, and the servers that are not asked are stopped. Greedy answers of ours in bfloat16
must be equal, or the exit status is 1. Without --peers only our layouts are measured.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Final

from rich.console import Console

from bench.engine.floors import measure as peaks
from bench.engine.peers.install import NotInstalled
from bench.engine.peers.peer import PeerFailed
from bench.service.cells import CELLS, Cell, TurnFailed, prompts_of, take_turn
from bench.service.comparison import Comparison, order_of
from bench.service.floor import Floor
from bench.service.servers import APART, AUTO, INT8, NICED, ONE, TWO, Server, ours, vllm
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.core.model_spec import ModelSpec

THREADS: Final = 2
IDLE_S: Final = 5.0


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def idle_line(servers: Sequence[Server]) -> str:
    """Return a line with each idle server's share of a core."""
    before = [server.cpu_s() for server in servers]
    time.sleep(IDLE_S)
    shares = [(server.cpu_s() - began_s) / IDLE_S for server, began_s in zip(servers, before, strict=True)]
    listed = ", ".join(f"{server.name} {share:.1%}" for server, share in zip(servers, shares, strict=True))
    return f"idle, of one core: {listed}; each is stopped while another one is asked"


def measure(
    servers: dict[str, Server], cells: Sequence[Cell], rounds: int, spec: ModelSpec, found: Comparison, say: Console
) -> None:
    """Run all rounds, and add their turns to `found`. The first round warms up and is not counted.

    The peaks of the machine are measured in each round, while all servers are stopped.
    """
    floor = Floor.of(spec)
    rng = random.Random(0)
    for server in servers.values():
        server.stop()
    for number in range(-1, rounds):
        say.print(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        machine = peaks(THREADS)
        for cell in cells:
            if number >= 0:
                found.floors.setdefault(cell, []).append(floor.tokens_per_s(cell, machine))
            prompts = prompts_of(cell, rng, spec.vocab_size)
            for name in order_of(tuple(servers), number + 1):
                server = servers[name]
                server.resume()
                try:
                    turn = take_turn(name, server.address, cell, prompts)
                finally:
                    server.stop()
                if number >= 0:
                    found.add(cell, name, turn)


def run(args: argparse.Namespace, say: Console) -> int:
    """Start the servers, measure and print. Return the exit status."""
    directory = resolve(args.model)
    card = ModelCard.load(directory)
    setups = (ONE, TWO, APART, *(one for one, asked in ((AUTO, args.auto), (NICED, args.niced), (INT8, args.int8)) if asked))
    names, theirs = tuple(one.name for one in setups), "vLLM" if args.peers else None
    found = Comparison(names, APART.name, theirs, not_counted=(NICED.name, INT8.name), inexact=(INT8.name,))
    cells = [cell for cell in CELLS if cell.streams in args.streams]
    with ExitStack() as stack:
        started = [stack.enter_context(vllm(directory, free_port(), THREADS))] if args.peers else []
        started += [stack.enter_context(ours(setup, args.model)) for setup in setups]
        say.print(idle_line(started))
        measure({server.name: server for server in started}, cells, args.rounds, card.spec, found, say)
    say.print(found.table(f"{card.name}, bfloat16, {THREADS} threads, prompt/output tokens x streams, {args.rounds} rounds"))
    for line in (*found.floor_lines(), *found.goals()):
        say.print(line)
    differing, share = found.differing(), found.agreement()
    say.print(f"greedy answers that differ between our layouts: {differing}")
    if share is not None:
        say.print(f"mean share of an answer of ours before the first difference to vLLM's: {share:.0%}")
    return 1 if differing else 0


def _end(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that the servers end too."""
    sys.exit(128 + number)


def main() -> None:
    """Read the arguments and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--peers", action="store_true", help="install vLLM's CPU server, and measure it too")
    parser.add_argument("--niced", action="store_true", help="measure a worker at niceness 15 too")
    parser.add_argument("--auto", action="store_true", help="measure 1P+1D with the placement auto too")
    parser.add_argument("--int8", action="store_true", help="measure a colocated worker with 8-bit weights too")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="only cells with so many streams")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(run(args, Console(width=150)))
    except (NotInstalled, PeerFailed, TurnFailed) as exc:
        sys.exit(f"bench-peers: {exc}")


if __name__ == "__main__":
    main()
