"""The pools of both roles, brought up to date from the workers that have changed."""

from __future__ import annotations

from pdserve.core.worker import Role
from router.core.ledger import Ledger
from router.core.pools.pool import Pool
from router.core.registry import Registry


class Pools:
    """One pool for each role. `refresh` comes before each question."""

    def __init__(self, registry: Registry, ledger: Ledger) -> None:
        self._registry = registry
        self.prefill = Pool(Role.PREFILL, ledger)
        self.decode = Pool(Role.DECODE, ledger)

    def refresh(self) -> None:
        """Take in all workers that have changed since the last call, and let the mean rates follow."""
        self._update()
        self.prefill.settle()
        self.decode.settle()

    def _update(self) -> None:
        changed = self._registry.changed
        while changed:
            link, role = next(iter(changed.items()))
            self.of(role).update(link, self._registry.get(link))
            del changed[link]

    def of(self, role: Role) -> Pool:
        """Return the pool of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def opened(self) -> int:
        """The number of times that some worker became able to take more."""
        return self.prefill.opened + self.decode.opened

    @property
    def shifts(self) -> int:
        """The number of times that some worker began or ceased to be one that requests may wait for."""
        return self.prefill.shifts + self.decode.shifts

    @property
    def tier_changes(self) -> int:
        """The number of times that the lengths of the workers of a role changed."""
        return self.prefill.tier_changes + self.decode.tier_changes

    def check_invariants(self) -> None:
        """Assert that both pools are what they would be if they were made anew. The mean rates stay as they are: a recording
        does not tell when this was asked, and its replay must decide the same."""
        self._update()
        for role in Role:
            self.of(role).check_invariants({worker.link: worker for worker in self._registry.of_role(role)})
