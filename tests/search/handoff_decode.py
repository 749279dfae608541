"""The decode workers of the model: reserve, follow a lease, copy, commit, decode. Production reader and pool, model glue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import BlockPool
from pdserve.core.ids import NULL_BLOCK, NULL_SUM
from pdserve.core.lease import CommitAnswer
from pdserve.core.reader import Discard, Effect, PostRead, Reader, ReaderState, Reusable, SendCommit
from tests.search import handoff_events as do
from tests.search.explorer import Step
from tests.search.handoff_prefill import PrefillSide, with_tag, with_tags
from tests.search.handoff_state import BLOCK_SIZE, Bind, Decode, Read, State, Ticket


class DecodeSide(PrefillSide):
    reader_type: type[Reader] = Reader
    decode_pool_type: type[BlockPool] = BlockPool
    decode_pools_type: type[BlockPools] = BlockPools

    def new_decode(self, worker: int, restarts: int) -> Decode:
        cached = self.expected(0) if self.config.decode_cached and not restarts else ()
        sizes = self.config.pool_sizes(self.config.decode_blocks[worker])
        pools = do.new_pools(self.decode_pools_type, self.decode_pool_type, sizes, self.config.layouts)
        return Decode(100 * (worker + 1) + restarts, *self.new_memory(pools, cached, summed=False))

    def reader_id(self, decode: Decode, bind: Bind) -> do.ReaderKey:
        return decode.incarnation, bind.number

    # --- bind and attach

    def bound(self, decode: Decode, number: int, request: int) -> Decode | None:
        """Whole, with the worker's own prefix hits pinned, or not at all."""
        total, arriving = self.totals[request], len(self.config.prompts[request])
        pool, got = self.machines.apply(decode.pool, do.reserve, do.inbound(number), total, self.hashes[request], arriving)
        if got is None:
            return None
        bind = Bind(number, request, self.machines.ask(pool, do.addresses, got.block_tables), got.hits)
        return self.cleared(decode._replace(pool=pool, binds=(*decode.binds, bind)))

    def accepts(self, bind: Bind, ticket: Ticket) -> bool:
        """It names the prompt that was bound, before anything is read."""
        return ticket.request == bind.request

    def attached(self, decode: Decode, bind: Bind, ticket: Ticket) -> Decode:
        prompt_len = len(self.config.prompts[bind.request])
        first = max(bind.hits, min(table.count(NULL_BLOCK) for table in bind.blocks))
        reader = self.machines.add(do.new_reader(self.reader_type, ticket.lease, prompt_len, BLOCK_SIZE, first))
        bind = bind._replace(lease=ticket.lease, remote=ticket.blocks, proof=ticket.proof, reader=reader)
        return with_bind(decode, bind)

    # --- events

    def decode_events(self, s: State, worker: int) -> Iterator[Step]:
        decode = s.decodes[worker]
        for bind in decode.binds:
            yield from self.bind_events(s, worker, bind)
        for group in self.machines.ask(decode.pool, do.groups_with_cached):
            pool, _ = self.machines.apply(decode.pool, do.evict_all, group)
            after = with_decode(s, worker, self.cleared(decode._replace(pool=pool)))
            yield Step(("evict", "decode", worker, "group", group), after)
        if s.used.decode_restarts < self.config.decode_restarts:
            used = s.used._replace(decode_restarts=s.used.decode_restarts + 1)
            fresh = self.new_decode(worker, used.decode_restarts)
            yield Step(("restart", "decode", worker), with_decode(s._replace(used=used), worker, fresh))
        if self.config.local_steps:
            yield from self.local_events(s, worker)

    def bind_events(self, s: State, worker: int, bind: Bind) -> Iterator[Step]:
        decode = s.decodes[worker]
        name = (bind.number, "on", worker)
        if bind.active:
            yield Step(
                ("finish", *name), with_decode(s, worker, self.removed(decode, bind, do.sequence(bind.number))), sure=True
            )
        elif bind.reader < 0:
            yield Step(
                ("cancel", *name), with_decode(s, worker, self.removed(decode, bind, do.inbound(bind.number))), sure=True
            )
        else:
            state = self.machines.ask(bind.reader, do.state_of)
            if state in (ReaderState.PULLING, ReaderState.COMMITTING):
                yield from self.live_events(s, worker, bind, state)
        if bind.reads:
            yield from self.read_events(s, worker, bind)

    def live_events(self, s: State, worker: int, bind: Bind, state: ReaderState) -> Iterator[Step]:
        name = (bind.number, "on", worker)
        if self.may_give_up(bind):
            yield Step(("cancel", *name), self.tell(s, worker, bind, "abort"), sure=True)
        if self.overdue(bind):
            return
        yield Step(("renew", *name), self.renewed(s, worker, bind))
        if state is ReaderState.COMMITTING:
            yield Step(("commit unanswered", *name), self.tell(s, worker, bind, "commit_answered", False), sure=True)
        key = self.reader_id(s.decodes[worker], bind)
        for message in s.sent:
            if message[0] == "view" and message[1] == bind.request:
                yield Step(("view arrives", *message[1:], "at", *name), self.viewed(s, worker, bind, *message[2:]))
            elif message[0] == "answer" and message[1:3] == (bind.lease, key) and state is ReaderState.COMMITTING:
                yield Step(("answer arrives", *message[1:], "at", *name), self.answered(s, worker, bind, message[3]))

    def read_events(self, s: State, worker: int, bind: Bind) -> Iterator[Step]:
        """Nothing shows how far a read has come; an abandoned one goes on until it is done or the transport says so."""
        abandoned = self.machines.ask(bind.reader, do.state_of) is ReaderState.ABANDONED
        for read in bind.reads:
            name = ("read", read.number, "of", bind.number, "on", worker)
            if read.pairs and not abandoned:
                for pair in read.pairs:
                    yield Step(("copy", *pair, "in", *name), self.copied(s, worker, bind, read, pair), sure=True)
                    if s.used.flips < self.config.flips:
                        flipped = s._replace(used=s.used._replace(flips=s.used.flips + 1))
                        yield Step(("flip", *pair, "in", *name), self.copied(flipped, worker, bind, read, pair, self.garbage))
            else:
                yield Step(("done", *name), self.arrived(s, worker, bind, read), sure=True)
            if abandoned:
                yield Step(("stopped", *name), self.resolved(s, worker, bind, read, "read_stopped"), sure=True)
            elif not read.failed:
                yield Step(("failed", *name), self.failed(s, worker, bind, read))

    def local_events(self, s: State, worker: int) -> Iterator[Step]:
        decode = s.decodes[worker]
        if decode.step is None:
            pool, blocks = self.machines.apply(decode.pool, do.take_one)
            if blocks is not None:
                busy = self.cleared(decode._replace(pool=pool, step=blocks))
                yield Step(("local step writes", blocks, "on", worker), with_decode(s, worker, busy))
            return
        if not decode.step_aborted:
            yield Step(("local abort on", worker), with_decode(s, worker, self.local_aborted(decode)))
        memory = with_tags(decode.memory, decode.step, (self.garbage,) * len(decode.step))
        pool, _ = self.machines.apply(decode.pool, do.drop, do.LOCAL)
        done = decode._replace(pool=pool, memory=memory, step=None, step_aborted=False)
        yield Step(("local step collected on", worker), with_decode(s, worker, self.cleared(done)), sure=True)

    def local_aborted(self, decode: Decode) -> Decode:
        """A sequence in an uncollected step keeps its block until the step is collected."""
        return decode._replace(step_aborted=True)

    # --- what the reader hears

    def may_give_up(self, bind: Bind) -> bool:
        return self.config.wait_cap is None or self.overdue(bind)

    def overdue(self, bind: Bind) -> bool:
        """The wait before the first read is over: it must be given up before time goes on."""
        cap = self.config.wait_cap
        return cap is not None and bind.waited >= cap and self.machines.ask(bind.reader, do.waits)

    def tell(self, s: State, worker: int, bind: Bind, method: str, *args: Any) -> State:
        reader, effects = self.machines.apply(bind.reader, do.told, method, *args)
        return self.performed(s, worker, bind._replace(reader=reader), effects)

    def viewed(self, s: State, worker: int, bind: Bind, lease: do.LeaseKey, watermark: int) -> State:
        reader, effects = self.machines.apply(bind.reader, do.advanced, lease, watermark)
        return self.performed(s, worker, bind._replace(reader=reader), effects)

    def renewed(self, s: State, worker: int, bind: Bind) -> State:
        """Answered by whatever process now lives where the lender was."""
        table, (watermark, ended) = self.machines.apply(s.prefill.table, do.renew, bind.lease, bind.proof)
        s = s._replace(prefill=self.ended(s.prefill._replace(table=table), ended))
        if watermark is None:
            return self.tell(s, worker, bind, "lease_gone")
        assert bind.lease is not None
        return self.viewed(s, worker, bind, bind.lease, watermark)

    def answered(self, s: State, worker: int, bind: Bind, answer: str) -> State:
        ok = answer == CommitAnswer.OK.value
        if answer == CommitAnswer.CORRUPT.value:
            return self.tell(s, worker, bind, "commit_corrupt")
        s = self.tell(s, worker, bind, "commit_answered", ok)
        return self.activated(s, worker, bind.number) if ok else s

    def activated(self, s: State, worker: int, number: int) -> State:
        """OK: the blocks are the sequence's, and full ones may be shared."""
        decode = s.decodes[worker]
        bind = next(b for b in decode.binds if b.number == number)
        pool, _ = self.machines.apply(decode.pool, do.hand_over, number)
        hashes = self.hashes[bind.request]
        for position in range(bind.hits, len(hashes)):
            pool, _ = self.machines.apply(pool, do.publish, do.sequence(number), position, hashes[position])
        return with_decode(s, worker, with_bind(decode._replace(pool=pool), bind._replace(active=True)))

    # --- what the reader wants

    def performed(self, s: State, worker: int, bind: Bind, effects: list[Effect]) -> State:
        s = with_decode(s, worker, with_bind(s.decodes[worker], bind))
        for effect in effects:
            s = self.perform(s, worker, bind.number, effect)
        return s

    def perform(self, s: State, worker: int, number: int, effect: Effect) -> State:
        decode = s.decodes[worker]
        bind = next(b for b in decode.binds if b.number == number)
        match effect:
            case PostRead(read, first, count):
                remote, local = part(bind.remote, first, count), part(bind.blocks, first, count)
                pairs = self.pairs(remote, local)
                decode = with_bind(decode, bind._replace(reads=(*bind.reads, Read(read, pairs, blocks=local))))
            case SendCommit(blocks, first, sums):
                return self.commit_sent(s, worker, bind, blocks, first, sums)
            case Discard(0):
                decode = self.removed(decode, bind, do.inbound(number))
            case Discard():
                decode = self.set_aside(decode, bind)
            case Reusable():
                pool, _ = self.machines.apply(decode.pool, do.end_quarantine, number)
                decode = self.cleared(without_bind(decode._replace(pool=pool), bind))
        return with_decode(s, worker, decode)

    def pairs(self, remote: do.Tables, local: do.Tables) -> tuple[tuple[int, int], ...]:
        """The (remote, local) blocks of all groups that one read copies."""
        pairs = zip(chain.from_iterable(remote), chain.from_iterable(local), strict=True)
        return tuple(pair for pair in pairs if NULL_BLOCK not in pair)

    def commit_sent(self, s: State, worker: int, bind: Bind, blocks: int, first: int, sums: do.Sums) -> State:
        key = self.reader_id(s.decodes[worker], bind)
        return s.with_sent("commit", bind.lease, key, blocks, first, sums, bind.proof)

    def set_aside(self, decode: Decode, bind: Bind) -> Decode:
        pool, _ = self.machines.apply(decode.pool, do.quarantine, bind.number)
        return self.cleared(decode._replace(pool=pool))

    def removed(self, decode: Decode, bind: Bind, holder: do.Holder) -> Decode:
        pool, _ = self.machines.apply(decode.pool, do.drop, holder)
        return self.cleared(without_bind(decode._replace(pool=pool), bind))

    # --- the transport

    def stored(self, tag: int) -> int:
        """Content as decode keeps it."""
        return -tag if self.config.converted else tag

    def expected(self, request: int) -> do.Tables:
        """The content of the request's blocks in each group, as decode keeps it."""
        return tuple(tuple(map(self.stored, tags)) for tags in self.tags[request])

    def sums_of(self, memory: tuple[int, ...], blocks: do.Tables) -> do.Sums:
        return tuple(
            tuple(self.sum_of(memory[block]) if block != NULL_BLOCK else NULL_SUM for block in table) for table in blocks
        )

    def arrived(self, s: State, worker: int, bind: Bind, read: Read) -> State:
        """Every block is here: summed as it was sent, and then made what decode stores."""
        if self.machines.ask(bind.reader, do.state_of) is ReaderState.ABANDONED:
            return self.resolved(s, worker, bind, read, "read_done")
        decode = s.decodes[worker]
        sums = self.sums_of(decode.memory, read.blocks) if self.config.checksums else ()
        memory = decode.memory
        for block in set(chain.from_iterable(read.blocks)) - {NULL_BLOCK}:
            memory = with_tag(memory, block, self.stored(memory[block]))
        return self.resolved(with_decode(s, worker, decode._replace(memory=memory)), worker, bind, read, "read_done", sums)

    def copied(self, s: State, worker: int, bind: Bind, read: Read, pair: tuple[int, int], instead: int | None = None) -> State:
        """Whatever lies at the remote address now, whichever process put it there; or something else `instead`."""
        remote, local = pair
        decode = s.decodes[worker]
        left = read._replace(pairs=tuple(other for other in read.pairs if other != pair))
        reads = tuple(left if other is read else other for other in bind.reads)
        tag = s.prefill.memory[remote] if instead is None else instead
        decode = decode._replace(memory=with_tag(decode.memory, local, tag))
        return with_decode(s, worker, with_bind(decode, bind._replace(reads=reads)))

    def resolved(self, s: State, worker: int, bind: Bind, read: Read, method: str, *args: Any) -> State:
        left = bind._replace(reads=tuple(other for other in bind.reads if other is not read))
        return self.tell(s, worker, left, method, read.number, *args)

    def failed(self, s: State, worker: int, bind: Bind, read: Read) -> State:
        reads = tuple(read._replace(failed=True) if other is read else other for other in bind.reads)
        return self.tell(s, worker, bind._replace(reads=reads), "read_failed", read.number)

    def cleared(self, decode: Decode) -> Decode:
        return decode._replace(memory=self.blanked(decode.pool, decode.memory))


def part(tables: do.Tables, first: int, count: int) -> do.Tables:
    """The blocks [first, first + count) of each group."""
    return tuple(table[first : first + count] for table in tables)


def with_decode(s: State, worker: int, decode: Decode) -> State:
    return s._replace(decodes=(*s.decodes[:worker], decode, *s.decodes[worker + 1 :]))


def with_bind(decode: Decode, bind: Bind) -> Decode:
    return decode._replace(binds=tuple(bind if b.number == bind.number else b for b in decode.binds))


def without_bind(decode: Decode, bind: Bind) -> Decode:
    return decode._replace(binds=tuple(b for b in decode.binds if b.number != bind.number))
