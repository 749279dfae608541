"""The ranks of a gang that gather by the collectives of torch: NCCL where rows are in the memory of GPUs, gloo on CPUs.

Rows travel as bytes, and no collective here adds numbers. So the order in which a library would add changes nothing, and any
dtype is as good as another. Steps, sizes and the state of the gang are numbers on the CPU, and stay in shared memory: all ranks
of a gang are on one machine.

Each rank is in a group of all ranks, by which stages carry rows, and in a group of its stage, which gathers. The groups are
objects of their own and not torch's default group, since a process may hold several gangs. Their ranks find each other by a
file in a folder that only this user reads, and connect on loopback, which no other machine reaches.

A rank that waits looks at the state of the gang, as `MetRanks` does. So a lost gang ends the wait, although gloo notices a
stopped process only when its timeout is over, and NCCL notices no process that ends. A gather by NCCL is work for the device:
the rank waits for it at the end of the step.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, FileStore, PrefixStore, Store

from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.core.shards import RankShare
from pdserve.engine.gang.meeting import MetRanks
from pdserve.engine.gang.memory import SharedMemory

Library = Literal["gloo", "nccl"]

LOOPBACK: Final = "127.0.0.1"
NCCL_ENVIRONMENT: Final = {
    "NCCL_SOCKET_IFNAME": "lo",
    # An error of NCCL would end the process in a thread of torch. Our own wait ends the gang in order.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
FIND_S: Final = 30.0
"""Ranks that are all there find each other within this time. gloo takes some 20 ms, and NCCL seconds."""
NAMED_S: Final = 1.0
"""When a collective fails, a rank waits so long for the leader, which sees within milliseconds which process has ended and says
so before it ends the gang. After that, nothing has ended, and the rank ends the gang."""
SHORTEST_SLEEP_S: Final = 1e-5
LONGEST_SLEEP_S: Final = 1e-3
SLEEP_SHARE: Final = 8
"""A rank looks again after an eighth of the time that it has waited: it is late by an eighth at most."""


class CollectiveRanks(MetRanks):
    """The ranks of a gang, which gather and carry rows by collectives, and tell each other the rest in shared memory."""

    def __init__(
        self, share: RankShare, memory: SharedMemory, timeout_s: float, *, library: Library, folder: Path, device: torch.device
    ) -> None:
        """Wait for the other ranks and connect with them. All ranks of the gang must make theirs.

        timeout_s: the longest time that `timeout_s` will ever be. folder: an empty one, for this gang alone. device: that of
        the rows. gloo takes rows of a GPU through the memory of the CPU. Raises `ConfigError` when the ranks cannot connect,
        and `ReplicaLost`.
        """
        super().__init__(share, memory, timeout_s)
        self._device = device
        self._at = torch.device("cpu") if library == "gloo" else device
        self._waits_on_device = library == "nccl"
        self._gang.meet(timeout_s)  # so that no rank waits below for one that has not begun
        try:
            store = FileStore(str(folder / "ranks"))
            store.set_timeout(timedelta(seconds=FIND_S))
            tensor, pipeline = share.degrees.tensor, share.degrees.pipeline
            groups = []
            if pipeline > 1:
                self._all = _connected(library, PrefixStore("all", store), share.number, tensor * pipeline, timeout_s)
                groups.append(self._all)
            if tensor > 1:
                stage = PrefixStore(f"stage {share.stage}", store)
                self._of_stage = _connected(library, stage, share.rank, tensor, timeout_s)
                groups.append(self._of_stage)
            for group in groups:  # NCCL connects, or refuses to, when it is first used
                self._wait(group.broadcast([torch.zeros(1, device=self._at)], self._from(0)))
            self._wait_for_device()
        except RuntimeError as exc:
            raise ConfigError(f"the ranks of this worker cannot connect by {library}: {_reason(exc)}") from exc

    def gather(self, own: Tensor, columns: Sequence[range]) -> Tensor:
        """Return whole rows, as `Ranks.gather` does. Raises `ReplicaLost`."""
        if self.share.degrees.tensor == 1:
            return own
        widths = [len(of_rank) for of_rank in columns]
        rows, width, widest = own.shape[0], sum(widths), max(widths)
        if widest == width:  # one rank has all columns, so the others need no room for theirs
            return self._given(self._of_stage, own, widths.index(width), self.share.rank, (rows, width))
        piece = torch.empty(rows, widest, dtype=own.dtype, device=self._at)  # a collective takes pieces of one size
        piece[:, : own.shape[1]] = own
        pieces = [torch.empty_like(piece) for _ in columns]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.timeout_s)
        self._done(lambda: self._of_stage.allgather([[_bytes(one) for one in pieces]], [_bytes(piece)], options))
        whole = own.new_empty(rows, width)
        for one, of_rank in zip(pieces, columns, strict=True):
            whole[:, of_rank.start : of_rank.stop] = one[:, : len(of_rank)]
        return whole

    def carry(self, x: Tensor, stage: int) -> Tensor:
        """Return the x [rows, width] of the first rank of a stage. Raises `ReplicaLost`."""
        if self.share.degrees.pipeline == 1:
            return x
        return self._given(self._all, x, stage * self.share.degrees.tensor, self.share.number, x.shape)

    def end_step(self) -> None:
        """Wait until all ranks have written their KV, also those whose devices still compute. Raises `ReplicaLost`."""
        self._wait_for_device()
        super().end_step()

    def _given(self, group: dist.ProcessGroup, own: Tensor, giver: int, place: int, shape: Sequence[int]) -> Tensor:
        """Return the tensor of the given shape that one rank of a group gives. place: that of this rank in the group."""
        gives = place == giver
        rows = own.to(self._at).contiguous() if gives else torch.empty(*shape, dtype=own.dtype, device=self._at)
        self._done(lambda: group.broadcast([_bytes(rows)], self._from(giver)))
        return own if gives else rows.to(own.device)

    def _from(self, giver: int) -> BroadcastOptions:
        options = BroadcastOptions()
        options.rootRank = giver
        options.timeout = timedelta(seconds=self.timeout_s)
        return options

    def _done(self, begin: Callable[[], dist.Work]) -> None:
        """Do the work of a collective with the other ranks. Its failure ends the gang. Raises `ReplicaLost` then."""
        try:
            self._wait(begin())
        except RuntimeError as exc:
            began_s = time.monotonic()
            while not self.lost and time.monotonic() - began_s < NAMED_S:
                time.sleep(LONGEST_SLEEP_S)
            self.lose()
            raise ReplicaLost(f"a rank of this worker has ended, or was not heard of: {_reason(exc)}") from exc

    def _wait(self, work: dist.Work) -> None:
        """Wait until the work is done, or let the device wait for it. Raises `ReplicaLost`, and `RuntimeError` of the work."""
        if not self._waits_on_device:
            self._wait_until(work.is_completed)
        work.wait()

    def _wait_for_device(self) -> None:
        """Wait until the device of this rank has done all its work. Raises `ReplicaLost`."""
        if self._device.type == "cuda":
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
            self._wait_until(written.query)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until something is done. The gang is lost when this takes longer than `timeout_s`. Raises `ReplicaLost`."""
        began_s = time.monotonic()
        while not done():
            waited_s = time.monotonic() - began_s
            if waited_s > self.timeout_s:
                self.lose()
            if self.lost:
                raise ReplicaLost("a rank of this worker has ended, or was not heard of for step_timeout_s")
            time.sleep(min(max(waited_s / SLEEP_SHARE, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))


def _connected(library: Library, store: Store, rank: int, ranks: int, timeout_s: float) -> dist.ProcessGroup:
    """Return a group of so many ranks, which have the same store. Raises `RuntimeError`.

    It is the bare group of a library, whose methods are those of `dist.ProcessGroup`.
    """
    if library == "nccl":
        os.environ.update(NCCL_ENVIRONMENT)  # NCCL reads it when it connects
        of_nccl = dist.ProcessGroupNCCL.Options()
        of_nccl._timeout = timedelta(seconds=2 * timeout_s)  # our own wait ends before
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, ranks, of_nccl))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # `Options` in later releases of torch
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]  # by default, it takes the name of the machine
    options._timeout = timedelta(seconds=FIND_S)  # to connect; each collective has a timeout of its own
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, ranks, options))


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


def _reason(exc: RuntimeError) -> str:
    """Return the line of an error that says most, without the place in the library's source."""
    lines = str(exc).splitlines() or [type(exc).__name__]
    told = next((line for line in lines if "uplicate" in line), lines[0])  # NCCL: "Duplicate GPU detected"
    return re.sub(r"^\[\S+:\d+\] ", "", told)[:200]
