"""The prefill worker of the model: grants, computes, publishes, and ends leases. Production table and pool, model glue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdserve.core.block_hash import BlockHash, block_hashes
from pdserve.core.block_pools import BlockPools
from pdserve.core.block_pools import Prefill as ComputedPrompt
from pdserve.core.blocks import BlockPool
from pdserve.core.ids import NULL_BLOCK, BlockSum, Incarnation
from pdserve.core.lease import LeaseTable
from tests.search import handoff_events as do
from tests.search.explorer import Step
from tests.search.handoff_events import LeaseKey, Sums, Tables
from tests.search.handoff_state import BLOCK_SIZE, GARBAGE, Computing, Config, Launched, Prefill, State, Ticket
from tests.search.machines import Machines


class PrefillSide:
    table_type: type[LeaseTable] = LeaseTable
    pool_type: type[BlockPool] = BlockPool
    pools_type: type[BlockPools] = BlockPools
    garbage: Any = GARBAGE
    """What lies in a block that has no content. `handoff_ranks` has content of another type."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.machines = Machines()
        self.hashes: list[tuple[BlockHash, ...]] = [block_hashes(prompt, BLOCK_SIZE) for prompt in config.prompts]
        self.totals = [-(-len(prompt) // BLOCK_SIZE) for prompt in config.prompts]
        known: dict[tuple[int, tuple[int, ...]], int] = {}  # equal prefixes are the same content, in each group another
        self.tags = [
            tuple(
                tuple(known.setdefault((group, prompt[: (i + 1) * BLOCK_SIZE]), len(known) + 1) for i in range(total))
                for group in range(len(config.more_blocks))
            )
            for prompt, total in zip(config.prompts, self.totals, strict=True)
        ]
        """The content of each request's blocks, for each group."""

    # --- a new process

    def incarnation(self, restarts: int) -> int:
        return 1 + restarts

    def new_prefill(self, restarts: int) -> Prefill:
        incarnation = self.incarnation(restarts)
        table = self.machines.add(self.table_type(Incarnation(incarnation), ttl_s=self.config.ttl))
        cached = self.tags[0] if self.config.prefill_cached and not restarts else ()
        sizes = self.config.pool_sizes(self.config.prefill_blocks)
        pools = do.new_pools(self.pools_type, self.pool_type, sizes, self.config.layouts)
        return Prefill(incarnation, table, *self.new_memory(pools, cached, summed=self.config.checksums))

    def new_memory(self, pools: BlockPools, cached: Tables, *, summed: bool) -> tuple[int, tuple[int, ...]]:
        """The pools and their memory. The full blocks of the first prompt lie there if `cached` has the tags of its groups."""
        memory = (self.garbage,) * sum(pool.num_blocks for pool in pools.groups)
        if cached:
            full = [tags[: len(self.hashes[0])] for tags in cached]
            sums = [tuple(map(self.sum_of, tags)) for tags in zip(*full, strict=True)] if summed else []
            tables = do.addresses(pools, do.with_prefix(pools, self.hashes[0], sums))
            for blocks, tags in zip(tables, full, strict=True):
                memory = with_tags(memory, blocks, tags)
        return self.machines.add(pools), memory

    # --- grant

    def granted(self, prefill: Prefill, number: int, request: int) -> Prefill | None:
        """All the prompt's blocks in one step, hits pinned, lent; or None."""
        prompt_len, total = len(self.config.prompts[request]), self.totals[request]
        holder = do.sequence(number)
        hashes = self.hashes[request][: (prompt_len - 1) // BLOCK_SIZE]  # at least the last token is computed
        computed = ComputedPrompt(prompt_len, BLOCK_SIZE, lent=True) if any(self.config.windows) else None
        pool, reservation = self.machines.apply(prefill.pool, do.reserve, holder, total, hashes, 0, computed)
        if reservation is None:
            return None
        pool, lent = self.machines.apply(pool, do.lend, number, prompt_len)
        sums = self.inherited(pool, prefill.memory, number, reservation.hits) if self.config.checksums else None
        table, (lease, ended) = self.machines.apply(prefill.table, do.grant, number, lent, prompt_len, sums)
        blocks = self.machines.ask(pool, do.addresses, reservation.block_tables)
        ticket = self.machines.ask(pool, do.addresses, lent)
        proof = Ticket(lease, request, ticket).proof
        table, _ = self.machines.apply(table, do.expect, lease, proof)
        prefill = self.settled(prefill._replace(table=table, pool=pool))
        new = Computing(number, request, lease, blocks, reservation.hits, ticket)
        prefill = self.ended(prefill._replace(sequences=(*prefill.sequences, new)), ended)
        return self.advanced(prefill, new) if new.computed else prefill

    def inherited(self, pool: int, memory: tuple[int, ...], number: int, hits: int) -> Sums:
        """The checksums of the lease's prefix hits."""
        sums = self.machines.ask(pool, do.sums_lent, number)
        return tuple(tuple(block_sum for block_sum in group[:hits] if block_sum is not None) for group in sums)

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
        yield from self.step_events(s)
        for sequence in p.sequences:
            if not sequence.aborted:
                yield Step(("preempt", sequence.number), s._replace(prefill=self.released(p, sequence.lease)))
        yield from self.lease_events(s)
        yield from self.rot_events(s)
        for group in self.machines.ask(p.pool, do.groups_with_cached):
            pool, _ = self.machines.apply(p.pool, do.evict_all, group)
            yield Step(("evict", "prefill", "group", group), s._replace(prefill=self.settled(p._replace(pool=pool))))
        if s.used.prefill_restarts < self.config.prefill_restarts:
            used = s.used._replace(prefill_restarts=s.used.prefill_restarts + 1)
            yield Step(("restart", "prefill"), s._replace(prefill=self.new_prefill(used.prefill_restarts), used=used))

    def step_events(self, s: State) -> Iterator[Step]:
        p = s.prefill
        if p.step is not None:
            yield Step(("collect", *p.step), self.collect(s), sure=True)
        elif not self.config.stalled:
            for sequence in p.sequences:
                yield Step(("launch", sequence.number, "block", sequence.computed), self.launch(s, sequence), sure=True)

    def lease_events(self, s: State) -> Iterator[Step]:
        p = s.prefill
        leases = self.machines.ask(p.table, do.held_leases)
        for lease, number, _ in leases:
            yield Step(("release", *lease), s._replace(prefill=self.release(p, lease, number)))
        if any(due for _, _, due in leases):
            table, (_, ended) = self.machines.apply(p.table, do.expire_due)
            yield Step(("expire",), s._replace(prefill=self.ended(p._replace(table=table), ended)), sure=True)

    def launch(self, s: State, sequence: Computing) -> State:
        """From here on the block of each group is being written."""
        at = sequence.computed
        if any(self.config.windows):
            s, sequence = self.filled(s, sequence)
        blocks = tuple(table[at] for table in sequence.blocks)
        tags = tuple(tags[at] for tags in self.tags[sequence.request])
        if not self.sees(s.prefill.memory, sequence.blocks, self.tags[sequence.request], at * BLOCK_SIZE):
            tags = (self.garbage,) * len(blocks)
        launched = Launched(sequence.number, at, blocks, tags)
        memory = with_tags(s.prefill.memory, blocks, (self.garbage,) * len(blocks))
        return s._replace(prefill=s.prefill._replace(step=launched, memory=memory))

    def filled(self, s: State, sequence: Computing) -> tuple[State, Computing]:
        """The next block is taken where the pool has only promised it."""
        pool, ids = self.machines.apply(s.prefill.pool, do.fill, sequence.number, sequence.computed + 1)
        filled = sequence._replace(blocks=self.machines.ask(pool, do.addresses, ids))
        sequences = tuple(filled if seq is sequence else seq for seq in s.prefill.sequences)
        return s._replace(prefill=self.settled(s.prefill._replace(pool=pool, sequences=sequences))), filled

    def collect(self, s: State) -> State:
        """The step has written its blocks; only now does anybody learn of it, and only now is an aborted sequence freed."""
        p, step = s.prefill, s.prefill.step
        assert step is not None
        p = p._replace(step=None, memory=self.written(p, step))
        sequence = next(seq for seq in p.sequences if seq.number == step.number)
        if sequence.aborted:
            return s._replace(prefill=self.forgotten(p, sequence))
        moved = sequence._replace(computed=sequence.computed + 1)
        p = p._replace(sequences=tuple(moved if seq is sequence else seq for seq in p.sequences))
        p = self.published(p, moved, step.position)
        if self.config.checksums:
            p = self.sealed(p, moved, step.position, tuple(self.sum_of(p.memory[block]) for block in step.blocks))
        if any(self.config.windows) and moved in p.sequences:
            p, moved = self.freed_behind(p, moved)
        if moved.computed == self.totals[moved.request]:
            p = self.forgotten(p, moved)
        return self.pushed(s._replace(prefill=self.advanced(p, moved)), moved)

    def written(self, prefill: Prefill, step: Launched) -> tuple[int, ...]:
        """The memory after the step."""
        return with_tags(prefill.memory, step.blocks, step.tags)

    def freed_behind(self, prefill: Prefill, sequence: Computing) -> tuple[Prefill, Computing]:
        """The blocks that the rest of the prompt does not see go back, while the lease keeps its own references."""
        computed = min(sequence.computed * BLOCK_SIZE, len(self.config.prompts[sequence.request]))
        pool, ids = self.machines.apply(prefill.pool, do.free_behind, sequence.number, computed)
        left = sequence._replace(blocks=self.machines.ask(pool, do.addresses, ids))
        sequences = tuple(left if seq is sequence else seq for seq in prefill.sequences)
        return self.settled(prefill._replace(pool=pool, sequences=sequences)), left

    def sees(self, memory: tuple[int, ...], blocks: Tables, tags: Tables, query: int) -> bool:
        """Tell whether the token at `query` finds the right KV of every earlier token that it sees in groups with a window."""
        for layout, table, wanted in zip(self.config.layouts, blocks, tags, strict=True):
            if layout.window is not None:
                for position in {key // BLOCK_SIZE for key in range(max(0, query - layout.window + 1), query)}:
                    if table[position] == NULL_BLOCK or memory[table[position]] != wanted[position]:
                        return False
        return True

    def published(self, prefill: Prefill, sequence: Computing, position: int) -> Prefill:
        hashes = self.hashes[sequence.request]
        if position >= len(hashes):
            return prefill
        pool, _ = self.machines.apply(prefill.pool, do.publish, do.sequence(sequence.number), position, hashes[position])
        return prefill._replace(pool=pool)

    # --- checksums

    def sum_of(self, tag: int) -> BlockSum:
        return BlockSum(tag)

    def sealed(self, prefill: Prefill, sequence: Computing, position: int, block_sums: tuple[BlockSum, ...]) -> Prefill:
        """The block of each group is final and summed: for the pools, and for the lease if it is still held."""
        pool, _ = self.machines.apply(prefill.pool, do.seal, sequence.number, position, block_sums)
        table, ended = self.machines.apply(prefill.table, do.seal_lease, sequence.lease, position, block_sums)
        return self.ended(prefill._replace(pool=pool, table=table), ended)

    def rehashed(self, prefill: Prefill, number: int) -> tuple[Prefill, tuple[int, ...]]:
        """What of the lease is not what was summed: it is not found any more, and its leases end."""
        lent = self.machines.ask(prefill.pool, do.lent, number)
        blocks = self.machines.ask(prefill.pool, do.addresses, lent)
        sums = self.machines.ask(prefill.pool, do.sums_lent, number) if any(lent) else ()
        rotted = [
            (group, i)
            for group, values in enumerate(sums)
            for i, value in enumerate(values)
            if blocks[group][i] != NULL_BLOCK and self.sum_of(prefill.memory[blocks[group][i]]) != value
        ]
        if not rotted:
            return prefill, ()
        pool, _ = self.machines.apply(prefill.pool, do.withdraw, number, min(i for _, i in rotted))
        bad = tuple((group, lent[group][i]) for group, i in rotted)
        table, ended = self.machines.apply(prefill.table, do.release_all_over, bad)
        return self.ended(prefill._replace(pool=pool, table=table), ended), tuple(blocks[group][i] for group, i in rotted)

    def rot_events(self, s: State) -> Iterator[Step]:
        """A block that is final changes in memory."""
        if s.used.rots < self.config.rots:
            used = s.used._replace(rots=s.used.rots + 1)
            for block, _ in self.machines.ask(s.prefill.pool, do.summed):
                p = s.prefill._replace(memory=with_tag(s.prefill.memory, block, self.garbage))
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
        return tuple(self.garbage if block in gone else tag for block, tag in enumerate(memory))


def with_tags(memory: tuple[int, ...], blocks: tuple[int, ...], tags: tuple[int, ...]) -> tuple[int, ...]:
    for block, tag in zip(blocks, tags, strict=True):
        memory = with_tag(memory, block, tag)
    return memory


def with_tag(memory: tuple[int, ...], block: int, tag: int) -> tuple[int, ...]:
    return (*memory[:block], tag, *memory[block + 1 :])
