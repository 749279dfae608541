"""A simulated foreign engine, such as a server of vLLM, and the tickets by which such servers hand KV over among themselves.

A server believes every ticket: it goes on from whatever KV the ticket names, so a ticket that reaches another request, or comes
after its time, gives wrong tokens and a normal end. It frees lent KV when a reader has pulled it, and else after its own time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason
from pdserve.core.worker import EngineTraits, WorkerLoad
from pdserve.engine.schedule.collect import OutputToken
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
    DiscardKv,
    EngineKv,
    EngineSnapshot,
    Lent,
    Reserve,
    ReserveResult,
    ReturnLease,
    SetBudget,
    StepEvents,
)
from sim.faults.engine import HAND_OVER_S, TOKEN_S
from sim.faults.oracle import BLOCK_SIZE, EOS, VOCAB_SIZE, draw, tags_of
from sim.world.network import GIVE_UP_S, Network
from sim.world.process import Process

TRAITS: Final = EngineTraits("foreign 1", refuses=("prompt_logprobs",), undivided=("structured_outputs",))
KEEPS_S: Final = 9.0
"""A server keeps lent KV for so long: three times the leases of these runs, as vLLM's 30 s are of the usual leases."""
POLL_S: Final = 1.0
NO_SERVER_S: Final = 0.1
LOOK_AGAIN_S: Final = 0.05


@dataclass(slots=True)
class LentKv:
    """KV that waits for a reader until `end_s` of the timeline."""

    lender: Process
    ids: tuple[int, ...]
    end_s: float
    blocks: int


@dataclass(slots=True)
class Tickets:
    """The lent KV of all servers, by ticket. Once it was pulled, or its time is over, its memory has the KV of others."""

    rng: random.Random
    lent: dict[bytes, LentKv] = field(default_factory=dict)
    pulled: set[bytes] = field(default_factory=set)
    committed: set[bytes] = field(default_factory=set)
    """The tickets whose lease ended by a commit: somebody may use them, so nobody else can free their KV."""

    def lend(self, lender: Process, ids: tuple[int, ...], blocks: int) -> bytes:
        """Lend the KV of these tokens."""
        name = self.rng.randbytes(8)
        self.lent[name] = LentKv(lender, ids, lender.timeline.now_s + KEEPS_S, blocks)
        return name

    def waiting(self, lender: Process) -> Iterator[LentKv]:
        """Yield the KV of a server that no reader has pulled and whose time is not over."""
        for name, kv in self.lent.items():
            if kv.lender is lender and name not in self.pulled and kv.end_s > lender.timeline.now_s:
                yield kv

    @property
    def abandoned(self) -> int:
        """The number of tickets that were committed, and that no server has got."""
        return len(self.committed - self.pulled)

    def forget(self, lender: Process) -> None:
        """Let the KV of a server go, because the server starts again."""
        for name in [name for name, kv in self.lent.items() if kv.lender is lender]:
            del self.lent[name]


@dataclass(slots=True)
class _ServedSequence:
    spec: RequestSpec
    drawn: list[int]
    began: int
    seen: list[int] = field(default_factory=list)
    """The tokens whose KV the server has for it, whatever they are."""
    runs: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.spec.prompt_ids, *self.drawn)


