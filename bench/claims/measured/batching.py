"""The claim about continuous against static batching. Both are policies of admission over the production scheduler."""

from __future__ import annotations

from typing import Final

from bench.claims.claim import Claim, Judgement, Table, inside
from bench.claims.figures import Figures
from bench.claims.measured.lengths import AZURE
from bench.claims.measured.steps import Admit, Job, Loop, continuous, prompt_of, static
from bench.claims.setup import Rounds, Setup

POLICIES: Final[dict[str, Admit]] = {"continuous": continuous, "static": static}
BATCH: Final = 8
SHORTER: Final = 4  # lengths are a quarter of the trace's, so that a round takes seconds


def jobs_of(count: int) -> list[Job]:
    """Return `count` requests with a quarter of the lengths of the trace."""
    return [Job(prompt_of(prompt // SHORTER, i), output // SHORTER) for i, (prompt, output) in enumerate(AZURE[:count])]


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Serve the same requests with both policies in turns. Raises `AssertionError` when their tokens differ."""
    jobs = jobs_of(setup.size(32, 12))
    runner, found = setup.runner(BATCH * 640), Figures()
    tokens = sum(job.output_tokens for job in jobs)
    found.counts |= {"requests": len(jobs), "output tokens": tokens}
    for _ in rounds.of(5):
        outputs = []
        for name, admit in POLICIES.items():
            loop = Loop.over(runner, BATCH)
            found.add(f"{name} tokens/s", tokens / loop.serve(jobs, admit))
            outputs.append(loop.outputs)
        assert outputs[0] == outputs[1], "the policy of batching changed the tokens"
    return found


def judge(found: Figures) -> Judgement:
    """Compare the ratio of both to the claimed range."""
    ratio = found.ratio("continuous tokens/s", "static tokens/s")
    return Judgement(inside(ratio, 2, 4), f"Here it outputs {ratio} times as many tokens a second, and the same tokens.")


def table(found: Figures) -> Table:
    """Return tokens a second of both policies."""
    rows = tuple((name, f"{found.median(f'{name} tokens/s'):,.0f}") for name in POLICIES)
    requests = f"{found.count('requests'):.0f} requests, {found.count('output tokens'):,.0f} output tokens"
    return Table((f"batching, at most {BATCH} at once", f"output tokens/s ({requests})"), rows)


CLAIM: Final = Claim(
    name="continuous-batching",
    says="Continuous batching has 2 to 4 times the throughput of static batching.",
    source="articles about serving engines; the idea is of Orca, Yu et al., OSDI 2022",
    rule="the ratio, with its interval, lies within 2 to 4.",
    minutes=2.3,
    value=3,
    measure=measure,
    judge=judge,
    table=table,
)
