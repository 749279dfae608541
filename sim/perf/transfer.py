"""The handoff of KV as the simulation has it: leases with a watermark, and reads that share the networks of both workers.

A network carries one read after the other, in the order in which they were asked for, at the full rate. A commit takes one
round trip after the last read. Nothing is lost, and no lease expires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core.ids import SeqId
from sim.perf.clock import Clock


@dataclass(slots=True)
class PerfNetwork:
    """The network of one worker. `free_s` is the time at which its last read ends."""

    free_s: float = 0.0


@dataclass(slots=True, eq=False)
class PerfLease:
    """The KV that a prefill worker lends for one request."""

    seq_id: SeqId
    prompt_tokens: int
    network: PerfNetwork
    ended: Callable[[SeqId], None]
    """The function that ends the lease at the lender. The reader calls it once its commit has reached the lender."""
    watermark: int = 0
    """The number of leading tokens that are final."""
    first_token: int | None = None
    reader: Callable[[], None] | None = None
    """The function that the reader wants to be called when the lease has advanced."""

    def advance(self, watermark: int, first_token: int | None = None) -> None:
        """Note that more tokens are final. The last advance carries token 0."""
        self.watermark, self.first_token = watermark, first_token
        if self.reader is not None:
            self.reader()


@dataclass(slots=True, eq=False)
class PerfPull:
    """The reads of one lease into the blocks that its reader has reserved. `done` is called once the commit is answered."""

    clock: Clock
    lease: PerfLease
    network: PerfNetwork
    block_size: int
    token_s: float
    """The seconds in which the KV of one token passes."""
    hop_s: float
    done: Callable[[], None]
    first: int
    """The tokens that the reader has already, which are whole blocks."""
    read: int = field(init=False)
    """The tokens that were asked for so far."""
    ends_s: float = field(init=False)
    cancelled: bool = False
    busy_s: float = 0.0
    first_token_s: float = 0.0
    """The time at which the reader learnt token 0."""

    def __post_init__(self) -> None:
        self.read, self.ends_s = self.first, self.clock.now_s

    def start(self) -> None:
        """Read what is final, and follow the lease."""
        self.lease.reader = lambda: self.clock.after(self.hop_s, self._advanced)
        self.clock.after(2 * self.hop_s, self._advanced)  # the handshake

    def _advanced(self) -> None:
        lease = self.lease
        if self.cancelled or lease.reader is None:
            return
        whole = lease.first_token is not None
        final = lease.prompt_tokens if whole else lease.watermark // self.block_size * self.block_size
        if final > self.read:
            self._read(final - self.read)
            self.read = final
        if whole:
            lease.reader = None
            self.first_token_s = self.clock.now_s
            commit_s = max(self.ends_s, self.clock.now_s) + self.hop_s
            self.clock.at(commit_s, self._commit)

    def _read(self, tokens: int) -> None:
        start_s = max(self.clock.now_s, self.network.free_s, self.lease.network.free_s)
        took_s = tokens * self.token_s
        self.ends_s = self.network.free_s = self.lease.network.free_s = start_s + took_s
        self.busy_s += took_s

    def _commit(self) -> None:
        """End the lease at the lender, whose answer reaches the reader after one more message."""
        if not self.cancelled:
            self.lease.ended(self.lease.seq_id)
            self.clock.after(self.hop_s, self._committed)

    def _committed(self) -> None:
        if not self.cancelled:
            self.done()
