"""How long a request may be: what settings say, and what the workers' KV pools turned out to hold.

A pool that was measured on a GPU is known only from the workers' own words, and pools may differ. A request must fit
wherever it may be placed: in both roles, and within each on the worker that holds most.
"""

from __future__ import annotations

from typing import Final

from router.core.events import Role
from router.core.registry import Registry
from router.service.model import ServedModel

OPEN_ENDED_SHARE: Final = 0.75
"""The share of the longest answer that a request which names no length must be granted. Pools that were measured differ by
a few percent; without any give, all such answers would go to the largest worker, and the others would have none of them."""


class LengthLimit:
    def __init__(self, model: ServedModel, registry: Registry) -> None:
        self._model = model
        self._registry = registry

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one request. A longer one can never be served as things stand."""
        longest = (self._registry.longest(role) for role in Role)
        return min([self._model.max_model_len, *(length for length in longest if length is not None)])

    def open_ended_room(self, prompt_len: int) -> int:
        """Output tokens of a request that names no `max_tokens`: as many as every decode worker holds that is about as long as
        the longest. At most `max_model_len` less the prompt, and under 1 when that is."""
        limit = self.max_model_len
        longest = limit - prompt_len
        lengths = (worker.hello.max_model_len for worker in self._registry.of_role(Role.DECODE) if not worker.draining)
        rooms = [min(length, limit) - prompt_len for length in lengths]
        return min([longest, *(room for room in rooms if room >= OPEN_ENDED_SHARE * longest)])
