"""The claim about prefix caching: the time to the first token by the share of the prompt that is cached."""

from __future__ import annotations

from typing import Final

from bench.claims.claim import Claim, Judgement, Table, inside, percent, together
from bench.claims.figures import Figures
from bench.claims.measured.steps import Job, Loop, prompt_of
from bench.claims.setup import Rounds, Setup

PROMPT: Final = 1024
CACHED: Final = (0, 512, 960)


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Measure the first token of prompts whose first tokens an earlier prompt had, or had not, in turns."""
    runner, found, seed = setup.runner(8 * PROMPT), Figures(), 0
    for _ in rounds.of(7):
        for cached in CACHED:
            seed += 2
            loop = Loop.over(runner, 1, salt=b"claim")
            before = prompt_of(PROMPT, seed)
            loop.serve([Job(before, 1)])
            prompt = before[:cached] + prompt_of(PROMPT, seed + 1)[cached:]
            found.add(f"TTFT s at {cached}", loop.serve([Job(prompt, 1)]))
    return found


def judge(found: Figures) -> Judgement:
    """Confirm where the saved share of the time is the cached share of the prompt, within a fifth."""
    hits = {cached: found.ratio(f"TTFT s at {cached}", "TTFT s at 0") for cached in CACHED[1:]}
    verdicts = []
    for cached, took in hits.items():
        share = cached / PROMPT
        verdicts.append(inside(took, 1 - 1.2 * share, 1 - 0.8 * share))
    texts = " and ".join(f"{took} of the time with {percent(cached / PROMPT)} cached" for cached, took in hits.items())
    return Judgement(together(verdicts), f"Here the first token takes {texts}.")


def table(found: Figures) -> Table:
    """Return TTFT by cached tokens."""
    rows = tuple(
        (
            str(cached),
            f"{found.median(f'TTFT s at {cached}') * 1e3:,.0f}",
            str(found.ratio("TTFT s at 0", f"TTFT s at {cached}")),
        )
        for cached in CACHED
    )
    return Table((f"cached of {PROMPT:,} tokens", "TTFT ms", "times as fast (95 %)"), rows)


CLAIM: Final = Claim(
    name="prefix-hit",
    says="A prefix hit saves the share of the prefill that the cached tokens are of the prompt.",
    source="vLLM's automatic prefix caching; SGLang's RadixAttention, Zheng et al., NeurIPS 2024",
    rule="the saved share of TTFT is 0.8 to 1.2 times the cached share of the prompt, at half and at 94 %.",
    minutes=0.5,
    measure=measure,
    judge=judge,
    table=table,
)
