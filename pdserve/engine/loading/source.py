"""The place that a model's tensors come from: the files of a checkpoint, or a rule that makes numbers up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]
Copy = Callable[[str, Tensor], None]
"""Function that writes the tensor of a name into memory of the same shape, and casts it to the dtype of that memory."""


class TensorSource(Protocol):
    """The tensors of one model by their names."""

    def opened(self) -> AbstractContextManager[Copy]:
        """Return the function that copies tensors. Files that it opens are closed at the end of the context."""

    def digest(self) -> str:
        """Return a name of all numbers of the model: another byte gives another name."""
