"""The check of clients' constraints at the door, so that each compiles in time."""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.structured.checker import GrammarChecker
from router.service.model import ServedModel


class Grammars:
    """The grammars of one router. `close` it."""

    def __init__(self, model: ServedModel) -> None:
        self._checker = None
        if model.directory is not None:
            self._checker = GrammarChecker(model.directory, model.card.vocab_size, model.card.eos_token_ids)

    async def check(self, constraint: Constraint) -> None:
        """Return if the constraint compiles. Raises `InvalidRequest` and `Overloaded`."""
        if self._checker is None:
            raise InvalidRequest("needs the tokenizer of a model", field=FIELD)
        await self._checker.check(constraint)

    async def close(self) -> None:
        """End the process of the checker."""
        if self._checker is not None:
            await self._checker.close()
