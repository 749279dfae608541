"""The adapter between the runner and a torch decoder: it turns plans into batches and computes only the requested logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.core.step_plan import StepPlan
from pdserve.core.worker import LayerCounts
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.api import Logits
from pdserve.engine.models.batch import Batch, RowTurn, make_batch
from pdserve.engine.models.decoder import Backend, Decoder

Hidden = Callable[[Batch], Tensor]
"""Function with the result of `Decoder.hidden`: this method itself, or a replay of it."""


class BatchedDecoder:
    """A torch decoder as the runner's `Model`."""

    computes_in_torch = True

    def __init__(self, model: Decoder, hidden: Hidden, caches: tuple[KvCache, ...], backend: Backend) -> None:
        self._model = model
        self._hidden = hidden
        self._caches = caches
        self._rows = backend.rows
        self._turns: tuple[RowTurn, ...] = ()
        self.way = backend.name

    def forward(self, plan: StepPlan, rows: list[int], *, best_alone: bool = False) -> Logits | None:
        """Compute the plan, write its KV, and return the logits of `rows`; None when `rows` is empty."""
        self._turns = ()  # frees the copies of the last step
        batch = make_batch(plan, self._caches, self._rows.padded(plan.num_tokens))
        self._turns = batch.turns
        hidden = self._hidden(batch)
        if not rows:
            return None
        first = len(rows)  # as in each step without prompts; a list would be copied to the device as an index
        return Logits(self._model.logits(hidden[:first] if rows[-1] == first - 1 else hidden[rows]))

    @torch.inference_mode()
    def settle_drafts(self, counts: list[int]) -> None:
        """Take back what rejected drafts changed in quantised blocks, as `Model.settle_drafts` says."""
        for number, turn in enumerate(self._turns):
            if turn.kept is not None:
                turn.kept.restore({i for i, count in enumerate(counts) if count == number + 1})
        self._turns = ()

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert so far, of each layer that has experts."""
        return self._model.expert_counts()
