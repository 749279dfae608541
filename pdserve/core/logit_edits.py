"""What a sequence's own parameters and tokens change in its logits before a token is drawn. Pure; owned by the sequence.

Penalties depend on the prompt and the output so far and on nothing else, so a sequence that was preempted, replayed or
handed over edits alike. Each token is counted once, when it is known: a step costs what is new, not what is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdserve.core.sampling import SamplingParams


class LogitEdits:
    """Order: bias added; then of `seen_ids` the repetition penalty, and by their output count the other two.

    Signed 32-bit ids and counts and float32 biases lie in plain arrays, as compiled code reads them. They grow: take their
    addresses anew for each step.
    """

    __slots__ = ("_done", "_place", "_prompt_len", "bias", "bias_ids", "output_counts", "seen_ids")

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.bias_ids = array("i", (token_id for token_id, _ in params.logit_bias))
        self.bias = array("f", (bias for _, bias in params.logit_bias))
        self.seen_ids = array("i")
        """Each id once, in order of appearance. Of the prompt only where repetition is penalised."""
        self.output_counts = array("i")
        """By place in `seen_ids`: how often it is in the output."""
        self._place: dict[int, int] = {}
        self._prompt_len = prompt_len
        self._done = 0 if params.repetition_penalty != 1.0 else prompt_len

    def catch_up(self, tokens: Sequence[int]) -> None:
        """`tokens` is the prompt and then the output; those that were seen before must not have changed."""
        for position in range(self._done, len(tokens)):
            self._count(tokens[position], position >= self._prompt_len)
        self._done = max(self._done, len(tokens))

    def _count(self, token_id: int, is_output: bool) -> None:
        place = self._place.setdefault(token_id, len(self.seen_ids))
        if place == len(self.seen_ids):
            self.seen_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[place] += is_output


def edits_of(params: SamplingParams, prompt_len: int) -> LogitEdits | None:
    """None where the parameters change no logit."""
    return LogitEdits(params, prompt_len) if params.edits_logits else None
