"""The claim about paged KV: the production scheduler with blocks of 16 tokens, and with one block for a whole sequence.

A block of `max_model_len` tokens is a contiguous reservation. The scheduler runs without a model, since it needs none to place
real lengths in memory; then steps with as many sequences as fitted are timed on the model.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside, percent, together
from bench.claims.figures import Figures
from bench.claims.measured.lengths import AZURE, MOST_TOKENS
from bench.claims.measured.steps import Job, Loop, Steps
from bench.claims.setup import Rounds, Setup
from pdserve.core.ids import SeqId
from pdserve.core.step_plan import Sampled, StepPlan

BLOCK: Final = {"paged": 16, "contiguous": MOST_TOKENS}
POOL_TOKENS: Final = 12 * MOST_TOKENS  # 540 MiB of KV for the default model
REPEATS: Final = 4  # the number of times that the lengths are served, so that most of the run has a full pool


@dataclass
class Occupancy:
    """The state of the pool in each step while sequences wait."""

    loop: Loop
    ends: dict[SeqId, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)

    def watch(self, plan: StepPlan) -> None:
        """Count the sequences, the tokens whose KV is stored, and the room that is held for them."""
        scheduler, pool = self.loop.scheduler, self.loop.pool
        for piece in plan.slices:
            self.ends[piece.seq_id] = piece.start + len(piece.token_ids)
        if scheduler.num_waiting:
            held = (pool.num_blocks - pool.num_allocatable) * self.loop.block_size
            self.used.append(sum(self.ends[piece.seq_id] for piece in plan.slices) / held)
            self.running.append(scheduler.num_running)


def fill(block_size: int, repeats: int = REPEATS) -> Occupancy:
    """Serve the trace's lengths with made-up tokens, all waiting from the start."""
    blocks = POOL_TOKENS // block_size
    loop = Loop(_made_up, blocks, block_size, MOST_TOKENS, 10 * len(AZURE), budget=10 * len(AZURE))
    occupancy = Occupancy(loop)
    loop.watch = occupancy.watch
    loop.serve([Job((5,) * prompt, min(output, MOST_TOKENS - prompt)) for prompt, output in AZURE * repeats])
    return occupancy


def _made_up(plan: StepPlan) -> list[Sampled]:
    return [(5, None)] * sum(len(piece.samples) for piece in plan.slices)


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Count sequences and waste for both, then measure steps with these numbers of sequences in turns."""
    found = Figures()
    context = sum(prompt + output // 2 for prompt, output in AZURE) // len(AZURE)
    found.counts["mean tokens of a running sequence"] = context
    for name, block_size in BLOCK.items():
        occupancy = fill(block_size)
        found.counts |= {
            f"{name} sequences": statistics.mean(occupancy.running),
            f"{name} waste": 1 - statistics.mean(occupancy.used),
        }
    batches = {name: round(found.counts[f"{name} sequences"]) for name in BLOCK}
    steps = Steps(setup.runner(max(batches.values()) * (context + 16)))
    for _ in rounds.of(7):
        for name, batch in batches.items():
            found.add(f"{name} tokens/s", batch / steps.decode_s(batch, context))
    return found


def judge(found: Figures) -> Judgement:
    """Confirm where both the waste and the gain in throughput are as claimed."""
    paged, whole = found.count("paged waste"), found.count("contiguous waste")
    gain = found.ratio("paged tokens/s", "contiguous tokens/s")
    verdicts = [_at_most(paged, 0.04), _at_most(0.618, whole), inside(gain, 2, 4)]
    more = found.count("paged sequences") / found.count("contiguous sequences")
    return Judgement(
        together(verdicts),
        f"Here {percent(paged, 1)} of the held memory is wasted and not {percent(whole)}, {more:.1f} times as many sequences "
        f"fit, and they output {gain} times as many tokens a second.",
    )


def _at_most(value: float, limit: float) -> Verdict:
    return Verdict.CONFIRMED if value <= limit else Verdict.REFUTED


def table(found: Figures) -> Table:
    """Return sequences, waste and throughput of both."""
    rows = tuple(
        (
            f"{name}, blocks of {size:,} tokens",
            f"{found.count(f'{name} sequences'):.1f}",
            percent(found.count(f"{name} waste"), 1),
            f"{found.median(f'{name} tokens/s'):,.0f}",
        )
        for name, size in BLOCK.items()
    )
    return Table((f"KV of {POOL_TOKENS:,} tokens", "sequences that fit, mean", "waste", "decode tokens/s of so many"), rows)


CLAIM: Final = Claim(
    name="paging",
    says="Contiguous reservation wastes 62 to 80 % of KV memory and paging under 4 %, which gives 2 to 4 times the throughput.",
    source='vLLM: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023',
    rule="paging wastes at most 4 % and reservation at least 62 %, and the ratio of throughput lies within 2 to 4.",
    minutes=0.5,
    measure=measure,
    judge=judge,
    table=table,
)
