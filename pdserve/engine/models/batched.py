"""A torch decoder as the runner wants one: plans become batches, and logits only those that are asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.core.step_plan import StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers.rows import Rows
from pdserve.engine.models.api import Logits
from pdserve.engine.models.batch import Batch, make_batch
from pdserve.engine.models.llama import Llama

Hidden = Callable[[Batch], Tensor]
"""`Llama.hidden`, computed as it is or replayed."""


class BatchedLlama:
    computes_in_torch = True

    def __init__(self, model: Llama, hidden: Hidden, kv: KvCache, rows: Rows) -> None:
        self._model = model
        self._hidden = hidden
        self._kv = kv
        self._rows = rows

    def forward(self, plan: StepPlan, rows: list[int]) -> Logits | None:
        hidden = self._hidden(make_batch(plan, self._kv, self._rows.padded(plan.num_tokens)))
        if not rows:
            _wait_written(self._kv)
            return None
        return Logits(self._model.logits(hidden[rows]))


def _wait_written(kv: KvCache) -> None:
    """A step that draws nothing has nothing to wait for, yet its KV may be read by a peer once it is collected."""
    if kv.device.type == "cuda":
        torch.cuda.synchronize(kv.device)
