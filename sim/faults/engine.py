"""The simulated engine: production scheduler and block pool, a model whose KV is tags, and steps that take virtual time.

Commands queue during a step, as in the real engine thread. The KV of a step is written when the step ends. So a read that
comes too early, or from a block that a step still writes, gets wrong tags. In a gang each rank writes its heads at a time of
its own, and the step ends with the slowest rank.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import NULL_BLOCK, BlockId, BlockSum, Incarnation
from pdserve.core.kv_layout import KvGroup, KvShare
from pdserve.core.speculation import DraftCounts
from pdserve.core.step_plan import NO_TOKEN, Sampled, SampleSpec, SequenceSlice, StepPlan
from pdserve.core.worker import WorkerLoad
from pdserve.engine.kv.checksum import add_sums
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Command, EngineSnapshot, StepEvents
from sim.faults.drafts import Drafting, DraftWatch
from sim.faults.oracle import BLOCK_SIZE, CARD, EOS, VOCAB_SIZE, chain, draw, score, tags_of
from sim.world.process import Process

STEP_S: Final = 0.004  # a step takes this time, and
TOKEN_S: Final = 0.0005  # this for each of its tokens, so that chunks of a prompt take longer than decodes, as in a real engine
_MASK: Final = (1 << 64) - 1
HAND_OVER_S: Final = 0.002  # a message from one thread to another takes at most this time, since threads share the GIL


class Poison:
    """The requests of clients that end their workers: a worker dies in the step that draws token `at` of such a request, or a
    later token. Seeds identify these requests."""

    def __init__(self) -> None:
        self._from: dict[int, tuple[str, int]] = {}
        self.ended_by: dict[Incarnation, str] = {}
        """The names of the requests that have ended workers."""

    def add(self, name: str, seed: int, at: int) -> None:
        """Let a request end its workers."""
        self._from[seed] = name, at

    def in_step(self, plan: StepPlan) -> str:
        """Return the name of the request that ends the worker in this step. Empty: none does."""
        for spec in plan.specs:
            name, at = self._from.get(spec.params.seed, ("", 0))
            if name and spec.scored is None and spec.output_index >= at:
                return name
        return ""


class SimMemory:
    """The memory of some blocks, over all ranks that have a part of them. `poison` overwrites freed blocks; otherwise old tags
    stay there.

    A block has a cell for each head of each layer, by its place (`pdserve.core.kv_layout.Unit`). A cell has the tags of the
    block's tokens, and at its end the place for which they were computed.
    """

    def __init__(
        self, layout: KvGroup, shares: Sequence[KvShare], num_blocks: int, rng: random.Random, *, poison: bool
    ) -> None:
        self.layout = layout
        self.shares = tuple(shares)
        self.places = {share.rank: tuple(unit.place for unit in share.units(layout, share)) for share in shares}
        """The places of the cells that each rank stores, in the order of its memory."""
        self._num_cells = sum(map(len, self.places.values()))
        self.blocks = [self._filled(rng.getrandbits(40)) for _ in range(num_blocks)]
        self.spoiled: set[tuple[int, int]] = set()
        """The places, as (block, offset), where KV of wrong drafts lies."""
        self._rng = rng
        self._poison = poison

    def _filled(self, tag: int) -> list[list[int]]:
        return [[*(tag,) * BLOCK_SIZE, place] for place in range(self._num_cells)]

    def cell_bytes(self) -> int:
        """Return the bytes of one cell. All are equal."""
        return self.layout.block_bytes // self._num_cells

    def tags(self, block: int) -> list[int]:
        """Return the tags of a block's tokens. Where cells disagree, or are of another place, the tag is wrong."""
        cells = self.blocks[block]
        first = cells[0][:BLOCK_SIZE]
        if all(cell[:BLOCK_SIZE] == first and cell[BLOCK_SIZE] == place for place, cell in enumerate(cells)):
            return first
        if any(cell[BLOCK_SIZE] != place for place, cell in enumerate(cells)):
            return [hash((BLOCK_SIZE, tag)) & _MASK for tag in first]
        columns = list(zip(*cells, strict=True))[:BLOCK_SIZE]
        return [tags[0] if tags.count(tags[0]) == len(tags) else hash(tags) & _MASK for tags in columns]

    def write(self, rank: int, block: int, offset: int, tag: int) -> None:
        """Write the tag of one token into the cells of one rank."""
        self.spoiled.discard((block, offset))
        for place in self.places.get(rank, ()):
            cell = self.blocks[block][place]
            cell[offset], cell[BLOCK_SIZE] = tag, place

    def copy_in(self, block: int, places: Sequence[int], cells: Sequence[list[int]]) -> None:
        """Write some cells of one block."""
        self._forget(block)
        for place, cell in zip(places, cells, strict=True):
            self.blocks[block][place][:] = cell

    def sums(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksum of each block, which is the sum of those of its parts in all ranks."""
        blocks = [self.blocks[block] for block in block_ids]
        of_ranks = [
            [BlockSum(sum(hash((place, *block[place])) for place in places) & _MASK) for block in blocks]
            for places in self.places.values()
        ]
        return add_sums(*of_ranks)

    def freed(self, blocks: list[BlockId]) -> None:
        """Take note of blocks that became free."""
        for block in blocks:
            self._forget(block)
            if self._poison:
                self.blocks[block] = self._filled(self._rng.getrandbits(40))

    def spoil(self, block: int, offset: int, tag: int) -> None:
        """Write KV of a wrong draft, which nobody may read."""
        for rank in self.places:
            self.write(rank, block, offset, tag)
        self.spoiled.add((block, offset))

    def _forget(self, block: int) -> None:
        if self.spoiled:
            self.spoiled.difference_update((block, offset) for offset in range(BLOCK_SIZE))


class SimKv:
    """The memory of a KV pool, by KV group. A token has a tag in each group, which differs from group to group, so that a block
    of another group and a forgotten group are both noticed: the drawn tokens depend on all tags.

    In a group with a sliding window, each token of a slice depends only on the tags that it sees there.
    """

    def __init__(self, groups: Sequence[SimMemory], num_ranks: int, rng: random.Random) -> None:
        """Make the KV of some groups, which so many ranks store. rng: draws KV of no use."""
        self._rng = rng
        self.groups = tuple(groups)
        self.num_ranks = num_ranks
        self.no_numbers = False
        """True: the logits of every step are not finite numbers."""

    def write(self, pending: StepPlan, rank: int) -> None:
        """Let one rank write the tags of all slices. A launched step is its plan."""
        for piece in pending.slices:
            before = self._tags(piece, piece.start, piece.start)[-1:]
            tag = before[0] if before else None
            for position, token_id in enumerate(piece.token_ids, piece.start):
                tag = chain(tag, token_id)
                for group, (memory, table) in enumerate(zip(self.groups, piece.block_tables, strict=True)):
                    memory.write(rank, _not_null(table[position // BLOCK_SIZE]), position % BLOCK_SIZE, tag + group)

    def collect(self, pending: StepPlan) -> list[Sampled]:
        """End a step: return the tokens that are drawn."""
        return [drawn for piece in pending.slices for drawn in self._slice(piece)]

    def _slice(self, piece: SequenceSlice) -> list[Sampled]:
        if self.no_numbers or not piece.samples:
            return [(NO_TOKEN, None)] * len(piece.samples)
        position = piece.start + len(piece.token_ids)
        ends = range(position - len(piece.samples) + 1, position + 1)
        return [self._take(piece, end, spec) for end, spec in zip(ends, piece.samples, strict=True)]

    def _take(self, piece: SequenceSlice, end: int, spec: SampleSpec) -> Sampled:
        """Score the known token after tokens [0, end), or draw one that the mask allows."""
        tags = self._tags(piece, end, end - 1)
        if spec.scored is not None:
            return spec.scored, score(tags, spec.scored, spec.params.prompt_logprobs or 0)
        return draw_as(tags, spec)

    def spoil(self, tables: Sequence[Sequence[BlockId]], positions: Iterable[int]) -> None:
        """Write KV of wrong drafts at these positions of a sequence's block tables."""
        for position in positions:
            for memory, table in zip(self.groups, tables, strict=True):
                block = _not_null(table[position // BLOCK_SIZE])
                memory.spoil(block, position % BLOCK_SIZE, self._rng.getrandbits(40))

    def check_final(self, final: Sequence[set[BlockId]]) -> None:
        """Assert that no KV of wrong drafts lies in these blocks of each group."""
        for group, (memory, blocks) in enumerate(zip(self.groups, final, strict=True)):
            wrong = {block for block, _ in memory.spoiled} & blocks
            assert not wrong, f"blocks {sorted(wrong)} of group {group} hold KV of wrong drafts, and others may read them"

    def _tags(self, piece: SequenceSlice, end: int, query: int) -> list[int]:
        """Return the tags of tokens [0, end), as the token at position `query` sees them, without what differs between groups.

        Where groups disagree, the tag is wrong, and so is the last tag. Every model has a group without a window, which is the
        first group. Raises AssertionError when the token would see a null entry.
        """
        found = self._of_group(piece, 0, 0, end)
        for group, memory in enumerate(self.groups[1:], start=1):
            window = memory.layout.window
            first = 0 if window is None else min(end, max(0, query - window + 1))
            seen = self._of_group(piece, group, first, end)
            if seen != found[first:]:
                found[first:] = [a if a == b else hash((a, b)) & _MASK for a, b in zip(found[first:], seen, strict=True)]
                found[-1] = hash(tuple(found)) & _MASK
        return found

    def _of_group(self, piece: SequenceSlice, group: int, first: int, end: int) -> list[int]:
        """Return the tags of tokens [first, end) in one group."""
        memory, table, start = self.groups[group], piece.block_tables[group], first // BLOCK_SIZE
        blocks = list(map(_not_null, table[start : -(-end // BLOCK_SIZE)]))
        if memory.spoiled:
            read = ((block, at % BLOCK_SIZE) for at in range(first, end) for block in (table[at // BLOCK_SIZE],))
            assert not memory.spoiled.intersection(read), "KV of a wrong draft is read"
        tags = [tag - group for block in blocks for tag in memory.tags(block)]
        return tags[first - start * BLOCK_SIZE : end - start * BLOCK_SIZE]


def draw_as(tags: Sequence[int], spec: SampleSpec) -> Sampled:
    """Draw a token after tokens with these tags, one that the mask allows, with its log-probabilities."""
    params, mask, allowed = spec.params, None, list(range(VOCAB_SIZE))
    if spec.grammar is not None:
        if (mask := spec.grammar.mask()) is None:
            return NO_TOKEN, None
        allowed = [i for i in allowed if mask[i // 8] >> i % 8 & 1]
    seen = () if spec.edits is None else sorted(zip(spec.edits.seen_ids, spec.edits.output_counts, strict=True))
    token_id = draw(tags, params, spec.output_index, spec.banned_ids, allowed, seen)
    return token_id, None if params.logprobs is None else score(tags, token_id, params.logprobs)


def _not_null(block: BlockId) -> BlockId:
    """Return the block. Raises AssertionError for a null entry, which a model would read as any other block's KV."""
    assert block != NULL_BLOCK, "a block behind the window is read or written"
    return block


class SimEngine:
    """The engine of one worker. `publish` is called on the process's loop; `reached` is called when a step is about to end."""

    def __init__(
        self,
        process: Process,
        kv: SimKv,
        pool: BlockPools,
        publish: Callable[[StepEvents], None],
        reached: Callable[[str], None],
        rng: random.Random,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool,
        check_steps: bool,
        checksums: bool,
        step_s: float,
        ends: Callable[[StepPlan], bool],
        drafting: Drafting | None = None,
        told: Callable[[int, int, DraftCounts | None], None] = lambda *_: None,
    ) -> None:
        """`ends` is asked at the end of each step, and ends the process if it returns True. `drafting`: how it drafts, if it
        does. `told`: see `DraftWatch`. Other parameters are those of the scheduler."""
        self.kv = kv
        self.pool = pool
        self.scheduler = Scheduler(
            pool,
            BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            prefix_salt=CARD.fingerprint.encode() if prefix_caching else None,
        )
        self.steps = 0
        self._drafting = drafting
        self.drafts: DraftWatch | None = None
        """The watch over its drafts. None: it does not draft."""
        if drafting is not None:
            drafts_rng = random.Random(rng.getrandbits(64))
            self.drafts = DraftWatch(
                drafting, self.scheduler, drafts_rng, step_s, lambda ids, spec: draw_as(tags_of(ids), spec)[0], kv.spoil, told
            )
        self._engine = EngineSteps(
            self.scheduler,
            pool,
            [memory.sums for memory in kv.groups] if checksums else None,
            choice=None if self.drafts is None else self.drafts.choice,
        )
        self._process = process
        self._publish = publish
        self._reached = reached
        self._step_s = step_s
        self._ends = ends
        self._check_steps = check_steps
        self._commands: deque[Command] = deque()
        self._busy = False
        self._told_s = 0.0
        self._rng = rng
        self._free = free_blocks(pool)

    @property
    def seeds(self) -> list[int]:
        """The seeds of the requests that are computed."""
        return [seq.spec.sampling.seed for seq in (*self.scheduler._decoding, *self.scheduler._prefilling)]

    @property
    def num_live(self) -> int:
        """The number of sequences that are here."""
        return self.scheduler.num_live

    @property
    def published(self) -> frozenset[int]:
        """The keys of the blocks that the pool shares."""
        return frozenset(self.pool.published.held())

    def counts(self) -> BlockCounts:
        """Return the blocks of the pool by what they are used for."""
        return self.pool.counts()

    def check_invariants(self) -> None:
        """Check the invariants of the pool."""
        self.pool.check_invariants()
        if self.drafts is not None:
            self.kv.check_final(self.drafts.final_blocks())

    def snapshot(self) -> EngineSnapshot:
        """Return the present counts of blocks and sequences."""
        scheduler = self.scheduler
        counts = (scheduler.num_waiting, scheduler.queued_tokens, scheduler.num_running)
        budget = scheduler.max_num_batched_tokens
        return EngineSnapshot(
            WorkerLoad(self.pool.counts(), *counts, max_num_batched_tokens=budget, max_num_seqs=scheduler.max_num_seqs)
        )

    def submit(self, command: Command) -> None:
        """Queue a command for the next step. The loop thread calls it."""
        self._commands.append(command)
        if not self._busy:
            self._busy = True
            self._process.engine_loop.call_soon(self._begin)

    def _begin(self) -> None:
        commands = list(self._commands)
        self._commands.clear()
        plan, early = self._engine.begin(commands)
        self._settle()
        if early is not None:
            self._tell(early)
        for spec in plan.specs:
            if spec.grammar is not None:
                spec.grammar.mask()  # as the thread of the masks does, while the model runs
        if plan.slices:
            step_s = self._step_s + TOKEN_S * plan.num_tokens
            if self.drafts is not None and self._drafting is not None:
                step_s = self._step_s + self._drafting.token_s_at(self._process.timeline.now_s) * plan.num_tokens
                self.drafts.planned(plan)
                if self.drafts.model is not None:
                    step_s, self.drafts.model.took_s = step_s + self.drafts.model.took_s, 0.0
            unwritten = set(range(self.kv.num_ranks))
            for rank, written_s in enumerate(self._spread(step_s)):
                self._process.engine_loop.call_later(written_s, self._write, plan, step_s, rank, unwritten)
        else:
            self._next()

    def _spread(self, step_s: float) -> list[float]:
        """Return the time at which each rank writes its part. The slowest needs the whole step."""
        others = [self._rng.random() * step_s for _ in range(self.kv.num_ranks - 1)]
        if others:
            others.insert(self._rng.randrange(self.kv.num_ranks), step_s)
        return others or [step_s]

    def _write(self, pending: StepPlan, step_s: float, rank: int, unwritten: set[int]) -> None:
        """Let a rank write its part. The step ends when all ranks have met."""
        self.kv.write(pending, rank)
        unwritten.discard(rank)
        if not unwritten:
            self._finish(pending, step_s)

    def _finish(self, pending: StepPlan, step_s: float) -> None:
        self.steps += 1
        self._reached("engine_step")
        if not self._process.alive or self._ends(pending):
            return
        sampled = self.kv.collect(pending)
        if self.drafts is not None:
            self.drafts.drawn(pending, sampled)
        events = self._engine.finish(sampled, step_s)
        assert self.kv.no_numbers or not events.failed, f"sequences {events.failed} fail, and all logits are numbers"
        if self.drafts is not None:
            self.drafts.collected(events.tokens, self._engine._drafted)
        self._settle()
        self._tell(events)
        if (sealed := self._engine.seal()) is not None:
            self._tell(sealed)
        self._next()

    def _next(self) -> None:
        self._busy = bool(self._commands) or self._engine.has_work
        if self._busy:
            self._process.engine_loop.call_soon(self._begin)

    def _tell(self, events: StepEvents) -> None:
        """Publish events on the loop, in order and a little later, since threads wait for each other."""
        now_s = self._process.timeline.now_s
        self._told_s = max(self._told_s, now_s + self._rng.random() * HAND_OVER_S)
        self._process.loop.post(self._told_s - now_s, self._publish, events)

    def _settle(self) -> None:
        """Poison the blocks that became free, and check the scheduler's invariants. It is called between halves of a step."""
        free = free_blocks(self.pool)
        for memory, now, before in zip(self.kv.groups, free, self._free, strict=True):
            memory.freed(sorted(now - before))
        self._free = free
        if self._check_steps:
            self.scheduler.check_invariants()
            if self.drafts is not None:
                self.kv.check_final(self.drafts.final_blocks())


def free_blocks(pool: BlockPools) -> list[set[BlockId]]:
    """Return the free blocks of each KV group. Their content has no meaning."""
    return [set(group._free) for group in pool.groups]
