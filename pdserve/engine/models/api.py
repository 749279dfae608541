"""The interface between the runner and a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.core.step_plan import Sampled, SampleSpec, StepPlan
from pdserve.core.worker import LayerCounts


class Samples(Protocol):
    """A way to draw tokens from the logits of a step."""

    def __call__(self, rows: list[int], specs: list[SampleSpec]) -> list[Sampled]:
        """Draw a token for each of these rows of the logits, the same as `sampler`. It may change these rows."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of some rows of a step. They are valid until the next step.

    values: [rows, vocab] float32, or [0, vocab] where `best` alone was asked for. best: [rows], the lowest id of each row's
    largest logit, or `NO_TOKEN` (see `sampler`). sample: a faster way to the tokens of `sampler`. The last two are None where
    the model has nothing faster than `sampler`.
    """

    values: Tensor
    best: list[int] | None = None
    sample: Samples | None = None


class Model(Protocol):
    """A decoder that computes the scheduler's steps."""

    computes_in_torch: bool
    """True when steps need torch's inference mode, which takes 65 us to enter when the CPU's caches are cold."""

    way: str
    """What computes the steps: compiled, Triton or torch."""

    def forward(self, plan: StepPlan, rows: list[int], *, best_alone: bool = False) -> Logits | None:
        """Compute the plan, write its KV, and return the logits of `rows`; None when `rows` is empty. On a GPU all of this is
        queued on the current stream.

        The tokens of all slices, one after the other, are the rows of the step. `rows` is ascending. best_alone: the caller
        needs no more than `best` where the model has it, so the model may leave the other logits out.
        """

    def settle_drafts(self, counts: list[int]) -> None:
        """Give quantised blocks the bytes of single steps where drafts of the last step do not count.

        counts: of each slice of that step's plan, the rows that count, at least 1. Those of slices without drafts are not read.
        Call it before another step, and before any block of the step has another owner. On a GPU it is queued.
        """

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert so far, of each layer that has experts."""