class ForeignEngine:
    """The engine of one worker: a server, and what the worker counts of it. `publish` is called on the process's loop."""

    def __init__(
        self,
        process: Process,
        tickets: Tickets,
        network: Network,
        publish: Callable[[StepEvents], None],
        reached: Callable[[str], None],
        rng: random.Random,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        step_s: float,
    ) -> None:
        self._process = process
        self._tickets = tickets
        self._network = network
        self._publish = publish
        self._reached = reached
        self._rng = rng
        self._total = num_blocks
        self._slots = max_num_seqs
        self._max_model_len = max_model_len
        self._step_s = step_s
        self._sequences: dict[SeqId, _ServedSequence] = {}
        self._lent: dict[SeqId, bytes] = {}
        self._taken = 0
        self._newest = SeqId(0)
        self._told_s = 0.0
        self._later(POLL_S, self._poll)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the requests that are computed."""
        return [sequence.spec.sampling.seed for sequence in self._sequences.values()]

    @property
    def num_live(self) -> int:
        """The number of sequences that are here."""
        return len(self._sequences)

    @property
    def published(self) -> frozenset[int]:
        """The keys of shared blocks: this server tells none."""
        return frozenset()

    def counts(self) -> BlockCounts:
        """Return the blocks of sequences and of KV that waits for readers as held."""
        held = sum(blocks_of(len(sequence.ids)) + 1 for sequence in self._sequences.values())
        held += sum(kv.blocks for kv in self._tickets.waiting(self._process))
        held = min(held, self._total)
        return BlockCounts(self._total, self._total - held, 0, held, 0)

    def check_invariants(self) -> None:
        """Check nothing: the server's blocks are its own."""

    def restart(self) -> None:
        """Start the server again, which loses all that it has."""
        assert not self._sequences, "a worker that changes its role has sequences"
        self._tickets.forget(self._process)

    def snapshot(self) -> EngineSnapshot:
        """Return the present counts, as the worker tells them."""
        running = sum(sequence.runs for sequence in self._sequences.values())
        load = WorkerLoad(self.counts(), 0, 0, running, max_num_seqs=self._slots)
        return EngineSnapshot(load, self._taken, running > 0, self._newest)

    def submit(self, command: Command) -> None:
        """Take a command of the role a little later. The loop thread calls it."""
        self._process.engine_loop.call_soon(self._take, command)

    def _take(self, command: Command) -> None:
        self._taken += 1
        match command:
            case AddLent(seq_id, spec, resumed, _):
                sequence = self._add(seq_id, spec, resumed)
                sequence.runs = True
                self._later(self._step_s + TOKEN_S * len(sequence.ids), self._lend, seq_id, sequence)
            case Reserve(seq_id, spec, local, resumed, _):
                self._reserve(seq_id, spec, resumed, local=local)
                return
            case Activate(seq_id, first_token, kv):
                if (reserved := self._sequences.get(seq_id)) is not None:
                    assert kv is not None
                    reserved.drawn.append(first_token)
                    reserved.runs = True
                    self._pull(kv.params, seq_id, reserved, GIVE_UP_S)
            case Abort(seq_id, _):
                self._sequences.pop(seq_id, None)
            case DiscardKv(_, kv):
                self._pull(kv.params, None, None, GIVE_UP_S)
            case ReturnLease(seq_id, read):  # lent KV is freed by a reader, or by time
                ticket = self._lent.pop(seq_id, b"")
                if ticket and read:
                    self._tickets.committed.add(ticket)
            case SetBudget():
                pass
            case _:
                raise AssertionError(f"a foreign engine got {command}")
        self._tell(StepEvents(snapshot=self.snapshot()))

    def _poll(self) -> None:
        """Tell the load again, as a worker that asks its server for it: time frees KV too."""
        if not any(sequence.runs for sequence in self._sequences.values()):
            self._tell(StepEvents(snapshot=self.snapshot()))
        self._later(POLL_S, self._poll)

    def _add(self, seq_id: SeqId, spec: RequestSpec, resumed: tuple[int, ...]) -> _ServedSequence:
        sequence = self._sequences[seq_id] = _ServedSequence(spec, list(resumed), len(resumed))
        self._newest = max(self._newest, seq_id)
        return sequence

    def _reserve(self, seq_id: SeqId, spec: RequestSpec, resumed: tuple[int, ...], *, local: bool) -> None:
        self._newest = max(self._newest, seq_id)
        needed = blocks_of(len(spec.prompt_ids) + len(resumed)) + 1
        if len(self._sequences) >= self._slots or self.counts().held + needed > self._total:
            self._tell(StepEvents(reserved=(ReserveResult(seq_id, None),), snapshot=self.snapshot()))
            return
        sequence = self._add(seq_id, spec, resumed)
        if local:
            sequence.runs, sequence.seen = True, list(sequence.ids)
            self._later(self._step_s + TOKEN_S * len(sequence.ids), self._step, seq_id, sequence)
        self._tell(StepEvents(reserved=(ReserveResult(seq_id, _tables(needed)),), snapshot=self.snapshot()))

    def _lend(self, seq_id: SeqId, sequence: _ServedSequence) -> None:
        """Draw token 0, and lend the prompt's KV unless this token ends the request."""
        if self._sequences.get(seq_id) is not sequence:
            return
        self._reached("engine_step")
        if not self._process.alive:
            return
        prompt = sequence.ids
        sequence.seen = list(prompt)
        token, blocks = self._draw(seq_id, sequence), blocks_of(len(prompt))
        params = b"" if token.finish_reason else self._tickets.lend(self._process, prompt, blocks)
        del self._sequences[seq_id]
        self._lent[seq_id] = params
        lent = Lent(seq_id, _tables(blocks), kv=EngineKv(blocks, params))
        self._tell(StepEvents(lent=(lent,), tokens=(token,), snapshot=self.snapshot()))

    def _pull(self, ticket: bytes, seq_id: SeqId | None, sequence: _ServedSequence | None, patience_s: float) -> None:
        """Pull the KV of a ticket, whichever request it is for, and go on from there."""
        kv = self._tickets.lent.get(ticket)
        if kv is None or not kv.lender.alive:
            self._later(NO_SERVER_S, self._miss, seq_id, sequence)
        elif not self._network.joined(self._process, kv.lender):
            if patience_s <= 0:
                self._miss(seq_id, sequence)
            else:
                self._later(LOOK_AGAIN_S, self._pull, ticket, seq_id, sequence, patience_s - LOOK_AGAIN_S)
        else:
            self._later(self._network.delay_s(), self._got, ticket, seq_id, sequence)

    def _got(self, ticket: bytes, seq_id: SeqId | None, sequence: _ServedSequence | None) -> None:
        kv = self._tickets.lent.get(ticket)
        if kv is None or not kv.lender.alive:
            self._miss(seq_id, sequence)
            return
        ids = list(kv.ids)
        if ticket in self._tickets.pulled or kv.end_s <= self._process.timeline.now_s:
            ids = [self._rng.randrange(VOCAB_SIZE) for _ in ids]
        self._tickets.pulled.add(ticket)
        if seq_id is not None and sequence is not None and self._sequences.get(seq_id) is sequence:
            sequence.seen = [*ids, sequence.drawn[-1]]
            self._step(seq_id, sequence)

    def _miss(self, seq_id: SeqId | None, sequence: _ServedSequence | None) -> None:
        if seq_id is not None and self._sequences.get(seq_id) is sequence and sequence is not None:
            del self._sequences[seq_id]
            failed = (seq_id, TransferFailed("the server did not get the KV of the prompt"))
            self._tell(StepEvents(given_up=(failed,), snapshot=self.snapshot()))

    def _step(self, seq_id: SeqId, sequence: _ServedSequence) -> None:
        """Draw one token, and the next one later."""
        if self._sequences.get(seq_id) is not sequence:
            return
        self._reached("engine_step")
        if not self._process.alive:
            return
        token = self._draw(seq_id, sequence)
        if token.finish_reason is None:
            self._later(self._step_s, self._step, seq_id, sequence)
        else:
            del self._sequences[seq_id]
        self._tell(StepEvents(tokens=(token,), snapshot=self.snapshot()))

    def _draw(self, seq_id: SeqId, sequence: _ServedSequence) -> OutputToken:
        asked, index = sequence.spec.sampling, len(sequence.drawn)
        ends = (*(() if asked.ignore_eos else (EOS,)), *asked.stop_token_ids)
        token_id = draw(tags_of(sequence.seen), asked, index, ends if index < asked.min_tokens else ())
        sequence.seen.append(token_id)
        sequence.drawn.append(token_id)
        finish = None
        if len(sequence.drawn) >= asked.max_tokens or len(sequence.ids) >= self._max_model_len:
            finish = FinishReason.LENGTH
        if token_id in ends and len(sequence.drawn) >= asked.min_tokens:
            finish = FinishReason.STOP
        return OutputToken(seq_id, index, token_id, finish)

    def _later(self, delay_s: float, callback: Callable[..., None], *args: object) -> None:
        self._process.engine_loop.call_later(delay_s, callback, *args)

    def _tell(self, events: StepEvents) -> None:
        """Publish events on the loop, in order and a little later."""
        now_s = self._process.timeline.now_s
        self._told_s = max(self._told_s, now_s + self._rng.random() * HAND_OVER_S)
        self._process.loop.post(self._told_s - now_s, self._publish, events)


def blocks_of(tokens: int) -> int:
    """Return the blocks of so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def _tables(blocks: int) -> tuple[tuple[BlockId, ...], ...]:
    """Return as many blocks as a server takes. It does not tell which ones."""
    return (tuple(map(BlockId, range(blocks))),)
