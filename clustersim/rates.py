"""The rates that a worker reports of itself, measured over its last steps as production workers do."""

from __future__ import annotations

from typing import Final

from clustersim.costs import StepWork

WEIGHT: Final = 0.1
"""The weight of the newest step in the running means."""


class Rates:
    """Running means of the prompt tokens a second, and of the time of steps without prompts. 0: there was no such step."""

    def __init__(self) -> None:
        self.prompt_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def saw(self, work: StepWork, step_s: float) -> None:
        """Take in a step."""
        if step_s <= 0:
            return
        if work.prompt_tokens:
            self.prompt_tokens_per_s = _mean(self.prompt_tokens_per_s, work.prompt_tokens / step_s)
        else:
            self.decode_step_s = _mean(self.decode_step_s, step_s)


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + WEIGHT * (value - mean)
