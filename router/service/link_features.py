"""Fields of requests that workers of older releases would ignore. A request that sets one is never sent to such a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pdserve.core.errors import Unavailable
from pdserve.core.request_spec import RequestSpec
from pdserve.core.structured.constraint import FIELD
from pdserve.core.worker import CONSTRAINT_LINK_VERSION, TEXT_LINK_VERSION
from router.core import events as ev
from router.core.registry import Registry, Worker


class Feature(NamedTuple):
    """A field, the version of the link's protocol since which workers know it, and whether a request sets it."""

    field: str
    since: int
    is_set: Callable[[RequestSpec], bool]


FEATURES: Final = (
    Feature(FIELD, CONSTRAINT_LINK_VERSION, lambda spec: spec.constraint is not None),
    Feature("include_stop_str_in_output", TEXT_LINK_VERSION, lambda spec: spec.sampling.include_stop_str_in_output),
    Feature("skip_special_tokens", TEXT_LINK_VERSION, lambda spec: spec.sampling.keep_special_tokens),
)


class LinkFeatures:
    """Holds requests back from workers that would ignore a part of them."""

    def __init__(self, registry: Registry) -> None:
        """`registry` has all workers that are linked; they may change."""
        self._registry = registry

    def check(self, spec: RequestSpec) -> None:
        """Raise `Unavailable` while a worker is linked that would ignore a field of this request."""
        for worker in self._registry:
            if (error := _lacking(worker, spec)) is not None:
                raise error

    def unsendable(self, effect: ev.Command) -> ev.RequestFailed | None:
        """Return the failure of a request that must not be sent to this worker, which has joined since the check. None: send
        it."""
        if not isinstance(effect, ev.SendBind | ev.SendPrefill):
            return None
        worker = self._registry.get(effect.link)
        error = None if worker is None else _lacking(worker, effect.work.spec)
        return None if error is None else ev.RequestFailed(effect.link, effect.work.handle, error)


def _lacking(worker: Worker, spec: RequestSpec) -> Unavailable | None:
    version = worker.link_version
    for field, since, is_set in FEATURES:
        if version < since and is_set(spec):
            said = f"{worker.name} speaks link version {version}, which lacks it: upgrade the worker"
            return Unavailable(f"{field}: {said}")
    return None
