"""Masks of the tokens that grammars allow: they are computed while the model runs, and applied to the logits before a draw.

A mask depends only on the tokens before the step, so the step does not wait for a mask that takes less time than the model. One
thread computes the masks of a step, one after the other, without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from pdserve.core.step_plan import SampleSpec
from pdserve.core.structured.grammar_state import GrammarState


class MaskThread:
    """The thread of one engine, which the first step with a mask starts. It ends with the engine."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def computing(self, specs: Sequence[SampleSpec]) -> AbstractContextManager[None]:
        """Compute the masks of these samples during the body. They are known, and no thread uses a grammar, after it.

        The grammars belong to the engine thread again when the body ends, also with an exception.
        """
        grammars = []
        for spec in specs:
            if spec.grammar is not None:
                grammars.append(spec.grammar)  # noqa: PERF401  a comprehension is a call, and this runs in each step
        return self._computing(grammars) if grammars else nullcontext()

    @contextmanager
    def _computing(self, grammars: Sequence[GrammarState]) -> Iterator[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        computed = self._executor.submit(_compute, grammars)
        try:
            yield
        finally:
            computed.result()


def _compute(grammars: Sequence[GrammarState]) -> None:
    for grammar in grammars:
        grammar.mask()


def apply_mask(row: Tensor, mask: bytes) -> None:
    """Set the logits of all tokens that a mask does not allow to minus infinity. row: [vocab] float32, changed in place.

    mask: bit i % 8 of byte i // 8 belongs to token id i. The mask has a bit for each token, and may have more bits.
    """
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(row), bitorder="little")
    row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -torch.inf)
