"""The claim about the KV cache: a step that reads KV against a step that computes the whole sequence again."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside, together
from bench.claims.figures import Figures
from bench.claims.measured.steps import Job, Loop, Steps, prompt_of
from bench.claims.setup import Rounds, Setup

CONTEXTS: Final = (128, 512, 2048)
COMPARED: Final = 24  # tokens that both ways output after the same prompt
START: Final = 64


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Measure one token in both ways at each context, in turns. Before, both ways output the same prompt's tokens once."""
    runner, found = setup.runner(max(CONTEXTS) + 16), Figures()
    steps = Steps(runner)
    loop = Loop.over(runner, 1)
    loop.serve([Job(prompt_of(START), COMPARED)])
    (cached,) = loop.outputs.values()
    ids = list(prompt_of(START))
    for _ in range(COMPARED):
        ids.append([runner.execute(plan) for plan in steps.prompt_plans(ids)][-1][0][0])
    equal = sum(a == b for a, b in zip(cached, ids[START:], strict=True))
    found.counts |= {"tokens compared": COMPARED, "tokens equal": equal}
    for _ in rounds.of(5):
        for context in CONTEXTS:
            found.add(f"cached s at {context}", steps.decode_s(1, context))
            found.add(f"computed s at {context}", steps.prefill_s(context))
    return found


def judge(found: Figures) -> Judgement:
    """Confirm where the tokens are equal and four times the context gives at least twice the speed-up."""
    equal = found.count("tokens equal") == found.count("tokens compared")
    gains = [found.ratio(f"computed s at {context}", f"cached s at {context}") for context in CONTEXTS]
    grows = [inside(gains[0], 1)]
    grows += [Verdict.CONFIRMED if more.low >= 2 * less.high else Verdict.REFUTED for less, more in pairwise(gains)]
    verdict = together(grows) if equal else Verdict.REFUTED
    same = f"{found.count('tokens equal'):.0f} of {found.count('tokens compared'):.0f} tokens are equal"
    texts = ", ".join(f"{gain} times at {context:,}" for gain, context in zip(gains, CONTEXTS, strict=True))
    return Judgement(verdict, f"Here a token is faster {texts} tokens, and {same}.")


def table(found: Figures) -> Table:
    """Return the time of a token in both ways, by context."""
    rows = tuple(
        (
            f"{context:,}",
            f"{found.median(f'cached s at {context}') * 1e3:.1f}",
            f"{found.median(f'computed s at {context}') * 1e3:,.1f}",
            str(found.ratio(f"computed s at {context}", f"cached s at {context}")),
        )
        for context in CONTEXTS
    )
    return Table(("tokens of context", "with KV, ms a token", "computed again, ms a token", "times (95 %)"), rows)


CLAIM: Final = Claim(
    name="kv-cache",
    says="A KV cache outputs the same tokens, and its speed-up grows with the context.",
    source='all introductions; Hugging Face\'s "KV Caching Explained" names 5 times for a short output',
    rule="all tokens are equal, and four times the context gives at least twice the speed-up, beyond both intervals.",
    minutes=0.8,
    measure=measure,
    judge=judge,
    table=table,
)
