"""The adapter between the runner and a torch decoder: it turns plans into batches and computes only the requested logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pdserve.core.step_plan import StepPlan
from pdserve.core.worker import LayerCounts
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.api import Logits
from pdserve.engine.models.batch import Batch, make_batch
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
        self.way = backend.name

    def forward(self, plan: StepPlan, rows: list[int], *, best_alone: bool = False) -> Logits | None:
        """Compute the plan, write its KV, and return the logits of `rows`; None when `rows` is empty."""
        hidden = self._hidden(make_batch(plan, self._caches, self._rows.padded(plan.num_tokens)))
        if not rows:
            return None
        first = len(rows)  # as in each step without prompts; a list would be copied to the device as an index
        return Logits(self._model.logits(hidden[:first] if rows[-1] == first - 1 else hidden[rows]))

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert so far, of each layer that has experts."""
        return self._model.expert_counts()
