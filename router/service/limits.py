"""The length that a request may have. Settings bound it, and so do the KV pools of the workers.

The size of a pool that was measured on a GPU is known only from the worker itself, and pools may differ. A request must fit
wherever it may be placed: in both roles, and in each role on the worker that holds most.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.worker import Role
from router.core.registry import Registry
from router.service.model import ServedModel

OPEN_ENDED_SHARE: Final = 0.75
"""A request that names no length must get at least this share of the longest answer. Measured pools differ by a few percent. If
the full length were demanded, all such answers would go to the largest worker and none to the others."""
_ROLES: Final = tuple(Role)


class LengthLimit:
    """Knows the longest request that the linked workers take."""

    def __init__(self, model: ServedModel, registry: Registry) -> None:
        self._model = model
        self._registry = registry

    @property
    def max_model_len(self) -> int:
        """Prompt and output of one request together have at most this many tokens. The present workers can never serve a longer
        one."""
        limit = self._model.max_model_len
        for role in _ROLES:
            longest = self._registry.longest(role)
            if longest is not None and longest < limit:
                limit = longest
        return limit

    def open_ended_room(self, prompt_len: int) -> int:
        """Return the output tokens of a request that names no `max_tokens`: as many as fit on every decode worker that is
        nearly as long as the longest one. This is at most `max_model_len` less the prompt, and below 1 when the prompt alone is
        too long."""
        limit = self.max_model_len
        longest = limit - prompt_len
        lengths = (worker.hello.max_model_len for worker in self._registry.of_role(Role.DECODE) if not worker.draining)
        rooms = [min(length, limit) - prompt_len for length in lengths]
        return min([longest, *(room for room in rooms if room >= OPEN_ENDED_SHARE * longest)])
