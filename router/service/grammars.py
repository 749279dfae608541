"""The check of clients' constraints at the door, so that each compiles in time and no worker ignores one."""

from __future__ import annotations

from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.core.worker import CONSTRAINT_LINK_VERSION
from pdserve.structured.checker import GrammarChecker
from router.core import events as ev
from router.core.registry import Registry, Worker
from router.service.model import ServedModel


class Grammars:
    """The grammars of one router. `close` it."""

    def __init__(self, model: ServedModel, registry: Registry) -> None:
        """`registry` has all workers that are linked; they may change."""
        self._registry = registry
        self._checker = None
        if model.directory is not None:
            self._checker = GrammarChecker(model.directory, model.card.vocab_size, model.card.eos_token_ids)

    async def check(self, constraint: Constraint) -> None:
        """Return if the constraint will be enforced. Raises `InvalidRequest`, `Overloaded`, and `Unavailable` while a worker of
        an older release is linked, which would ignore it."""
        if self._checker is None:
            raise InvalidRequest("needs the tokenizer of a model", field=FIELD)
        await self._checker.check(constraint)
        for worker in self._registry:
            if (error := _lacking(worker)) is not None:
                raise error

    def unsendable(self, effect: ev.Command) -> ev.RequestFailed | None:
        """Return the failure of a request that must not be sent to this worker, which has joined since the check. None: send
        it."""
        if not isinstance(effect, ev.SendBind | ev.SendPrefill) or effect.work.spec.constraint is None:
            return None
        worker = self._registry.get(effect.link)
        error = None if worker is None else _lacking(worker)
        return None if error is None else ev.RequestFailed(effect.link, effect.work.handle, error)

    async def close(self) -> None:
        """End the process of the checker."""
        if self._checker is not None:
            await self._checker.close()


def _lacking(worker: Worker) -> Unavailable | None:
    if worker.link_version >= CONSTRAINT_LINK_VERSION:
        return None
    return Unavailable(f"{FIELD}: {worker.name} speaks link version {worker.link_version}, which lacks it: upgrade the worker")
