"""What the runner asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.core.batch import StepPlan


@dataclass(frozen=True, slots=True)
class Logits:
    """Of some rows of a step, until the next one.

    values: [rows, vocab] float32; best: [rows], the lowest id of each row's largest.
    """

    values: Tensor
    best: list[int] | None
    """None where the model did not look."""


class Model(Protocol):
    def forward(self, plan: StepPlan, rows: list[int]) -> Logits | None:
        """Compute the plan and write its KV. The slices' tokens are rows one after the other; logits of `rows`, ascending.

        None without rows.
        """
