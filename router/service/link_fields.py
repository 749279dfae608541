"""The rule of rolling upgrades: no request goes to a worker that would ignore a field of it."""

from __future__ import annotations

from pdserve.core.errors import Unavailable
from pdserve.core.request_spec import RequestSpec
from pdserve.core.worker import newest_field
from router.core import events as ev
from router.core.registry import Registry


def check_workers(spec: RequestSpec, registry: Registry) -> None:
    """Raise `Unavailable` while a worker is linked that would ignore a field of the request, since it may be placed there."""
    field, version = newest_field(spec)
    if not field:
        return
    for worker in registry:
        if worker.link_version < version:
            raise _lacks(worker.name, worker.link_version, field)


def unsendable(effect: ev.Command, registry: Registry) -> ev.RequestFailed | None:
    """Return the failure of a request that must not be sent to this worker, which has joined since the check. None: send it."""
    if not isinstance(effect, ev.SendBind | ev.SendPrefill):
        return None
    field, version = newest_field(effect.work.spec)
    worker = registry.get(effect.link) if field else None
    if worker is None or worker.link_version >= version:
        return None
    return ev.RequestFailed(effect.link, effect.work.handle, _lacks(worker.name, worker.link_version, field))


def _lacks(name: str, link_version: int, field: str) -> Unavailable:
    return Unavailable(f"{field}: {name} speaks link version {link_version}, which lacks it: upgrade the worker")
