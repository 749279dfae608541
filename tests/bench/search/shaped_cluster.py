"""A cluster of workers that change their roles and limits as real ones do, in virtual time, with faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc

from pdserve.client import CallFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import LINK_VERSIONS, Role, WorkerHello
from pdserve_bench.search.reshape import ClusterNow, WorkerNow

BEAT_S = 1.0
FLIP_S = 2.0


def worker(name: str, role: Role, obstacle: str = "") -> WorkerNow:
    """Return a ready worker of 64 sequences and 512 tokens a step."""
    hello = WorkerHello(
        *(WorkerId(name), role, Incarnation(1), "h:1", "model", 16, 100, 512, 64, "bf16", 8),
        pid=hash(name) % 1000, max_num_batched_tokens=512, flip_obstacle=obstacle, link_version=LINK_VERSIONS.newest,
    )  # fmt: skip
    return WorkerNow(hello, 512, 64, ready=True, draining=False, work=0)


def failed(text: str) -> CallFailed:
    """Return the error of a call."""
    return CallFailed(text, status=grpc.StatusCode.UNAVAILABLE, reason=None)


@dataclass
class Limited:
    """Limits that a worker takes, and tells with its heartbeat at `at_s`."""

    at_s: float
    name: str
    tokens: int
    seqs: int


class ShapedCluster:
    """Stands for `AdminPort`. `before` is called before each call, and may change the cluster or raise `CallFailed`."""

    def __init__(self, prefill: int, decode: int, *, automatic: bool = False, needs_prefill: bool = False) -> None:
        self.now_s = 0.0
        names = [(f"p{n}", Role.PREFILL) for n in range(prefill)] + [(f"d{n}", Role.DECODE) for n in range(decode)]
        self.workers = {name: worker(name, role) for name, role in names}
        self.actuator, self.automatic, self.orders = ("up" if automatic else ""), automatic, 0
        self.router, self.requests, self.refused = 1, 0, ""
        self.needs_prefill = needs_prefill
        self.coming: list[Limited] = []
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda call: None
        self.fewest_decode = decode

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def change(self, name: str, **changes: object) -> None:
        """Change a worker; fields of its hello are found there."""
        own = {key: value for key, value in changes.items() if hasattr(self.workers[name], key)}
        hello = {key: value for key, value in changes.items() if key not in own}
        now = self.workers[name]
        self.workers[name] = replace(now, hello=replace(now.hello, **hello), **own)  # type: ignore[arg-type]
        self.fewest_decode = min(self.fewest_decode, self.count(Role.DECODE))

    def count(self, role: Role) -> int:
        """Count the ready workers of a role."""
        return sum(one.hello.role is role and one.ready and not one.draining for one in self.workers.values())

    def _called(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)

    async def look(self) -> ClusterNow:
        """Stands for `AdminPort.look`."""
        self._called("look")
        for due in [one for one in self.coming if one.at_s <= self.now_s]:
            self.coming.remove(due)
            now = self.workers[due.name]
            tokens, seqs = due.tokens or now.max_num_batched_tokens, due.seqs or now.max_num_seqs
            self.change(due.name, max_num_batched_tokens=tokens, max_num_seqs=seqs)
        return ClusterNow(
            *(self.router, self.requests, tuple(self.workers.values())),
            actuator=self.actuator, automatic=self.automatic, order=self.orders, refused=self.refused,
        )  # fmt: skip

    async def flip(self, worker_id: str, role: Role, incarnation: int, timeout_s: float) -> None:
        """Stands for `AdminPort.flip`, with the rules of the router."""
        self._called(f"flip {worker_id} {role.value}")
        now = self.workers[worker_id]
        assert now.hello.incarnation == incarnation
        assert now.hello.role is not role
        left = now.hello.role
        if self.count(left) <= 1 and (left is Role.DECODE or self.needs_prefill):
            raise failed(f"the last {left.value} worker")
        self.change(worker_id, draining=True)
        self.now_s += FLIP_S
        self.change(worker_id, draining=False, role=role, incarnation=Incarnation(incarnation + 1))

    async def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Stands for `AdminPort.set_budget`. Heartbeats tell the limits later."""
        self._called(f"budget {','.join(worker_ids)} {max_num_batched_tokens} {max_num_seqs}")
        at_s = self.now_s + BEAT_S
        self.coming += [Limited(at_s, name, max_num_batched_tokens, max_num_seqs) for name in worker_ids]

    async def order(self, sizes: tuple[int, int] | None) -> int:
        """Stands for `AdminPort.order`."""
        self._called(f"order {sizes}")
        self.orders += 1
        self.automatic = sizes is None
        return self.orders
