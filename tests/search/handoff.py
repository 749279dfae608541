"""The handoff of KV as a model to be searched: one prefill worker, decode workers, a router and a hostile network.

The machines are production's: `LeaseTable`, `Reader`, `BlockPools`. The model adds what stands between them and must
obey the rules of the protocol: the router's choices, the engine's steps, the transport's copies. Every block of memory
carries the tag of the content it holds, so that what a sequence decodes from can be compared with what it should be. KV of
another group has another tag.

What the environment may do is taken at its worst. Messages are never forgotten: each may arrive at any moment, again, or
never. A freed block is garbage at once. A read copies each block at a moment of its own, and also reads the memory of a
process that has taken the lender's place. The router may rebind or retry at any moment without telling anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pdserve.core.ids import NULL_BLOCK
from pdserve.core.lease import CommitAnswer
from tests.search import handoff_events as do
from tests.search.explorer import Step, Violation
from tests.search.handoff_decode import DecodeSide, with_decode
from tests.search.handoff_state import BLOCK_SIZE, Asked, Bind, Decode, Prefill, State, Ticket, Used


class Handoff(DecodeSide):
    def initial(self) -> State:
        decodes = tuple(self.new_decode(worker, 0) for worker in range(len(self.config.decode_blocks)))
        assert len(set(self.config.decode_blocks)) == 1
        return State(self.new_prefill(0), decodes, (Asked(),) * len(self.config.prompts), (), Used())

    def successors(self, s: State) -> Iterator[Step]:
        for request, asked in enumerate(s.asked):
            yield from self.router_events(s, request, asked)
        yield from self.prefill_events(s)
        for worker in range(len(s.decodes)):
            yield from self.decode_events(s, worker)
        yield from self.network_events(s)
        yield from self.time_events(s)

    # --- the router

    def router_events(self, s: State, request: int, asked: Asked) -> Iterator[Step]:
        if s.used.binds < self.config.max_binds:
            for worker in range(1 if self.alike(s) else len(s.decodes)):
                yield from self.bind_event(s, request, asked, worker)
        if asked.bind and asked.lease is None and s.used.grants < self.config.max_grants:
            yield from self.grant_event(s, request, asked)
        if asked.lease is not None:
            yield from self.attach_event(s, asked)
        if asked.bind and self.config.retries:
            yield Step(("retry request", request), self.with_asked(s, request, Asked()))

    def alike(self, s: State) -> bool:
        """Workers that are alike before the first bind may be renamed, so that it goes to the first."""
        return not s.used.binds

    def bind_event(self, s: State, request: int, asked: Asked, worker: int) -> Iterator[Step]:
        """A second one is a rebind: the first may live on, and the lease stays."""
        number = s.used.binds + 1
        decode = self.bound(s.decodes[worker], number, request)
        if decode is not None:
            s = with_decode(s._replace(used=s.used._replace(binds=number)), worker, decode)
            s = self.with_asked(s, request, asked._replace(worker=worker, bind=number))
            yield Step(("rebind" if asked.bind else "bind", number, "request", request, "on", worker), s)

    def grant_event(self, s: State, request: int, asked: Asked) -> Iterator[Step]:
        """Only against a reservation on decode."""
        number = s.used.grants + 1
        prefill = self.granted(s.prefill, number, request)
        if prefill is not None:
            new = prefill.sequences[-1]
            s = s._replace(prefill=prefill, used=s.used._replace(grants=number))
            s = self.with_asked(s, request, asked._replace(lease=new.lease, ticket=new.lent))
            yield Step(("grant", *new.lease, "request", request), self.pushed(s, new))

    def attach_event(self, s: State, asked: Asked) -> Iterator[Step]:
        assert asked.lease is not None
        if asked.worker < 0:
            return
        decode = s.decodes[asked.worker]
        for bind in decode.binds:
            if bind.number == asked.bind and bind.reader < 0:
                for ticket in self.tickets(s, bind, asked):
                    if self.accepts(bind, ticket):
                        after = self.attached(decode, bind, ticket)
                        yield Step(("attach", bind.number, "to", *ticket), with_decode(s, asked.worker, after))

    def tickets(self, s: State, bind: Bind, asked: Asked) -> Iterator[Ticket]:
        """The one that was written for this bind; and, from who means harm, another request's and two that were changed."""
        assert asked.lease is not None
        yield Ticket(asked.lease, bind.request, asked.ticket)
        if not self.config.hostile_tickets:
            return
        if len(asked.ticket[0]) > 1:
            yield Ticket(asked.lease, bind.request, tuple(table[::-1] for table in asked.ticket))
        for request, other in enumerate(s.asked):
            if other.lease is not None and request != bind.request:
                yield Ticket(other.lease, request, other.ticket)
                yield Ticket(asked.lease, bind.request, other.ticket)

    def with_asked(self, s: State, request: int, asked: Asked) -> State:
        return s._replace(asked=(*s.asked[:request], asked, *s.asked[request + 1 :]))

    # --- the network and time

    def network_events(self, s: State) -> Iterator[Step]:
        for message in s.sent:
            if message[0] == "commit":
                yield Step(("commit arrives", *message[1:]), self.commit_arrived(s, *message[1:]))

    def commit_arrived(
        self,
        s: State,
        lease: do.LeaseKey,
        reader: do.ReaderKey,
        blocks: int,
        first: int,
        sums: do.Sums,
        proof: bytes,
    ) -> State:
        """A corrupt one is looked into before the lease's references can go back: commands to the engine keep their order."""
        numbers = {key: number for key, number, _ in self.machines.ask(s.prefill.table, do.held_leases)}
        table, (answer, ended) = self.machines.apply(s.prefill.table, do.commit, lease, reader, blocks, first, sums, proof)
        prefill = self.ended(s.prefill._replace(table=table), ended)
        if answer is CommitAnswer.CORRUPT:
            prefill = self.looked_into(s, prefill, numbers[lease])
        if answer:
            others = {m[2] for m in s.sent if m[0] == "answer" and m[1] == lease and m[3] == CommitAnswer.OK.value} - {reader}
            if others:
                raise Violation(f"two readers of lease {lease} were told OK: {reader} and {others}")
        return s._replace(prefill=prefill).with_sent("answer", lease, reader, answer.value)

    def looked_into(self, s: State, prefill: Prefill, number: int) -> Prefill:
        """The pair is blamed only if nothing on the lender differs; there is nothing to find where nothing was done."""
        if not s.used.rots and not s.used.flips:
            raise Violation("a false alarm: CORRUPT, and nothing was corrupted")
        prefill, rotted = self.rehashed(prefill, number)
        if not rotted and not s.used.flips:
            raise Violation("the pair is blamed for what happened in the lender's memory")
        findable = self.machines.ask(prefill.pool, do.published) & set(rotted)
        if findable:
            raise Violation(f"rotted blocks {sorted(findable)} can still be found")
        return prefill

    def time_events(self, s: State) -> Iterator[Step]:
        leases = self.machines.ask(s.prefill.table, do.held_leases)
        if all(due for _, _, due in leases):
            return
        binds = [bind for decode in s.decodes for bind in decode.binds if bind.reader >= 0]
        if any(self.overdue(bind) for bind in binds):
            return
        table, _ = self.machines.apply(s.prefill.table, do.elapse)
        s = s._replace(prefill=s.prefill._replace(table=table))
        if self.config.wait_cap is not None:
            s = s._replace(decodes=tuple(self.older(decode) for decode in s.decodes))
        yield Step(("tick",), s, sure=True)

    def older(self, decode: Decode) -> Decode:
        cap = self.config.wait_cap
        assert cap is not None
        aged = (b._replace(waited=min(b.waited + 1, cap)) if b.reader >= 0 else b for b in decode.binds)
        return decode._replace(binds=tuple(aged))

    # --- what must hold

    def check(self, s: State) -> None:
        for decode in s.decodes:
            for block, block_sum in self.machines.ask(decode.pool, do.summed):
                if block_sum != self.sum_of(decode.memory[block]):
                    raise Violation(f"a checksum of decode's block {block} is not of the form that it stores")
            for bind in decode.binds:
                self.check_bind(decode, bind)
        if any(self.config.windows):
            self.check_lent(s)

    def check_lent(self, s: State) -> None:
        """A read of a held lease must find blocks that the lease holds, whatever its sequence has freed."""
        for lease, number, _ in self.machines.ask(s.prefill.table, do.held_leases):
            lent = self.machines.ask(s.prefill.pool, do.lent, number)
            held = set(chain.from_iterable(self.machines.ask(s.prefill.pool, do.addresses, lent)))
            binds = [bind for decode in s.decodes for bind in decode.binds if bind.lease == lease]
            read = {remote for bind in binds for read in bind.reads for remote, *_ in read.pairs}
            if read - held or read & self.machines.ask(s.prefill.pool, do.meaningless):
                raise Violation(f"a read of lease {lease} touches blocks {sorted(read - held)} that the lease does not hold")

    def seen(self, decode: Decode, block: int) -> int | None:
        """The content of a block; None for a null entry."""
        return decode.memory[block] if block != NULL_BLOCK else None

    def is_right(self, content: tuple[tuple[int | None, ...], ...], expected: do.Tables, prompt_len: int) -> bool:
        """Tell whether each block is right that the token after the prompt sees, or would see if there was no other."""
        for layout, have, want in zip(self.config.layouts, content, expected, strict=True):
            first = 0 if layout.window is None else max(0, prompt_len - layout.window + 1)
            needed = {key // BLOCK_SIZE for key in range(first, prompt_len)}
            if len(have) != len(want) or any(have[position] != want[position] for position in needed):
                return False
        return True

    def check_bind(self, decode: Decode, bind: Bind) -> None:
        if bind.active:
            content = tuple(tuple(self.seen(decode, block) for block in table) for table in bind.blocks)
            expected = self.expected(bind.request)
            if not self.is_right(content, expected, len(self.config.prompts[bind.request])):
                raise Violation(f"bind {bind.number} decodes from {content} instead of {expected}")
        targets = {local for read in bind.reads for _, local, *_ in read.pairs}
        if targets:
            astray = targets - self.machines.ask(decode.pool, do.writable, bind.number)
            if astray:
                raise Violation(f"a read of bind {bind.number} may write into blocks {sorted(astray)}")

    def quiescent(self, s: State) -> bool:
        pools = [s.prefill.pool, *(decode.pool for decode in s.decodes)]
        if s.prefill.sequences or s.prefill.step or any(decode.binds or decode.step is not None for decode in s.decodes):
            return False
        return not self.machines.ask(s.prefill.table, do.held_leases) and all(self.machines.ask(p, do.all_idle) for p in pools)
