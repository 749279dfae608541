"""Two claims about single steps: throughput of decode by batch size, and a prompt in units of decode steps."""

from __future__ import annotations

from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside, together
from bench.claims.figures import Figures
from bench.claims.measured.steps import Steps
from bench.claims.setup import Rounds, Setup

BATCHES: Final = (1, 8, 32)
CONTEXT: Final = 128
PROMPT: Final = 1000
EXPECTED: Final = {8: 5.0, 32: 12.0}
ABOUT: Final = 0.25


def measure_rates(setup: Setup, rounds: Rounds) -> Figures:
    """Measure tokens a second of decode steps at each batch size, in turns."""
    steps, found = Steps(setup.runner(max(BATCHES) * CONTEXT)), Figures()
    for _ in rounds.of(9):
        for batch in BATCHES:
            found.add(f"tokens/s at {batch}", batch / steps.decode_s(batch, CONTEXT))
    return found


def judge_rates(found: Figures) -> Judgement:
    """Compare each ratio to the claimed ratio."""
    ratios = {batch: found.ratio(f"tokens/s at {batch}", "tokens/s at 1") for batch in EXPECTED}
    verdicts = [inside(ratios[b], (1 - ABOUT) * much, (1 + ABOUT) * much) for b, much in EXPECTED.items()]
    return Judgement(together(verdicts), f"Here it is 1 : {ratios[8]} : {ratios[32]}.")


def table_rates(found: Figures) -> Table:
    """Return tokens a second by batch size."""
    rates = tuple(f"{found.median(f'tokens/s at {batch}'):,.0f}" for batch in BATCHES)
    over = ("1", *(str(found.ratio(f"tokens/s at {batch}", "tokens/s at 1")) for batch in BATCHES[1:]))
    return Table(("batch", *map(str, BATCHES)), (("tokens/s", *rates), ("times that of batch 1 (95 %)", *over)))


RATES: Final = Claim(
    name="decode-batch",
    says="Decode throughput at batch 1, 8 and 32 is as 1 : about 5 : about 12.",
    source="a rule of thumb of introductions to LLM serving, told of GPUs",
    rule="both ratios, with their intervals, lie within 25 % of 5 and of 12.",
    minutes=0.6,
    value=3,
    measure=measure_rates,
    judge=judge_rates,
    table=table_rates,
)


def measure_prompt(setup: Setup, rounds: Rounds) -> Figures:
    """Measure a prompt and decode steps whose sequences have as much context as the prompt, in turns."""
    steps, found = Steps(setup.runner(max(BATCHES) * (PROMPT + 16))), Figures()
    for _ in rounds.of(7):
        found.add("prompt s", steps.prefill_s(PROMPT))
        for batch in BATCHES:
            found.add(f"step s at {batch}", steps.decode_s(batch, PROMPT))
    return found


def judge_prompt(found: Figures) -> Judgement:
    """Confirm where a prompt costs 5 to 10 steps of one sequence; where it costs that only beside other batches, it depends."""
    ratios = {batch: found.ratio("prompt s", f"step s at {batch}") for batch in BATCHES}
    verdict = inside(ratios[1], 5, 10)
    if verdict is Verdict.REFUTED and any(inside(one, 5, 10) is not Verdict.REFUTED for one in ratios.values()):
        verdict = Verdict.DEPENDS
    steps = ", ".join(f"{one} steps of {batch}" for batch, one in ratios.items())
    return Judgement(verdict, f"Here such a prompt costs as much as {steps}.")


def table_prompt(found: Figures) -> Table:
    """Return the time of the prompt beside the time of each step."""
    prompt_s = found.median("prompt s")
    rows = tuple(
        (str(batch), f"{found.median(f'step s at {batch}') * 1e3:.1f}", str(found.ratio("prompt s", f"step s at {batch}")))
        for batch in BATCHES
    )
    return Table(("sequences of a step", "step ms", f"steps for the {prompt_s * 1e3:,.0f} ms of the prompt (95 %)"), rows)


PROMPT_STEPS: Final = Claim(
    name="prompt-in-steps",
    says="Prefill of a prompt of 1,000 tokens takes as long as 5 to 10 decode steps.",
    source="a rule of thumb of introductions to disaggregated serving",
    rule="the ratio to a step of one sequence lies within 5 to 10; where only larger batches reach that, it depends.",
    minutes=0.6,
    value=3,
    measure=measure_prompt,
    judge=judge_prompt,
    table=table_prompt,
)
