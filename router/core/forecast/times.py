"""Predictions: the time until a request's first token, and the time between its later ones, by what workers measure. Pure.

All results are seconds. None says that nobody has measured what a prediction needs; no number is invented. A prediction is for
a choice, so it leaves out what is the same everywhere: messages, and the rest of the step that runs now.
"""

from __future__ import annotations

from typing import Final

from router.core.policy.candidate import Candidate

FIXED_SEQUENCES: Final = 64
"""The part of a decode step that does not depend on its sequences takes as long as so many sequences do: reading the weights.

DistServe's fits (OPT-13B and 66B on A100, 500 tokens of context each) give 57 and 106. Splitwise's measurements of 1 to 64
sequences (llama2-70b and bloom-176b, A100 and H100) give 65 to 174. The low end predicts a step rather too long.
"""


def seconds(amount: float, per_s: float) -> float | None:
    """Return the time that an amount takes at a rate. Nothing takes no time. Anything else takes unknown time at a rate of 0,
    because 0 stands for an unknown rate."""
    if amount <= 0:
        return 0.0
    return amount / per_s if per_s > 0 else None


def total(*parts: float | None) -> float | None:
    """Return the sum of some times. None: one of them is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def uncached_tokens(candidate: Candidate, prompt_tokens: int) -> int:
    """Return how many tokens of the prompt a worker computes: those whose KV it does not hold, and at least one, because the
    last token's output is always needed."""
    return max(1, prompt_tokens - candidate.cached_tokens)


def prompt_wait_s(candidate: Candidate) -> float | None:
    """Return how long the prompts that were sent to a worker before will keep it busy."""
    return seconds(candidate.queued_tokens, candidate.prompt_tokens_per_s)


def compute_s(candidate: Candidate, prompt_tokens: int) -> float | None:
    """Return how long a worker computes this prompt."""
    return seconds(uncached_tokens(candidate, prompt_tokens), candidate.prompt_tokens_per_s)


def ttft_s(candidate: Candidate, prompt_tokens: int) -> float | None:
    """Return the time until the first token if this worker gets the prompt now. The prefill worker draws the first token, so
    a transfer of KV does not delay it."""
    return total(prompt_wait_s(candidate), compute_s(candidate, prompt_tokens))


def tpot_s(candidate: Candidate) -> float | None:
    """Return the time between two tokens on a decode worker with one more sequence.

    A step grows linearly with its sequences, from a fixed part (`FIXED_SEQUENCES`). The worker measured its step with
    `step_sequences` of them; by now `running` are placed there, and the new one comes on top.
    """
    if candidate.decode_step_s <= 0:
        return None
    then, soon = max(1, candidate.step_sequences), candidate.running + 1
    return candidate.decode_step_s * (FIXED_SEQUENCES + soon) / (FIXED_SEQUENCES + then)


def queue_wait_s(ahead: int, drained_per_s: float) -> float | None:
    """Return the wait for a place on a full decode pool: one request ends for each that is ahead, and one for this request
    itself. `drained_per_s` is the number of requests that end in a second, 0 for unknown."""
    return seconds(ahead + 1, drained_per_s)
