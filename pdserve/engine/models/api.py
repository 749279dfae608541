"""What the runner asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.core.step_plan import Sampled, SampleSpec, StepPlan


class Samples(Protocol):
    def __call__(self, rows: list[int], specs: list[SampleSpec]) -> list[Sampled]:
        """A token of each of these rows of the logits, as `sampler` says. May change these rows."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Of some rows of a step, until the next one.

    values: [rows, vocab] float32; best: [rows], the lowest id of each row's largest, or `NO_TOKEN` (`sampler`);
    sample: a faster way to the same tokens. The last two are None where the model has nothing better than `sampler`.
    """

    values: Tensor
    best: list[int] | None = None
    sample: Samples | None = None


class Model(Protocol):
    computes_in_torch: bool
    """Then steps need torch's inference mode, which takes 65 us to enter when caches are cold."""

    def forward(self, plan: StepPlan, rows: list[int]) -> Logits | None:
        """Compute the plan and write its KV. The slices' tokens are rows one after the other; logits of `rows`, ascending.

        None without rows.
        """
