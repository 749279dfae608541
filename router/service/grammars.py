"""The check of clients' constraints at the door: each compiles in time, and every worker enforces it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdserve.core.constraint import FIELD, Constraint
from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.worker import CONSTRAINT_LINK_VERSION
from pdserve.structured.checker import GrammarChecker
from router.service.model import ServedModel

if TYPE_CHECKING:
    from router.core.registry import Worker


class Grammars:
    """The grammars of one router. `close` it."""

    def __init__(self, model: ServedModel, workers: Iterable[Worker]) -> None:
        """`workers` are all that are linked; they may change."""
        self._workers = workers
        self._checker = None
        if model.directory is not None:
            self._checker = GrammarChecker(model.directory, model.card.vocab_size, model.card.eos_token_ids)

    async def check(self, constraint: Constraint) -> None:
        """Return if the constraint will be enforced. Raises `InvalidRequest`, `Overloaded`, and `Unavailable` while a worker of
        an older release is linked, which would ignore it."""
        if self._checker is None:
            raise InvalidRequest("needs the tokenizer of a model", field=FIELD)
        await self._checker.check(constraint)
        for worker in self._workers:
            if worker.link_version < CONSTRAINT_LINK_VERSION:
                raise Unavailable(
                    f"{FIELD}: {worker.name} speaks link version {worker.link_version}, which lacks it: upgrade the worker"
                )

    async def close(self) -> None:
        """End the process of the checker."""
        if self._checker is not None:
            await self._checker.close()
