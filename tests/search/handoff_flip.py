"""The handoff with workers that drain and change their role: the process, its pool and its memory stay, its life is new.

The ways of a flip:

- "back": a worker takes the other role, has nothing to do there, and takes its old role again.
- "lends": a decode worker lends from now on. The prefill worker before it dies in the same moment, so one worker lends.
- "reads": the prefill worker reads from now on, and a new process lends.

A flip needs three events: the worker drains, it sees that it is empty, and it begins its new life. Any other event may come
between them. Reads of an earlier life that could still write are kept, so that a mutant which forgets them meets them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.core.ids import Incarnation
from tests.search import handoff_events as do
from tests.search.explorer import Step, Violation
from tests.search.handoff import Handoff
from tests.search.handoff_decode import with_decode
from tests.search.handoff_state import Asked, Bind, Decode, Phase, Prefill, State

FLIPPED = 1000
"""The incarnations of new lives begin here."""


class FlippingHandoff(Handoff):
    def successors(self, s: State) -> Iterator[Step]:
        yield from super().successors(s)
        yield from self.prefill_flips(s)
        for worker in range(len(s.decodes)):
            yield from self.decode_flips(s, worker)

    # --- the prefill worker

    def prefill_flips(self, s: State) -> Iterator[Step]:
        p = s.prefill
        if p.phase is Phase.SERVES and s.used.role_flips < self.config.role_flips:
            yield Step(("drain", "prefill"), self.counted(s)._replace(prefill=p._replace(phase=Phase.DRAINS)))
        elif p.phase is Phase.DRAINS:
            if self.prefill_empty(p):
                yield Step(("empty", "prefill"), s._replace(prefill=p._replace(phase=Phase.EMPTY)), sure=True)
            else:
                yield Step(("drain timeout", "prefill"), s._replace(prefill=self.prefill_closed(p)), sure=True)
        elif p.phase is Phase.EMPTY:
            yield Step(("flip back", "prefill"), s._replace(prefill=self.prefill_back(s)), sure=True)
            if "reads" in self.config.flip_ways:
                yield Step(("flip", "prefill", "reads"), self.reads_now(s))

    def prefill_empty(self, prefill: Prefill) -> bool:
        """No request, no lease, no block."""
        return (
            not prefill.sequences
            and prefill.step is None
            and not self.machines.ask(prefill.table, do.held_leases)
            and self.machines.ask(prefill.pool, do.all_idle)
        )

    def prefill_closed(self, prefill: Prefill) -> Prefill:
        """The role gives up what is left: each lease ends through its table, then its blocks go back."""
        for lease, _, _ in self.machines.ask(prefill.table, do.held_leases):
            prefill = self.released(prefill, lease)
        for sequence in prefill.sequences:
            prefill = self.aborted(prefill, sequence)
        return prefill

    def prefill_back(self, s: State) -> Prefill:
        """The next life of the same process as a lender."""
        incarnation = self.next_incarnation(s, s.prefill.incarnation)
        table = self.next_table(s, incarnation)
        return self.settled(Prefill(incarnation, table, s.prefill.pool, s.prefill.memory))

    def reads_now(self, s: State) -> State:
        """The lender's process is a decode worker from now on. A new process lends."""
        p = s.prefill
        decode = self.cleared(Decode(self.next_incarnation(s, p.incarnation), p.pool, p.memory))
        return s._replace(prefill=self.new_prefill(2 * FLIPPED + s.used.role_flips), decodes=(*s.decodes, decode))

    def granted(self, prefill: Prefill, number: int, request: int) -> Prefill | None:
        return super().granted(prefill, number, request) if self.takes(prefill.phase) else None

    # --- the decode workers

    def decode_flips(self, s: State, worker: int) -> Iterator[Step]:
        decode = s.decodes[worker]
        if decode.phase is Phase.SERVES and s.used.role_flips < self.config.role_flips:
            draining = decode._replace(phase=Phase.DRAINS)
            yield Step(("drain", "decode", worker), with_decode(self.counted(s), worker, draining))
        elif decode.phase is Phase.DRAINS and self.decode_empty(decode):
            yield Step(("empty", "decode", worker), with_decode(s, worker, decode._replace(phase=Phase.EMPTY)), sure=True)
        elif decode.phase is Phase.EMPTY:
            yield Step(("flip back", "decode", worker), with_decode(s, worker, self.decode_back(s, decode)), sure=True)
            if "lends" in self.config.flip_ways:
                yield Step(("flip", "decode", worker, "lends"), self.lends_now(s, worker))

    def decode_empty(self, decode: Decode) -> bool:
        """No request, no read that may still write, no block."""
        return not decode.binds and decode.step is None and self.machines.ask(decode.pool, do.all_idle)

    def decode_back(self, s: State, decode: Decode) -> Decode:
        """The next life of the same process as a reader, which numbers its binds anew."""
        incarnation = self.next_incarnation(s, decode.incarnation)
        return self.cleared(Decode(incarnation, decode.pool, decode.memory, before=s.used.binds))

    def lends_now(self, s: State, worker: int) -> State:
        """The decode worker's process lends from now on. The router has lost what it had placed there."""
        decode = s.decodes[worker]
        incarnation = self.next_incarnation(s, decode.incarnation)
        pool, late = self.kept(decode)
        lender = Prefill(incarnation, self.new_table(incarnation), pool, decode.memory, late=late)
        decodes = (*s.decodes[:worker], *s.decodes[worker + 1 :])
        asked = tuple(self.forgotten_on(one, worker) for one in s.asked)
        return s._replace(prefill=self.settled(lender), decodes=decodes, asked=asked)

    def kept(self, decode: Decode) -> tuple[int, tuple[int, ...]]:
        """The pool of the next life, and the blocks that reads of this life may still write: none, as it is empty."""
        return decode.pool, tuple(local for bind in decode.binds for read in bind.reads for _, local in read.pairs)

    def forgotten_on(self, asked: Asked, worker: int) -> Asked:
        if asked.worker == worker:
            return asked._replace(worker=-1)
        return asked._replace(worker=asked.worker - 1) if asked.worker > worker else asked

    def bound(self, decode: Decode, number: int, request: int) -> Decode | None:
        return super().bound(decode, number, request) if self.takes(decode.phase) else None

    def reader_id(self, decode: Decode, bind: Bind) -> do.ReaderKey:
        return decode.incarnation, bind.number - decode.before

    # --- the rules

    def takes(self, phase: Phase) -> bool:
        """A draining worker takes nothing new."""
        return phase is Phase.SERVES

    def next_incarnation(self, s: State, incarnation: int) -> int:
        return FLIPPED + s.used.role_flips

    def next_table(self, s: State, incarnation: int) -> int:
        return self.new_table(incarnation)

    def new_table(self, incarnation: int) -> int:
        return self.machines.add(self.table_type(Incarnation(incarnation), ttl_s=self.config.ttl))

    def counted(self, s: State) -> State:
        return s._replace(used=s.used._replace(role_flips=s.used.role_flips + 1))

    def quiescent(self, s: State) -> bool:
        """A worker that drains must get through it, too."""
        phases = [s.prefill.phase, *(decode.phase for decode in s.decodes)]
        return all(phase is Phase.SERVES for phase in phases) and super().quiescent(s)

    def check(self, s: State) -> None:
        super().check(s)
        astray = set(s.prefill.late) - self.machines.ask(s.prefill.pool, do.in_quarantine)
        if astray:
            raise Violation(f"a read of an earlier life may write into blocks {sorted(astray)}")

    def alike(self, s: State) -> bool:
        return False
