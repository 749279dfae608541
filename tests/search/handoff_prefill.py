"""The prefill worker of the model: grants, computes, publishes, and ends leases. Production table and pool, model glue."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.core.block_hash import BlockHash, block_hashes
from pdserve.core.blocks import BlockPool
from pdserve.core.ids import BlockSum, Incarnation
from pdserve.core.lease import LeaseTable
from tests.search import handoff_events as do
from tests.search.explorer import Step
from tests.search.handoff_events import LeaseKey
from tests.search.handoff_state import BLOCK_SIZE, GARBAGE, Computing, Config, Launched, Prefill, State, Ticket
from tests.search.machines import Machines


class PrefillSide:
    table_type: type[LeaseTable] = LeaseTable
    pool_type: type[BlockPool] = BlockPool

    def __init__(self, config: Config) -> None:
        self.config = config
        self.machines = Machines()
        self.hashes: list[tuple[BlockHash, ...]] = [block_hashes(prompt, BLOCK_SIZE) for prompt in config.prompts]
        self.totals = [-(-len(prompt) // BLOCK_SIZE) for prompt in config.prompts]
        known: dict[tuple[int, ...], int] = {}  # equal prefixes are the same content
        self.tags = [
            tuple(known.setdefault(prompt[: (i + 1) * BLOCK_SIZE], len(known) + 1) for i in range(total))
            for prompt, total in zip(config.prompts, self.totals, strict=True)
        ]

    # --- a new process

    def incarnation(self, restarts: int) -> int:
        return 1 + restarts

    def new_prefill(self, restarts: int) -> Prefill:
        incarnation = self.incarnation(restarts)
        table = self.machines.add(self.table_type(Incarnation(incarnation), ttl_s=self.config.ttl))
        cached = self.tags[0] if self.config.prefill_cached and not restarts else ()
        pool, memory = self.new_memory(self.pool_type, self.config.prefill_blocks, cached, summed=self.config.checksums)
        return Prefill(incarnation, table, pool, memory)

    def new_memory(
        self, pool_type: type[BlockPool], blocks: int, cached: tuple[int, ...], *, summed: bool
    ) -> tuple[int, tuple[int, ...]]:
        """With the full blocks of the first prompt in it where `cached` are the tags of its content."""
        pool = pool_type(blocks)
        memory = [GARBAGE] * blocks
        if cached:
            full = cached[: len(self.hashes[0])]
            do.with_prefix(pool, self.hashes[0], [self.sum_of(tag) for tag in full] if summed else [])
            for block, tag in zip(pool.lookup(self.hashes[0]), full, strict=True):
                memory[block] = tag
        return self.machines.add(pool), tuple(memory)

    # --- grant

    def granted(self, prefill: Prefill, number: int, request: int) -> Prefill | None:
        """All the prompt's blocks in one step, hits pinned, lent; or None."""
        prompt_len, total = len(self.config.prompts[request]), self.totals[request]
        holder = do.sequence(number)
        pool, reservation = self.machines.apply(prefill.pool, do.reserve, holder, total, self.hashes[request])
        if reservation is None:
            return None
        pool, _ = self.machines.apply(pool, do.lend, number)
        sums = self.inherited(pool, prefill.memory, number) if self.config.checksums else None
        table, (lease, ended) = self.machines.apply(prefill.table, do.grant, number, reservation.block_ids, prompt_len, sums)
        proof = Ticket(lease, request, reservation.block_ids).proof
        table, _ = self.machines.apply(table, do.expect, lease, proof)
        prefill = self.settled(prefill._replace(table=table, pool=pool))
        new = Computing(number, request, lease, reservation.block_ids, reservation.hits)
        prefill = self.ended(prefill._replace(sequences=(*prefill.sequences, new)), ended)
        return self.advanced(prefill, new) if new.computed else prefill

    def inherited(self, pool: int, memory: tuple[int, ...], number: int) -> tuple[BlockSum, ...]:
        """The checksums of the lease's prefix hits."""
        return tuple(block_sum for block_sum in self.machines.ask(pool, do.sums_lent, number) if block_sum is not None)

    def advanced(self, prefill: Prefill, sequence: Computing) -> Prefill:
        """The table learns how far the sequence is final."""
        watermark = min(sequence.computed * BLOCK_SIZE, len(self.config.prompts[sequence.request]))
        final = sequence.computed == self.totals[sequence.request]
        table, (_, ended) = self.machines.apply(prefill.table, do.advance, sequence.lease, watermark, final)
        return self.ended(prefill._replace(table=table), ended)

    def pushed(self, s: State, sequence: Computing) -> State:
        """The state after the watermark of the sequence's lease was pushed to its reader."""
        watermark = min(sequence.computed * BLOCK_SIZE, len(self.config.prompts[sequence.request]))
        if not watermark:
            return s
        return s.with_sent("view", sequence.request, sequence.lease, watermark)

    # --- events

    def prefill_events(self, s: State) -> Iterator[Step]:
        p = s.prefill
        if p.step is not None:
            yield Step(("collect", *p.step), self.collect(s), sure=True)
        elif not self.config.stalled:
            for sequence in p.sequences:
                yield Step(("launch", sequence.number, "block", sequence.computed), self.launch(s, sequence), sure=True)
        for sequence in p.sequences:
            if not sequence.aborted:
                yield Step(("preempt", sequence.number), s._replace(prefill=self.released(p, sequence.lease)))
        yield from self.lease_events(s)
        yield from self.rot_events(s)
        if self.machines.ask(p.pool, do.has_cached):
            pool, _ = self.machines.apply(p.pool, do.evict_all)
            yield Step(("evict", "prefill"), s._replace(prefill=self.settled(p._replace(pool=pool))))
        if s.used.prefill_restarts < self.config.prefill_restarts:
            used = s.used._replace(prefill_restarts=s.used.prefill_restarts + 1)
            yield Step(("restart", "prefill"), s._replace(prefill=self.new_prefill(used.prefill_restarts), used=used))

    def lease_events(self, s: State) -> Iterator[Step]:
        p = s.prefill
        leases = self.machines.ask(p.table, do.held_leases)
        for lease, number, _ in leases:
            yield Step(("release", *lease), s._replace(prefill=self.release(p, lease, number)))
        if any(due for _, _, due in leases):
            table, (_, ended) = self.machines.apply(p.table, do.expire_due)
            yield Step(("expire",), s._replace(prefill=self.ended(p._replace(table=table), ended)), sure=True)

    def launch(self, s: State, sequence: Computing) -> State:
        """From here on the block is being written."""
        block = sequence.blocks[sequence.computed]
        launched = Launched(sequence.number, sequence.computed, block, self.tags[sequence.request][sequence.computed])
        memory = with_tag(s.prefill.memory, block, GARBAGE)
        return s._replace(prefill=s.prefill._replace(step=launched, memory=memory))

    def collect(self, s: State) -> State:
        """The step has written its block; only now does anybody learn of it, and only now is an aborted sequence freed."""
        p, step = s.prefill, s.prefill.step
        assert step is not None
        p = p._replace(step=None, memory=with_tag(p.memory, step.block, step.tag))
        sequence = next(seq for seq in p.sequences if seq.number == step.number)
        if sequence.aborted:
            return s._replace(prefill=self.forgotten(p, sequence))
        moved = sequence._replace(computed=sequence.computed + 1)
        p = p._replace(sequences=tuple(moved if seq is sequence else seq for seq in p.sequences))
        p = self.published(p, moved, step.position)
        if self.config.checksums:
            p = self.sealed(p, moved, step.position, self.sum_of(p.memory[step.block]))
        if moved.computed == self.totals[moved.request]:
            p = self.forgotten(p, moved)
        return self.pushed(s._replace(prefill=self.advanced(p, moved)), moved)

    def published(self, prefill: Prefill, sequence: Computing, position: int) -> Prefill:
        hashes = self.hashes[sequence.request]
        if position >= len(hashes):
            return prefill
        pool, _ = self.machines.apply(prefill.pool, do.publish, do.sequence(sequence.number), position, hashes[position])
        return prefill._replace(pool=pool)

    # --- checksums

    def sum_of(self, tag: int) -> BlockSum:
        return BlockSum(tag)

    def sealed(self, prefill: Prefill, sequence: Computing, position: int, block_sum: BlockSum) -> Prefill:
        """The block is final and summed: for the pool, and for the lease if it is still held."""
        pool, _ = self.machines.apply(prefill.pool, do.seal, sequence.number, position, block_sum)
        table, ended = self.machines.apply(prefill.table, do.seal_lease, sequence.lease, position, block_sum)
        return self.ended(prefill._replace(pool=pool, table=table), ended)

    def rehashed(self, prefill: Prefill, number: int) -> tuple[Prefill, tuple[int, ...]]:
        """What of the lease is not what was summed: it is not found any more, and its leases end."""
        blocks = self.machines.ask(prefill.pool, do.lent, number)
        sums = self.machines.ask(prefill.pool, do.sums_lent, number) if blocks else ()
        rotted = [
            i for i, (block, value) in enumerate(zip(blocks, sums, strict=True)) if self.sum_of(prefill.memory[block]) != value
        ]
        if not rotted:
            return prefill, ()
        pool, _ = self.machines.apply(prefill.pool, do.withdraw, number, rotted[0])
        bad = tuple(blocks[i] for i in rotted)
        table, ended = self.machines.apply(prefill.table, do.release_all_over, bad)
        return self.ended(prefill._replace(pool=pool, table=table), ended), bad

    def rot_events(self, s: State) -> Iterator[Step]:
        """A block that is final changes in memory."""
        if s.used.rots < self.config.rots:
            used = s.used._replace(rots=s.used.rots + 1)
            for block, _ in self.machines.ask(s.prefill.pool, do.summed):
                p = s.prefill._replace(memory=with_tag(s.prefill.memory, block, GARBAGE))
                yield Step(("rot", block), s._replace(prefill=p, used=used))

    # --- ends

    def release(self, prefill: Prefill, lease: LeaseKey, number: int) -> Prefill:
        return self.released(prefill, lease)

    def released(self, prefill: Prefill, lease: LeaseKey) -> Prefill:
        """The lease ends first, then its blocks are freed."""
        table, (_, ended) = self.machines.apply(prefill.table, do.release, lease)
        return self.ended(prefill._replace(table=table), ended)

    def ended(self, prefill: Prefill, numbers: do.Ended) -> Prefill:
        """The references of leases that have ended go back, at once: the worst case. Their sequences stop."""
        for number in numbers:
            pool, _ = self.machines.apply(prefill.pool, do.drop, do.lease_of(number))
            prefill = prefill._replace(pool=pool)
            for sequence in prefill.sequences:
                if sequence.number == number:
                    prefill = self.aborted(prefill, sequence)
        return self.settled(prefill)

    def aborted(self, prefill: Prefill, sequence: Computing) -> Prefill:
        if prefill.step is None or prefill.step.number != sequence.number:
            return self.forgotten(prefill, sequence)
        doomed = sequence._replace(aborted=True)
        return prefill._replace(sequences=tuple(doomed if seq is sequence else seq for seq in prefill.sequences))

    def forgotten(self, prefill: Prefill, sequence: Computing) -> Prefill:
        pool, _ = self.machines.apply(prefill.pool, do.drop, do.sequence(sequence.number))
        left = tuple(seq for seq in prefill.sequences if seq.number != sequence.number)
        return self.settled(prefill._replace(pool=pool, sequences=left))

    def settled(self, prefill: Prefill) -> Prefill:
        """What lies in blocks that nobody holds is garbage from now on: anyone may write them at once."""
        return prefill._replace(memory=self.blanked(prefill.pool, prefill.memory))

    def blanked(self, pool: int, memory: tuple[int, ...]) -> tuple[int, ...]:
        gone = self.machines.ask(pool, do.meaningless)
        return tuple(GARBAGE if block in gone else tag for block, tag in enumerate(memory))


def with_tag(memory: tuple[int, ...], block: int, tag: int) -> tuple[int, ...]:
    return (*memory[:block], tag, *memory[block + 1 :])
