"""The claim about speculative decoding: how much it gives at an acceptance that is good."""

from __future__ import annotations

import gc
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside, together
from bench.claims.figures import Figures
from bench.claims.setup import Rounds, Setup
from pdserve.config import MIB

KINDS: Final = ("chat", "code", "summary")
BATCHES: Final = (1, 16)
GOOD: Final = 0.7
"""The least acceptance of the claim: the share of the drafts that are right."""


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Decode texts of each kind at each batch size with drafts of an int4 copy and of lookups, and without drafts, in turns.
    Raises `AssertionError` when their tokens differ."""
    from bench.engine.speculation import SpeculationRuns, answered, run_of
    from pdserve.config import EngineConfig, SpeculativeConfig

    config = EngineConfig(
        model=setup.model, dtype="bfloat16", threads=1, kv_cache_memory=setup.size(512, 64) * MIB,
        speculative_config=SpeculativeConfig(method="self"),
    )  # fmt: skip
    bench, found = SpeculationRuns(setup.directory, config), Figures()
    # A tiny model of random weights only repeats itself.
    texts = answered(bench, KINDS, "report", setup.size(160, 32), whole=setup.quick)
    batches = (1, setup.size(BATCHES[1], 2))
    for kind in KINDS:
        for named, batch in zip(BATCHES, batches, strict=True):
            found.counts |= {f"{kind} at {named} {what}": 0.0 for what in ("drafts", "accepted")}
            run_of(bench, texts[kind], batch, 0, bench.choice)  # the choice learns, and the prompts are kept
    for number in rounds.of(5):
        for kind in KINDS:
            for named, batch in zip(BATCHES, batches, strict=True):
                for mode, choice in (("without", None), ("with", bench.choice)):
                    counts = run_of(bench, texts[kind], batch, number, choice)
                    found.add(f"{kind} at {named} {mode}, tokens/s", counts.tokens / counts.cpu_s)
                    found.counts[f"{kind} at {named} drafts"] += counts.drafts
                    found.counts[f"{kind} at {named} accepted"] += counts.accepted
    del bench
    gc.collect()
    return found


def _acceptance(found: Figures, cell: str) -> float:
    """Return the share of the drafts of a cell that were right; 0 if there were none."""
    return found.count(f"{cell} accepted") / max(found.count(f"{cell} drafts"), 1.0)


CELLS: Final = tuple(f"{kind} at {batch}" for batch in BATCHES for kind in KINDS)


def judge(found: Figures) -> Judgement:
    """Compare the gain to the claimed range wherever the acceptance is good. Nothing is confirmed where it never is."""
    gains = {cell: found.ratio(f"{cell} with, tokens/s", f"{cell} without, tokens/s") for cell in CELLS}
    good = {cell: gain for cell, gain in gains.items() if _acceptance(found, cell) >= GOOD}
    if not good:
        return Judgement(Verdict.DEPENDS, "Here no texts have such an acceptance.")
    told = ", ".join(f"{gain} times for {cell} (acceptance {_acceptance(found, cell):.2f})" for cell, gain in good.items())
    return Judgement(together([inside(gain, 2, 4) for gain in good.values()]), f"Here it makes decode faster {told}.")


def table(found: Figures) -> Table:
    """Return tokens a second with and without drafts, and the acceptance."""
    rows = tuple(
        (
            cell,
            f"{found.median(f'{cell} without, tokens/s'):,.0f}",
            f"{found.median(f'{cell} with, tokens/s'):,.0f}",
            str(found.ratio(f"{cell} with, tokens/s", f"{cell} without, tokens/s")),
            f"{_acceptance(found, cell):.2f}" if found.count(f"{cell} drafts") else "no drafts",
        )
        for cell in CELLS
    )
    return Table(("texts and sequences", "without, tokens/s", "with, tokens/s", "times (95 %)", "acceptance"), rows)


CLAIM: Final = Claim(
    name="speculation",
    says="Speculative decoding makes decode 2 to 4 times as fast at an acceptance of 0.7 to 0.85.",
    source="articles about serving engines; Leviathan et al., ICML 2023, tell 2 to 3 times of T5-XXL",
    rule="the gain, with its interval, lies within 2 to 4 for all texts and batches whose drafts are right in 0.7 or more.",
    minutes=2.5,
    measure=measure,
    judge=judge,
    table=table,
)
