"""`make bench-smoke` measures one request and eight at once, disaggregated and colocated, beside their floors.

Three clusters with the same total KV run side by side and are asked in turn, so that other load on the machine meets all of
them: one prefill and one decode worker, two colocated workers (one thread each), and one colocated worker with two threads. On
a machine with two cores disaggregation gains nothing from specialised hardware; the table shows what it costs, and where.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.engine.floors import Machine, measure
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.kv_layout import KvSpec
from pdserve.rpc.v1 import common_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

ROUNDS = 5
OUTPUT_TOKENS = 32


@dataclass(slots=True)
class Setup:
    """One cluster, with its answers and the seconds of each round, both by concurrency."""

    name: str
    prefill: int
    decode: int
    engine: EngineConfig
    placement: int
    answers: dict[int, list[Answer]] = field(default_factory=dict)
    walls_s: dict[int, list[float]] = field(default_factory=dict)


def setups(model: str, kv_bytes: int) -> list[Setup]:
    """Return the three clusters. `kv_bytes` is the KV memory of a worker with one thread."""
    one = EngineConfig(model=model, kv_cache_memory=kv_bytes, threads=1, enable_prefix_caching=False)
    two = replace(one, kv_cache_memory=2 * kv_bytes, threads=2)
    return [
        Setup("disaggregated 1P+1D", 1, 1, one, common_pb2.PLACEMENT_DISAGGREGATED),
        Setup("colocated 2 x 1 thread", 0, 2, one, common_pb2.PLACEMENT_COLOCATED),
        Setup("colocated 1 x 2 threads", 0, 1, two, common_pb2.PLACEMENT_COLOCATED),
    ]


def parameters(card: ModelCard) -> int:
    """Return the number of weights in the layers and the head: every token passes them. The embedding look-up costs nothing."""
    return card.spec.layer_numbers + card.vocab_size * card.spec.hidden_size


@dataclass(frozen=True, slots=True)
class Floors:
    """The best TTFT, ITL and rate that any engine could reach on this machine with this number of threads."""

    ttft_s: float
    itl_s: float
    tokens_s: float


def floors(card: ModelCard, layout: KvSpec, machine: Machine, prompt: int, batch: int, setup: Setup) -> Floors:
    """Return the floors of `batch` requests at once.

    Prefill takes its FLOPs at peak rate, and the median request also waits for half of the other prompts of its worker. A
    decode step takes the time to read weights and KV once, or the time of its FLOPs, whichever is longer.
    """
    head = card.vocab_size * card.spec.hidden_size
    prefill_s = 2 * ((parameters(card) - head) * prompt + head) / machine.bf16_flops_s
    prefills_each = -(-batch // (setup.prefill or setup.decode))
    decodes_each = -(-batch // setup.decode)
    step_bytes = parameters(card) * 2 + decodes_each * prompt * layout.bytes_per_token
    step_s = max(step_bytes / machine.read_bytes_s, 2 * parameters(card) * decodes_each / machine.bf16_flops_s)
    whole_s = prefills_each * prefill_s + (OUTPUT_TOKENS - 1) * step_s
    return Floors((prefills_each + 1) / 2 * prefill_s, step_s, batch * OUTPUT_TOKENS / whole_s)


def run_round(cluster: ProcessCluster, setup: Setup, concurrency: int, prompt: Sequence[Sequence[int]]) -> None:
    """Send all prompts to the cluster, and add the answers to `setup`."""
    sampling = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    messages = [request(ids, setup.placement, **sampling) for ids in prompt]
    answers = generate_all(cluster.grpc, messages, concurrency)
    setup.answers.setdefault(concurrency, []).extend(answers)
    setup.walls_s.setdefault(concurrency, []).append(max(a.arrivals_s[-1] for a in answers))


def median(values: Sequence[float]) -> float:
    """Return the median, or 0 when there are no values."""
    return statistics.median(values) if values else 0.0


def itls(answers: Sequence[Answer]) -> list[float]:
    """Return the times between consecutive tokens of all answers, in seconds."""
    return [b - a for answer in answers for a, b in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)]


def main_table(all_setups: list[Setup], concurrencies: Sequence[int], floor_of: dict[tuple[str, int], Floors]) -> Table:
    """Return the table of times and rates as clients see them, beside the floors."""
    table = Table(title="Client's view: median, floor, and the share of the floor reached")
    for column in ("setup", "concurrent", "TTFT ms", "floor", "ITL ms", "floor", "tokens/s", "floor"):
        table.add_column(column, justify="left" if column == "setup" else "right")
    for concurrency in concurrencies:
        for setup in all_setups:
            floor = floor_of[setup.name, concurrency]
            answers = setup.answers[concurrency]
            ttft, itl = median([a.arrivals_s[0] for a in answers]), median(itls(answers))
            rate = median([concurrency * OUTPUT_TOKENS / wall for wall in setup.walls_s[concurrency]])
            table.add_row(
                setup.name,
                str(concurrency),
                f"{ttft * 1e3:.1f}",
                f"{floor.ttft_s * 1e3:.1f} ({floor.ttft_s / ttft:.0%})",
                f"{itl * 1e3:.1f}",
                f"{floor.itl_s * 1e3:.1f} ({floor.itl_s / itl:.0%})",
                f"{rate:.1f}",
                f"{floor.tokens_s:.0f} ({rate / floor.tokens_s:.0%})",
            )
    return table


PHASES = ("queue_s", "reserve_s", "prefill_s", "transfer_s", "commit_s", "exposed_transfer_s", "ttft_s", "tpot_s", "total_s")


def phase_table(all_setups: list[Setup], concurrencies: Sequence[int]) -> Table:
    """Return the table of the median time of each phase, as the router reports it."""
    table = Table(title="Router's view: median ms of each phase of a request")
    table.add_column("setup")
    table.add_column("concurrent", justify="right")
    for phase in PHASES:
        table.add_column(phase.removesuffix("_s").replace("_", " "), justify="right")
    for concurrency in concurrencies:
        for setup in all_setups:
            reports = [a.report for a in setup.answers[concurrency]]
            cells = [f"{median([getattr(r, phase) for r in reports]) * 1e3:.2f}" for phase in PHASES]
            table.add_row(setup.name, str(concurrency), *cells)
    return table


def transfer_lines(setup: Setup, machine: Machine, concurrencies: Sequence[int]) -> list[str]:
    """Return a line for each concurrency about the rate of KV transfers, beside a memory copy."""
    lines = []
    for concurrency in concurrencies:
        reports = [a.report for a in setup.answers[concurrency]]
        rate = median([r.kv_bytes / r.transfer_s for r in reports])
        size = median([r.kv_bytes for r in reports])
        floor_ms = size / machine.copy_bytes_s * 1e3
        lines.append(
            f"KV transfer, {concurrency} concurrent: {size / MIB:.1f} MiB a request at {rate / 1e9:.2f} GB/s; "
            f"floor {machine.copy_bytes_s / 1e9:.2f} GB/s (memory copy, {rate / machine.copy_bytes_s:.0%}), {floor_ms:.2f} ms"
        )
    return lines


def cost_lines(all_setups: list[Setup], concurrencies: Sequence[int]) -> list[str]:
    """Return a line for each concurrency with the cost of disaggregation here, and its place."""
    apart, together = all_setups[0], all_setups[1]
    lines = []
    for concurrency in concurrencies:
        a, b = apart.answers[concurrency], together.answers[concurrency]
        ttft = median([x.arrivals_s[0] for x in a]) / median([x.arrivals_s[0] for x in b])
        itl = median(itls(a)) / median(itls(b))
        wall = median(apart.walls_s[concurrency]) / median(together.walls_s[concurrency])
        exposed = median([x.report.exposed_transfer_s for x in a]) / median([x.report.total_s for x in a])
        lines.append(
            f"{concurrency} concurrent, disaggregated over colocated (2 x 1 thread): TTFT {ttft:.2f}x, ITL {itl:.2f}x, "
            f"whole batch {wall:.2f}x; the exposed transfer is {exposed:.1%} of a request"
        )
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kv-cache-memory-mib", type=int, default=256, help="KV memory of a worker with one thread")
    args = parser.parse_args()
    console = Console(width=160)
    card = ModelCard.load(resolve(args.model))
    layout = card.kv_layout(16, "bfloat16")
    with console.status("measuring the machine"):
        machines = {threads: measure(threads) for threads in (1, 2)}
    all_setups = setups(args.model, args.kv_cache_memory_mib * MIB)
    rng = random.Random(0)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting clusters", total=args.rounds * len(args.concurrency) * len(all_setups))
        clusters = [ProcessCluster(s.engine, prefill=s.prefill, decode=s.decode).__enter__() for s in all_setups]
        try:
            for round_number in range(-1, args.rounds):  # round -1 warms up and is not counted
                for concurrency in args.concurrency:
                    prompts = [[rng.randrange(card.vocab_size) for _ in range(args.prompt_tokens)] for _ in range(concurrency)]
                    for cluster, setup in zip(clusters, all_setups, strict=True):
                        run_round(cluster, setup, concurrency, prompts)
                        progress.update(bar, advance=int(round_number >= 0), description=f"round {max(round_number, 0) + 1}")
                if round_number < 0:
                    for setup in all_setups:
                        setup.answers.clear()
                        setup.walls_s.clear()
        finally:
            for cluster in clusters:
                cluster.__exit__()
    floor_of = {
        (s.name, c): floors(card, layout, machines[s.engine.threads], args.prompt_tokens, c, s)
        for s in all_setups
        for c in args.concurrency
    }
    console.print(
        f"{card.name}, bf16, {args.prompt_tokens} prompt and {OUTPUT_TOKENS} output tokens, {args.rounds} interleaved rounds; "
        f"one thread reads {machines[1].read_bytes_s / 1e9:.0f} GB/s, multiplies {machines[1].bf16_flops_s / 1e9:.0f} GFLOP/s."
    )
    console.print(main_table(all_setups, args.concurrency, floor_of))
    console.print(phase_table(all_setups, args.concurrency))
    for line in [*transfer_lines(all_setups[0], machines[1], args.concurrency), *cost_lines(all_setups, args.concurrency)]:
        console.print(line)


if __name__ == "__main__":
    main()
