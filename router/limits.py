"""How long a request may be: what settings say, and what the workers' KV pools turned out to hold.

A pool that was measured on a GPU is known only from the workers' own words, and pools may differ. A request must fit
wherever it may be placed: in both roles, and within each on the worker that holds most.
"""

from __future__ import annotations

from router.events import Role
from router.model import ServedModel
from router.registry import Registry


class LengthLimit:
    def __init__(self, model: ServedModel, registry: Registry) -> None:
        self._model = model
        self._registry = registry

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one request. A longer one can never be served as things stand."""
        longest = (self._registry.longest(role) for role in Role)
        return min([self._model.max_model_len, *(length for length in longest if length is not None)])
