"""Measures how a long prompt delays the streams beside it, by the size of its chunks, and how small chunks delay the prompt.

    python -m bench.engine.chunks [--chunks 128 256 512 1024 2048] [--streams 8] [--prompt-tokens 4000] [--rounds 3] [--wall]
                           [--tpot S] [--plot FILE.png]

One engine thread runs as in a colocated worker. Streams decode; then a prompt arrives and is computed in chunks. A step has
at most `max_num_batched_tokens` tokens, of which each stream takes one. The prompt runs twice in each round, alone and beside
the streams; the sizes take turns. A chunk costs more when it has more tokens of its prompt before it. So the gaps between a
stream's tokens (ITL) are compared with the slowest chunk alone: their 99th percentile may be 1.5 times as long. Times are
CPU time of the engine thread, which has one compute thread and waits for nothing, so other work on the machine does not
count; `--wall` measures wall-clock time instead. With `--tpot` each size also runs with streams that have this target for the
time between their tokens.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineThread
from pdserve.worker.messages import Abort, Reserve, StepEvents

Case = tuple[int, float]
"""The most tokens of a step, and the target of the streams in seconds. 0: they have none."""
GOAL: Final = 1.5
STREAM_TOKENS: Final = 128  # tokens of a stream's prompt
SETTLED: Final = 4  # tokens that each stream has output before the prompt arrives
TIMEOUT_S: Final = 120.0
PROMPT: Final = SeqId(0)


@dataclass
class Found:
    """Measured seconds for one chunk size, over all rounds."""

    chunks: list[float] = field(default_factory=list)
    ttfts_alone: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    @property
    def slowest_chunk(self) -> float:
        """The 99th percentile of the chunks, as for the ITLs. The last chunk is the slowest: it has the most cached tokens."""
        return percentile(self.chunks, 99)


def percentile(values: list[float], share: int) -> float:
    """Return the value below which `share` percent of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


class Engine:
    """One engine thread and its messages, each with the time when it was published."""

    def __init__(self, runner: ModelRunner, budget: int, clock: Callable[[], float]) -> None:
        self._messages: queue.Queue[tuple[float, StepEvents]] = queue.Queue()
        self._clock = clock
        pool = BlockPools(runner.kv.num_blocks)
        scheduler = Scheduler(
            pool,
            runner.kv.spec.block_size,
            max_num_seqs=64,
            max_num_batched_tokens=budget,
            max_model_len=runner.max_model_len,
            eos_token_ids=(),
        )
        self.thread = EngineThread(lambda: (runner, scheduler, pool), self._publish, self._die)
        self.thread.start(TIMEOUT_S)

    def add(self, seq_id: SeqId, tokens: int, tpot_s: float = 0.0) -> None:
        """Start a sequence with a prompt of `tokens` tokens and a target for the time between its output tokens. 0: no
        target."""
        prompt = tuple((7 + 31 * seq_id + i) % 500 for i in range(tokens))
        params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        self.thread.submit(Reserve(seq_id, RequestSpec(prompt, params, tpot_s=tpot_s), local_prefill=True))

    def next(self) -> tuple[float, StepEvents]:
        """Return the next message and its time. Raises `queue.Empty` after TIMEOUT_S, for example when the engine has died."""
        return self._messages.get(timeout=TIMEOUT_S)

    def abort(self, seq_ids: list[SeqId]) -> None:
        """End these sequences."""
        for seq_id in seq_ids:
            self.thread.submit(Abort(seq_id))

    def _publish(self, events: StepEvents) -> None:
        self._messages.put((self._clock(), events))  # this runs in the engine thread, so it reads that thread's clock

    def _die(self, exc: BaseException) -> None:
        raise exc


@contextmanager
def started(runner: ModelRunner, budget: int, clock: Callable[[], float]) -> Iterator[Engine]:
    """Run an engine with a step budget of `budget` tokens, and stop it afterwards."""
    engine = Engine(runner, budget, clock)
    try:
        yield engine
    finally:
        assert engine.thread.stop(TIMEOUT_S), "the engine thread did not stop"


def run_prompt(engine: Engine, streams: int, tokens: int, tpot_s: float = 0.0) -> tuple[float, list[float]]:
    """Run the prompt beside `streams` streams. Return its time to first token and the time of each step until then."""
    ids = [SeqId(1 + i) for i in range(streams)]
    for seq_id in ids:
        engine.add(seq_id, STREAM_TOKENS, tpot_s)
    seen = dict.fromkeys(ids, 0)
    while any(count < SETTLED for count in seen.values()):
        for token in engine.next()[1].tokens:
            seen[token.seq_id] += 1
    engine.add(PROMPT, tokens)
    times: list[float] = []
    while True:
        now, events = engine.next()
        if any(result.seq_id == PROMPT for result in events.reserved):
            assert all(result.block_tables is not None for result in events.reserved), "no room for the prompt"
            times = [now]
        elif times and events.snapshot is not None:
            times.append(now)
        if any(token.seq_id == PROMPT for token in events.tokens):
            break
    engine.abort([PROMPT, *ids])
    return times[-1] - times[0], [b - a for a, b in pairwise(times)]


