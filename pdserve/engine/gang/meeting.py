"""The meetings of ranks that compute by torch: processes that gather columns in memory which all of them have mapped.

Each rank has a counter in each of its meetings, which it alone writes. To meet, it adds one, wakes the others, and waits until
no counter is behind its own. x86 processors show the stores of a rank to others in their order, so who sees the counter of a
rank sees all that it wrote before. Gathered rows lie in a place of fixed size, as many at a time as it holds. There are two
places, which are used in turns: a rank that writes to a place again has met the others since they read it.

Neither compiled code nor a collective of torch is needed. A rank that waits sleeps on a futex, which costs some 20 us: less
than one product of a layer.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import ReplicaLost
from pdserve.core.shards import RankShare
from pdserve.core.step_plan import GREEDY, StepPlan
from pdserve.core.worker import LayerCounts
from pdserve.engine.gang.memory import SharedMemory
from pdserve.engine.layers.rows import PROBE_ROWS
from pdserve.engine.models.api import Logits
from pdserve.engine.models.batched import BatchedDecoder

PLACE_BYTES: Final = 1 << 20
"""The smallest place. Two of them stay in the L2 cache of a core; a prompt of 512 rows of 3,072 numbers passes in six parts."""
LOOK_S: Final = 0.02
"""So often a rank that waits looks whether the gang is lost."""
LINE_BYTES: Final = 64
"""Of a cache line, so that ranks write to lines of their own."""
LINE_WORDS: Final = LINE_BYTES // 4
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of linux/futex.h on x86-64
_EVERYBODY: Final = 2**31 - 1
_MESSAGE_COLUMNS: Final = 1024  # bytes of a row of a message
_syscall = ctypes.CDLL(None).syscall  # a call of this form gives the interpreter's lock free while it waits


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_LOOK: Final = _Timespec(0, int(LOOK_S * 1e9))


def meeting_bytes(share: RankShare) -> int:
    """Return the bytes that the ranks of a gang share: whether it is lost, and the meetings of all ranks and of each stage."""
    degrees, place = share.degrees, place_bytes(share)
    return LINE_BYTES + _bytes_of(degrees.ranks, place) + degrees.pipeline * _bytes_of(degrees.tensor, place)


def place_bytes(share: RankShare) -> int:
    """Return the bytes of a place: at least those of a row of logits, which is the widest row."""
    return max(PLACE_BYTES, -(-share.spec.vocab_size // LINE_WORDS) * LINE_BYTES)


def _bytes_of(ranks: int, place: int) -> int:
    return ranks * LINE_BYTES + 2 * place


def lose(memory: SharedMemory) -> None:
    """End a gang that computes by torch: its ranks leave their steps, and compute no other."""
    memory.bytes.numpy()[0] = 1  # not by torch: another thread may have made the tensor in inference mode


class Meeting:
    """One rank's side of the meetings of some ranks."""

    def __init__(self, memory: Tensor, lost: Tensor, rank: int, ranks: int) -> None:
        """Meet in memory [`_bytes_of`] uint8. lost: [1] uint8, which is not 0 when the gang is lost. rank: the place among
        `ranks`."""
        counters = ranks * LINE_BYTES
        self._counters = memory[:counters].numpy().view(np.uint32)[::LINE_WORDS]
        self._address = memory.data_ptr()
        self._places = memory[counters:].chunk(2)
        self._lost = lost.numpy()
        self._rank, self._ranks = rank, ranks
        self._met = self._gathered = 0

    def meet(self, timeout_s: float | None) -> None:
        """Wait until all ranks have called it as often. Raises `ReplicaLost` when the gang is lost.

        The gang is lost when this takes longer than `timeout_s`. None: the wait has no end of its own.
        """
        self._met = (self._met + 1) % 2**32
        self._counters[self._rank] = self._met
        _syscall(_SYS_FUTEX, ctypes.c_void_p(self._of(self._rank)), _FUTEX_WAKE, _EVERYBODY, None, None, 0)
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        for rank in range(self._ranks):
            while not self._lost[0] and ((seen := int(self._counters[rank])) - self._met) % 2**32 >= 2**31:  # it is behind
                if ends_s is not None and time.monotonic() > ends_s:
                    self._lost[0] = 1
                word = ctypes.c_void_p(self._of(rank))
                _syscall(_SYS_FUTEX, word, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(_LOOK), None, 0)
        if self._lost[0]:  # also when all have come: the others may have come for another reason
            raise ReplicaLost("a rank of this worker has ended, or was not heard of for step_timeout_s")

    def gather(self, own: Tensor, columns: range, width: int, timeout_s: float | None) -> Tensor:
        """Return whole rows [rows, width] of which this rank has own [rows, len(columns)]. Raises `ReplicaLost`."""
        whole = own.new_empty(own.shape[0], width)
        rows = self._places[0].numel() // (width * own.element_size())
        assert rows > 0, "no row is wider than that of logits"
        for first in range(0, own.shape[0], rows):
            piece = own[first : first + rows]
            place = self._places[self._gathered % 2].view(own.dtype)[: len(piece) * width].view(-1, width)
            self._gathered += 1
            place[:, columns.start : columns.stop] = piece
            self.meet(timeout_s)
            whole[first : first + rows] = place
        return whole

    def tell(self, data: bytes | None, timeout_s: float | None) -> bytes:
        """Return the data of the one rank that gives some. All ranks call it. Raises `ReplicaLost`."""
        told = self.gather(_message(data and len(data).to_bytes(8, "little"), 8), _all_or_none(data, 8), 8, timeout_s)
        size = int.from_bytes(told.numpy().tobytes(), "little")
        rows = -(-size // _MESSAGE_COLUMNS)
        own = _message(data and data.ljust(rows * _MESSAGE_COLUMNS, b"\0"), _MESSAGE_COLUMNS, rows)
        # Who has waited for the first part will not wait for this one.
        told = self.gather(own, _all_or_none(data, _MESSAGE_COLUMNS), _MESSAGE_COLUMNS, timeout_s)
        return told.numpy().tobytes()[:size]

    def _of(self, rank: int) -> int:
        return self._address + rank * LINE_BYTES


def _message(data: bytes | None, columns: int, rows: int = 1) -> Tensor:
    if data is None:
        return torch.empty(rows, 0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, columns)


def _all_or_none(data: bytes | None, columns: int) -> range:
    return range(columns if data is not None else 0)


class MetRanks:
    """The ranks of a gang, which meet in shared memory. It satisfies `Ranks`."""

    def __init__(self, share: RankShare, memory: SharedMemory, timeout_s: float) -> None:
        """Meet in memory of `meeting_bytes`. A rank that waits longer than `timeout_s` in a step gives the gang up."""
        degrees, place = share.degrees, place_bytes(share)
        self.share = share
        self.timeout_s = timeout_s
        lost, rest = memory.bytes[:1], memory.bytes[LINE_BYTES:]
        size = _bytes_of(degrees.ranks, place)
        self._memory = memory
        self._gang = Meeting(rest[:size], lost, share.number, degrees.ranks)
        of_stage = _bytes_of(degrees.tensor, place)
        begin = size + share.stage * of_stage
        self._stage = Meeting(rest[begin : begin + of_stage], lost, share.rank, degrees.tensor)

    def gather(self, own: Tensor, columns: Sequence[range]) -> Tensor:
        """Return whole rows, as `Ranks.gather` does. Raises `ReplicaLost`."""
        if self.share.degrees.tensor == 1:
            return own
        return self._stage.gather(own, columns[self.share.rank], sum(map(len, columns)), self.timeout_s)

    def carry(self, x: Tensor, stage: int) -> Tensor:
        """Return the x [rows, width] of the first rank of a stage. Raises `ReplicaLost`."""
        if self.share.degrees.pipeline == 1:
            return x
        gives = self.share.number == stage * self.share.degrees.tensor
        columns = range(x.shape[1] if gives else 0)
        return self._gang.gather(x[:, : len(columns)], columns, x.shape[1], self.timeout_s)

    def agree(self, sizes: frozenset[int]) -> frozenset[int]:
        """Return the sizes that all ranks give, each at most PROBE_ROWS. Raises `ReplicaLost`."""
        own = torch.tensor([[size in sizes for size in range(PROBE_ROWS + 1)]])
        width, number = own.shape[1], self.share.number
        columns = range(number * width, (number + 1) * width)
        told = self._gang.gather(own, columns, width * self.share.degrees.ranks, self.timeout_s).view(-1, width)
        return frozenset(told.all(0).nonzero().flatten().tolist())

    def tell_step(self, plan: StepPlan, rows: list[int]) -> None:
        """Give a step to the other ranks: a plan, of whose draws only the number with drafts stays, and the rows of its logits.

        Raises `ReplicaLost`.
        """
        plain = StepPlan(tuple(
            piece._replace(samples=(GREEDY,) * len(piece.samples) if piece.drafts else (), packed=()) for piece in plan.slices
        ))  # fmt: skip
        self._gang.tell(pickle.dumps((plain, rows)), self.timeout_s)

    def tell_counts(self, counts: list[int]) -> None:
        """Give the other ranks the counts of `Model.settle_drafts`. Raises `ReplicaLost`."""
        self._gang.tell(pickle.dumps((None, counts)), self.timeout_s)

    def next_step(self) -> tuple[StepPlan | None, list[int]]:
        """Wait for a step or counts of rank 0, however long it takes, and return them. Raises `ReplicaLost`."""
        step: tuple[StepPlan | None, list[int]] = pickle.loads(self._gang.tell(None, None))  # noqa: S301 - from a rank of this gang
        return step

    def end_step(self) -> None:
        """Wait until all ranks have written their KV. Raises `ReplicaLost`."""
        self._gang.meet(self.timeout_s)

    @property
    def lost(self) -> bool:
        """True when the gang has ended."""
        return bool(self._memory.bytes.numpy()[0])

    def lose(self) -> None:
        """End the gang."""
        lose(self._memory)


class RankDecoder:
    """The share of one rank of a model by torch, as the runner's `Model` in rank 0, and as a follower in the others."""

    computes_in_torch = True

    def __init__(self, model: BatchedDecoder, ranks: MetRanks) -> None:
        self._model = model
        self._ranks = ranks
        self.way = model.way

    def forward(self, plan: StepPlan, rows: list[int], *, best_alone: bool = False) -> Logits | None:
        """Compute the plan with the other ranks, as `Model.forward` says. Only rank 0 calls it. A failure ends the gang.

        Raises `ReplicaLost`.
        """
        self._ranks.tell_step(plan, rows)
        return self._compute(plan, rows)

    @torch.inference_mode()
    def follow(self) -> NoReturn:
        """Compute the steps of rank 0, until the gang is lost. Raises `ReplicaLost` then."""
        while True:
            plan, rows = self._ranks.next_step()
            if plan is None:
                self._settle(rows)
            else:
                self._compute(plan, rows)

    def settle_drafts(self, counts: list[int]) -> None:
        """Take back what rejected drafts changed in the blocks of all ranks, as `Model.settle_drafts` says.

        Only rank 0 calls it. A failure ends the gang. Raises `ReplicaLost`.
        """
        self._ranks.tell_counts(counts)
        self._settle(counts)

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert so far, of each layer of this rank's stage that has experts."""
        return self._model.expert_counts()

    def _compute(self, plan: StepPlan, rows: list[int]) -> Logits | None:
        with self._with_others():
            return self._model.forward(plan, rows)

    def _settle(self, counts: list[int]) -> None:
        with self._with_others():
            self._model.settle_drafts(counts)

    @contextmanager
    def _with_others(self) -> Iterator[None]:
        """Wait for the other ranks at the end of `with`. A failure ends the gang, because they wait for this rank."""
        try:
            yield
            self._ranks.end_step()
        except BaseException:
            self._ranks.lose()
            raise
