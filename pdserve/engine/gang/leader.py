"""The part of rank 0 in its gang: it starts the other ranks, waits until they have loaded, and watches them."""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.core.kv_layout import ceil_div
from pdserve.engine.gang import meeting, memory
from pdserve.engine.gang.line import RankLine
from pdserve.engine.gang.memory import SharedMemory, gang_layout
from pdserve.engine.gang.rank import LOAD_S, RankModel, RankOrder, RankService, memory_bytes, model_of
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.models.weights import WeightSource
from pdserve.killable_child import environment
from pdserve.observe.title import shown_name

log = logging.getLogger(__name__)

STOP_S: Final = 2.0
"""A rank that has not ended so long after the gang is killed."""
_LINE_BYTES: Final = 1 << 16

OnLost = Callable[[BaseException], None]


class Gang:
    """The ranks of this worker other than rank 0, from their start to their end.

    One thread starts them, so that the kernel ends them with it, and watches them. When one of them ends, or says that it
    cannot load, the gang is lost: a step that runs fails, and `on_lost` is called.
    """

    def __init__(self, on_lost: OnLost, service: RankService | None = None) -> None:
        """`on_lost` is called at most once, in the thread that watches. service: what ranks with memory of their own serve."""
        self._on_lost = on_lost
        self._service = service
        self._lines: list[dict[int, RankLine]] = []
        self._far_ends: list[Connection] = []
        self._kv: list[SharedMemory] = []
        self._ranks: list[_Rank] = []
        self._changed = threading.Condition()
        self._ready = self._expected = 0
        self._error: str | None = None
        self._closing = False
        self._wake, self._waker = os.pipe()
        self._thread: threading.Thread | None = None
        self._order: RankOrder | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._keeps_folder = False
        self._lose: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        """Say which processes the gang has."""
        return (
            f"a gang of {self._expected + 1} ranks, the other processes are {', '.join(str(rank.pid) for rank in self._ranks)}"
        )

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory for a KV group that the other ranks will map."""
        self._kv.append(SharedMemory(nbytes))
        return self._kv[-1].bytes

    def lines(self, number: int) -> dict[int, RankLine]:
        """Return one of the lines of each other rank. There are none where all ranks share the KV pool."""
        return self._lines[number] if self._lines else {}

    def start(
        self,
        directory: Path,
        card: ModelCard,
        config: EngineConfig,
        max_model_len: int,
        kv_bytes: int,
        *,
        compiled: bool,
        device: str = "cpu",
    ) -> None:
        """Start the other ranks, which load their shares while rank 0 loads its own. Raises `ConfigError`.

        compiled: compiled code computes the steps. Otherwise torch does, on devices of this type.
        """
        order = RankOrder(
            directory, card, config, 0, max_model_len, kv_bytes, tuple(kv.descriptor for kv in self._kv), 0, None, shown_name()
        )
        if compiled:
            # A step has one token of each decode, and prompts within the budget, but at least a block of them.
            rows = sum(config.largest_limits("cpu")) + config.block_size
            layout = gang_layout(
                card.spec, config.degrees, rows=rows, table_blocks=ceil_div(max_model_len, config.block_size) + 1,
                groups=len(self._kv), timeout_s=config.step_timeout_s,
            )  # fmt: skip
            order = replace(order, layout=bytes(layout))
            self._meeting = SharedMemory(memory_bytes(order))
            self._lose = partial(memory.lose, memory.place_of(layout, order.share, self._meeting))
        else:
            if (collective := config.collective(device)) != "shared_memory":
                self._folder = tempfile.TemporaryDirectory(prefix="pdserve-gang-")  # no other user may look into it
                self._keeps_folder = collective == "nccl"  # threads of torch may look into it as long as NCCL runs
                order = replace(order, folder=Path(self._folder.name))
            self._meeting = SharedMemory(memory_bytes(order))
            self._lose = partial(meeting.lose, self._meeting)
        self._order = order = replace(order, meeting=self._meeting.descriptor)
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        orders = [
            replace(order, number=number, title=f"{order.title} rank {number}", gpu=number % gpus if gpus else None)
            for number in range(1, config.degrees.ranks)
        ]
        if self._service is not None and not self._kv:
            orders = [self._with_lines(order, self._service) for order in orders]
        self._expected = len(orders)
        self._thread = threading.Thread(target=self._watch, args=(orders,), name="gang", daemon=True)
        self._thread.start()

    def model(self, weights: WeightSource, kv: KvPool) -> RankModel:
        """Return the share of rank 0. Raises `ConfigError`, also when another rank cannot load."""
        assert self._order is not None
        try:
            return model_of(self._order, weights, kv, self._meeting)
        except ReplicaLost:
            self.wait_ready()
            raise

    def wait_ready(self, timeout_s: float = LOAD_S) -> None:
        """Wait until all ranks have loaded. Raises `ConfigError` when one of them cannot, or not within `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        with self._changed:
            while self._error is None and self._ready < self._expected:
                if not self._changed.wait(max(0.0, ends_s - time.monotonic())):
                    raise ConfigError(f"the ranks of this worker have not loaded within {timeout_s:.0f} s")
            if self._error is not None:
                raise ConfigError(self._error)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._lose()
        if self._thread is not None:
            os.write(self._waker, b"x")
            self._thread.join(STOP_S * (self._expected + 1))
        else:
            for kv in self._kv:
                kv.close_descriptor()
            for end in self._far_ends:
                end.close()
        for of_all in self._lines:
            for line in of_all.values():
                line.close()
        os.close(self._wake)
        os.close(self._waker)

    def _with_lines(self, order: RankOrder, service: RankService) -> RankOrder:
        """Make the lines of a rank, and return its order with their other ends."""
        self._lines = self._lines or [{} for _ in range(service.lines)]
        for of_all in self._lines:
            ours, theirs = Pipe()
            of_all[order.number] = RankLine(order.number, ours, partial(self._give_up, order.number))
            self._far_ends.append(theirs)
        return replace(order, service=service.name, lines=tuple(end.fileno() for end in self._far_ends[-service.lines :]))

    def _give_up(self, number: int, reason: str) -> None:
        """End a rank that does not answer, which ends the gang. Return when it writes nothing any more."""
        log.error("the line to rank %d of this worker is lost: %s", number, reason)
        self._ranks[number - 1].kill()

    # Thread of the gang.

    def _watch(self, orders: list[RankOrder]) -> None:
        error = None
        try:
            self._start_all(orders)
            error = self._first_loss()
        except Exception as exc:  # a thread's last act is to report its death
            log.exception("the ranks of this worker cannot be watched")
            error = str(exc)
        with self._changed:
            lost = not self._closing
            self._error = error or "the ranks of this worker were ended"
            was_ready = self._ready == self._expected
            self._changed.notify_all()
        if lost:  # before a step fails, after which the process may end at once
            log.error("the gang is lost: %s", self._error)
        self._lose()
        if self._folder is not None:
            self._folder.cleanup()
        if lost and was_ready:
            self._on_lost(ReplicaLost(self._error))
        for rank in self._ranks:
            rank.end()

    def _start_all(self, orders: list[RankOrder]) -> None:
        shared = (*self._kv, self._meeting)
        try:
            for order in orders:
                self._ranks.append(_Rank(order, (*(one.descriptor for one in shared), *order.lines)))
        finally:
            for one in shared:
                one.close_descriptor()
            for end in self._far_ends:
                end.close()
        for rank, order in zip(self._ranks, orders, strict=True):
            rank.give(order)

    def _first_loss(self) -> str | None:
        """Wait until a rank ends or cannot load, and say so in words. None: the gang is closed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_descriptor = {}
        for rank in self._ranks:
            for descriptor in (rank.pidfd, rank.output):
                poll.register(descriptor, select.POLLIN)
                by_descriptor[descriptor] = rank
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return None
                rank = by_descriptor[descriptor]
                if not rank.said:  # also when it has ended: it may have said why
                    poll.unregister(rank.output)
                    if rank.listen():
                        with self._changed:
                            self._ready += 1
                            if self._ready == self._expected and self._folder is not None and not self._keeps_folder:
                                self._folder.cleanup()  # all are connected, and a worker that is killed would leave it
                            self._changed.notify_all()
                    elif rank.error:
                        return f"rank {rank.number}: {rank.error}"
                if descriptor == rank.pidfd:
                    # Ranks that wait for it by a collective end at once, with status 0. Name the one that did not.
                    first = min((one for one in self._ranks if one.ended), key=lambda one: one.status() == 0)
                    return f"rank {first.number} of this worker (process {first.pid}) ended with status {first.status()}"


class _Rank:
    """The process of one rank."""

    def __init__(self, order: RankOrder, shared: tuple[int, ...]) -> None:
        self.number = order.number
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdserve.engine.gang.rank"],  # -P: not what lies in the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=shared,
            env=environment(),
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._input = self._popen.stdin
        self.output = self._popen.stdout.fileno()
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.said = False
        """It has said its one line, or has closed its output."""
        self.error = ""
        """The reason why it cannot load, as it says it."""

    def give(self, order: RankOrder) -> None:
        """Send the order. A process that has ended already is noticed elsewhere."""
        try:
            self._input.write(pickle.dumps(order))
            self._input.flush()
        except OSError as exc:
            log.warning("rank %d takes no order: %s", self.number, exc)

    def listen(self) -> bool:
        """Read the line that the process says when it has loaded, or cannot. Return whether it has loaded."""
        self.said = True
        line = os.read(self.output, _LINE_BYTES)
        message = json.loads(line) if line else {}
        self.error = message.get("error", "")
        return "ready" in message

    @property
    def ended(self) -> bool:
        """True when the process has ended."""
        return self._popen.poll() is not None

    def status(self) -> int:
        """Return the exit status of a process that has ended, below zero the number of a signal."""
        return self._popen.wait()

    def kill(self) -> None:
        """End the process by force, and return when it has ended. Any thread may call it, and the thread of the gang reaps."""
        with suppress(OSError):  # it was reaped
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """End the process, by force when it takes too long, and release what it held."""
        self._input.close()
        try:
            self._popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        pidfd, self.pidfd = self.pidfd, -1  # a late `kill` must not meet another process by its number
        os.close(pidfd)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