def measure(runner: ModelRunner, cases: list[Case], streams: int, tokens: int, rounds: int, wall: bool) -> dict[Case, Found]:
    """Measure each case, in turn, over all rounds.

    Every stream has a token in every step, so the time of a step is the gap between two tokens of each stream.
    """
    found = {case: Found() for case in cases}
    clock = time.perf_counter if wall else time.thread_time
    for _ in range(rounds):
        for (size, tpot_s), one in found.items():
            with started(runner, size, clock) as engine:
                ttft, chunks = run_prompt(engine, 0, tokens)
                one.ttfts_alone.append(ttft)
                one.chunks += chunks
            with started(runner, size, clock) as engine:
                ttft, itls = run_prompt(engine, streams, tokens, tpot_s)
                one.ttfts.append(ttft)
                one.itls += itls
    return found


def report(found: dict[Case, Found], title: str) -> Table:
    """Return the table of results, one row for each case."""
    table = Table("chunk", title=title)
    for column in ("chunk alone p50 ms", "p99 ms", "ITL p50 ms", "p99 ms", "p99 / chunk's p99", "TTFT s", "TTFT alone s"):
        table.add_column(column, justify="right")
    for (size, tpot_s), one in found.items():
        ratio = percentile(one.itls, 99) / one.slowest_chunk
        table.add_row(
            f"{size}, target {tpot_s * 1e3:.0f} ms" if tpot_s else str(size),
            *(f"{percentile(values, share) * 1e3:.0f}" for values in (one.chunks, one.itls) for share in (50, 99)),
            f"{ratio:.2f}" + ("" if ratio <= GOAL else f" (goal {GOAL})"),
            *(f"{statistics.median(values):.2f}" for values in (one.ttfts, one.ttfts_alone)),
        )
    return table


def plot(found: dict[int, Found], path: Path, title: str) -> None:
    """Draw two figures over the chunk size: on the left the ITL of the streams, on the right the prompt's TTFT."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    results = list(found.values())
    itls = (
        (f"slowest chunk alone, times {GOAL}", [GOAL * one.slowest_chunk for one in results], ":", "0.5"),
        ("p99", [percentile(one.itls, 99) for one in results], "o-", "C3"),
        ("p50", [percentile(one.itls, 50) for one in results], "s-", "C0"),
    )
    for label, values, style, colour in itls:
        left.plot(list(found), [1e3 * value for value in values], style, color=colour, label=label)
    left.set_title("time between two tokens of a stream, ms", fontsize="medium")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    left.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    left.set_yticks([t for t in (50, 100, 200, 500, 1000, 2000, 5000) if left.get_ylim()[0] <= t <= left.get_ylim()[1]])
    right.plot(list(found), [statistics.median(one.ttfts) for one in results], "o-", color="C3", label="beside the streams")
    right.plot(list(found), [statistics.median(one.ttfts_alone) for one in results], "s-", color="C0", label="alone")
    right.set_title("time to the prompt's first token, s", fontsize="medium")
    right.set_ylim(0, 1.15 * max(right.get_ylim()))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(found), [str(size) for size in found])
        axes.set_xlabel("chunk: most tokens of a step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Measure and print the table; draw the figure when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wall", action="store_true", help="measure wall-clock time instead of CPU time of the engine thread")
    parser.add_argument("--tpot", type=float, metavar="S", help="also measure each size with this target of the streams")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw ITL and TTFT over the chunk size; needs matplotlib")
    args = parser.parse_args()
    directory = resolve(args.model)
    card = ModelCard.load(directory)
    longest = args.prompt_tokens + 2
    blocks = ceil_div(longest, 16) + args.streams * ceil_div(STREAM_TOKENS + 512, 16)
    config = EngineConfig(
        model=args.model,
        dtype="bfloat16",
        threads=1,
        kv_cache_memory=blocks * card.kv_layout(16, "bfloat16").block_bytes,
        max_model_len=longest,
    )
    runner = ModelRunner.load(directory, card, config)
    cases = [(size, tpot_s) for size in args.chunks for tpot_s in ((0.0, args.tpot) if args.tpot else (0.0,))]
    found = measure(runner, cases, args.streams, args.prompt_tokens, args.rounds, args.wall)
    title = (
        f"{card.name}, bfloat16, one thread: a prompt of {args.prompt_tokens:,} tokens beside {args.streams} streams, "
        f"{args.rounds} rounds, {'time on the wall' if args.wall else 'CPU time'}"
    )
    Console(width=120).print(report(found, title))
    if args.plot is not None:
        plot({size: one for (size, tpot_s), one in found.items() if not tpot_s}, args.plot, title)


if __name__ == "__main__":
    main()
