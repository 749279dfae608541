"""The edits of a sequence's logits: its own parameters and tokens change them before a token is drawn. Pure.

Penalties depend only on the prompt and the output so far, so a sequence that was preempted, replayed or handed over edits
its logits in the same way. Each token is counted once, when it is known, so a step costs only its new tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdserve.core.sampling import SamplingParams


class LogitEdits:
    """The edits of one sequence, which owns them. Order: the biases are added; then `seen_ids` get the repetition penalty, and
    the frequency and presence penalties by their output counts.

    The arrays hold signed 32-bit ids and counts and float32 biases, as compiled code reads them. They grow, so their
    addresses hold for one step only.
    """

    __slots__ = ("_done", "_place", "_prompt_len", "bias", "bias_ids", "output_counts", "seen_ids")

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.bias_ids = array("i", (token_id for token_id, _ in params.logit_bias))
        self.bias = array("f", (bias for _, bias in params.logit_bias))
        self.seen_ids = array("i")
        """The ids that the penalties change, each once, in order of appearance. They include the ids of the prompt only if
        there is a repetition penalty."""
        self.output_counts = array("i")
        """The number of times that seen_ids[i] is in the output."""
        self._place: dict[int, int] = {}
        self._prompt_len = prompt_len
        self._done = 0 if params.repetition_penalty != 1.0 else prompt_len

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count the new tokens. `tokens` is the prompt, then the output; tokens of earlier calls must not have changed."""
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
    """Make the edits of one sequence. Return None when the parameters change no logit."""
    return LogitEdits(params, prompt_len) if params.edits_logits else None
