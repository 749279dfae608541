"""Which tokens the next step computes, and who holds which KV block. Pure: no torch, no clock, no threads.

Continuous batching: sequences join and leave between steps. Decodes go first, then chunks of prompts fill what is
left of the token budget. Every sequence holds the blocks of all its known tokens from the moment it runs, so a
prompt that started can always finish; only decodes grow, one block at a time, and when none is free the youngest
running sequence gives all its blocks back and is recomputed later. Reserving chunk by chunk instead would let
half-computed prompts fill the pool and wait for each other.

Who is served before whom, and what keeps a small priority from waiting for ever: turns.py. Waiting is strictly in that
order: whoever is first and does not fit keeps all behind it waiting, and `reserve` leaves
what those need alone, so a big request is never starved by small ones.

A block that a step may write is freed only after that step is collected.

Sequences that begin with the same tokens share blocks: prefixes.py.
"""

from __future__ import annotations

import bisect
from operator import attrgetter

from pdserve.core.block_hash import PrefixChain
from pdserve.core.blocks import BlockPool, Holder, HolderKind, Reservation
from pdserve.core.ids import SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import NO_TOKEN, Sampled, StepPlan
from pdserve.engine.schedule.outcome import Admitted, Advance, Final, OutputToken, StepOutcome
from pdserve.engine.schedule.prefix_cache import PrefixCache
from pdserve.engine.schedule.sequence import Sequence, SequenceKind, StopRule
from pdserve.engine.schedule.turns import floor_of, overtaken, turn_of

__all__ = ["Scheduler", "SequenceKind", "Admitted", "Advance", "OutputToken", "StepOutcome"]

_RANK = attrgetter("rank")
_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Owner: a worker's engine thread. Each method runs between steps; only `abort` may come during one."""

    def __init__(
        self,
        pool: BlockPool,
        layout_block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        prefix_salt: bytes | None = None,
    ) -> None:
        """A step always has a token for every running sequence: no more run than the token budget allows.

        `prefix_salt` turns prefix caching on; it names what the KV depends on besides the tokens (see `core.prefix`).
        """
        assert 1 <= max_model_len <= pool.num_blocks * layout_block_size, "the longest request must fit an empty pool"
        assert max_num_seqs >= 1
        assert max_num_batched_tokens >= 1
        self._pool = pool
        self._block_size = layout_block_size
        self._max_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._token_budget = max_num_batched_tokens
        self._rule = StopRule(eos_token_ids, max_model_len)
        self.prefix = PrefixCache(pool, layout_block_size, prefix_salt)
        self._arrivals = 0
        self._prompt_tokens = 0  # that were planned: the clock that turns are taken by
        self._steps = 0  # likewise
        self._sequences: dict[SeqId, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._waiting_tokens = 0  # that they are to compute
        self._prefilling: list[Sequence] = []  # by rank; these and
        self._decoding: list[Sequence] = []  # by arrival, oldest first, are those that run
        self._inbound: dict[SeqId, Sequence] = {}
        self._step: list[Sequence] | None = None  # planned and not yet collected
        self._decodes_planned = 0  # its first ones
        self._aborted: set[SeqId] = set()  # during that step
        self._admitted: list[Admitted] = []
        self._preempted: list[SeqId] = []

    # --- sequences come and go

    def add(
        self,
        seq_id: SeqId,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        kind: SequenceKind,
        priority: int,
        resumed: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a sequence. It runs as soon as all its prompt's blocks can be had at once.

        Of `prompt`, the last `resumed` ids are output that was drawn elsewhere: the next one drawn has that index.
        Blocks are shared only with sequences of the same `cache_salt`.
        """
        assert kind is not SequenceKind.INBOUND, "inbound sequences come through reserve"
        self._wait(self._new(seq_id, prompt, params, kind, priority, resumed, self.prefix.chain(cache_salt)))

    def reserve(
        self,
        seq_id: SeqId,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        priority: int,
        local_prefill: bool,
        resumed: int = 0,
        cache_salt: str = "",
    ) -> Reservation | None:
        """Room for a whole sequence now or not at all: its prompt's blocks in order, then growth room if it can grow.

        The first `hits` blocks hold their KV already.

        With `local_prefill` it starts to run here at once; otherwise a peer's KV is pulled into the blocks and
        `activate` or `abort` follows. None: no room beside what waiting sequences need, or no slot; nothing is held.
        """
        count = self.blocks_to_reserve(len(prompt), params, resumed)
        kind = SequenceKind.LOCAL if local_prefill else SequenceKind.INBOUND
        chain = self.prefix.chain(cache_salt)
        # What is computed here needs its last token for the first logits; what is pulled needs none of its own.
        hashes = self.prefix.hashes(chain, prompt, len(prompt) - 1 if local_prefill else len(prompt))
        if self.num_live >= self._max_seqs or not self._pool.fits(count, hashes, spare=self._blocks_awaited()):
            return None
        seq = self._new(seq_id, prompt, params, kind, priority, resumed, chain)
        holder = seq.holder if local_prefill else Holder(HolderKind.INBOUND, seq_id)
        reservation = self.prefix.take(seq, holder, count, hashes)
        if local_prefill:
            self._run(seq)
        else:
            self._inbound[seq_id] = seq
        return reservation

    def activate(self, seq_id: SeqId, first_token: int) -> None:
        """An inbound sequence's KV is here and its lease is committed: decode it. Raises KeyError if it is not inbound."""
        seq = self._inbound.pop(seq_id)
        self._pool.hand_over(Holder(HolderKind.INBOUND, seq_id), seq.holder)
        seq.computed = len(seq.tokens)
        self.prefix.publish(seq)
        seq.tokens.append(first_token)
        assert seq.finish_reason() is None, "a sequence that its first token ended is aborted, not activated"
        self._run(seq)

    def abort(self, seq_id: SeqId, read_in_flight: bool = False) -> None:
        """Forget a sequence in whatever state; unknown ids are fine, since a sequence may just have finished.

        `read_in_flight`: a transfer may still write its inbound blocks, which stay quarantined until
        `end_quarantine`. The references of a lease stay until `return_lease`.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq_id in self._aborted:
            return
        if seq.planned:
            self._aborted.add(seq_id)
        elif self._inbound.pop(seq_id, None) is not None:
            del self._sequences[seq_id]
            if read_in_flight:
                self._pool.quarantine(seq_id)
            else:
                self._pool.drop(Holder(HolderKind.INBOUND, seq_id))
        else:
            self._forget(seq)

    def end_quarantine(self, seq_id: SeqId) -> None:
        """The transport says that nothing writes an aborted inbound sequence's blocks any more."""
        self._pool.end_quarantine(seq_id)

    def return_lease(self, seq_id: SeqId) -> None:
        """The lease over a lent sequence's blocks has ended: its references are dropped. Idempotent."""
        self._pool.drop(Holder(HolderKind.LEASE, seq_id))

    # --- steps

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing that could run now. `collect` must follow a step that is not empty."""
        assert self._step is None, "the last step was not collected"
        self._steps += 1
        step = self._plan_decodes()
        decodes = len(step)
        slices = [seq.last_slice() for seq in step]
        for seq, count in self._plan_prefills(self._token_budget - decodes):
            step.append(seq)
            slices.append(seq.next_slice(count))
        self._step, self._decodes_planned = step or None, decodes
        return StepPlan(tuple(slices), decodes)

    def take_admitted(self) -> tuple[Admitted, ...]:
        """Lent sequences admitted since the last call, each of which now needs a lease."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def collect(self, sampled: list[Sampled]) -> StepOutcome:
        """Apply the step: what was computed is final and every sampled token is appended."""
        assert self._step is not None, "no step was planned"
        step, self._step = self._step, None
        aborted, self._aborted = self._aborted, set()
        tokens: list[OutputToken] = []
        advanced: list[Advance] = []
        failed: list[SeqId] = []
        final: list[Final] = []
        drawn, decodes = iter(sampled), self._decodes_planned
        assert len(sampled) >= decodes, "a decode drew nothing"
        for seq, token in zip(step[:decodes], drawn, strict=False):  # no token is taken when the sequences are at an end
            seq.computed = computed = seq.computed + 1
            seq.planned = 0
            if aborted and seq.seq_id in aborted:
                self._forget(seq)
                continue
            if token[0] == NO_TOKEN:
                self._fail(seq, failed)
                continue
            if not computed % self._block_size:
                self.prefix.publish(seq)
            tokens.append(self._append(seq, token))
        for seq in step[decodes:]:
            seq.computed = computed = seq.computed + seq.planned
            seq.planned = 0
            last = next(drawn) if computed == len(seq.tokens) else None
            if seq.seq_id in aborted:
                self._forget(seq)
                continue
            if last is not None and last[0] == NO_TOKEN:
                self._fail(seq, failed)
                continue
            if seq.kind is SequenceKind.LENT:
                final.append(self._final(seq))
            if seq.decoding:  # admitted with all but its last token computed
                self.prefix.publish(seq)
            else:
                self._prefilled(seq, advanced, drawn=last is not None)
            if last is not None:
                tokens.append(self._append(seq, last))
        assert next(drawn, None) is None, "one token for each slice that asks for one, in their order"
        preempted, self._preempted = tuple(self._preempted), []
        return StepOutcome(tuple(tokens), tuple(advanced), preempted, tuple(failed), tuple(final))

    # --- what others may know

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_live(self) -> int:
        """Every sequence that has, or waits for, a slot: running, waiting, inbound."""
        return len(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts, and of preempted sequences, that are still to be computed before they can go on."""
        return self._waiting_tokens + sum(s.remaining for s in self._prefilling)

    @property
    def has_work(self) -> bool:
        """Whether `plan` could give a step now. False: only a new command can change that, so sleep."""
        return bool(self._decoding or self._prefilling) or self._head_fits()

    def blocks_to_reserve(self, prompt_len: int, params: SamplingParams, resumed: int = 0) -> int:
        """The prompt's blocks and one more to grow into, unless the sequence can never fill that one."""
        longest = min(prompt_len - resumed + params.max_tokens, self._rule.max_model_len)
        return min(self._blocks_for(prompt_len) + 1, self._blocks_for(longest))

    def check_invariants(self) -> None:
        """Raises AssertionError when books and pool disagree."""
        self._pool.check_invariants()
        assert self._waiting == sorted(self._waiting, key=_RANK)
        assert self._waiting_tokens == sum(s.remaining for s in self._waiting)
        assert self._prefilling == sorted(self._prefilling, key=_RANK)
        assert self._decoding == sorted(self._decoding, key=_ARRIVAL)
        placed = [*self._waiting, *self._prefilling, *self._decoding, *self._inbound.values()]
        assert sorted(s.seq_id for s in placed) == sorted(self._sequences)
        for seq in self._sequences.values():
            self._check_sequence(seq)

    # --- inside

    def _new(
        self,
        seq_id: SeqId,
        prompt: tuple[int, ...],
        params: SamplingParams,
        kind: SequenceKind,
        priority: int,
        resumed: int,
        chain: PrefixChain | None,
    ) -> Sequence:
        assert seq_id not in self._sequences
        assert 0 <= resumed < min(len(prompt), params.max_tokens), "the caller refuses an output that is complete already"
        assert 1 <= len(prompt) < self._rule.max_model_len, "the caller refuses prompts that leave no room for a token"
        self._arrivals += 1
        turn = turn_of(self._prompt_tokens, priority, self._token_budget)
        seq = Sequence(seq_id, kind, list(prompt), len(prompt) - resumed, params, turn, self._arrivals, self._rule)
        seq.chain = chain
        self._sequences[seq_id] = seq
        return seq

    def _plan_decodes(self) -> list[Sequence]:
        """Every decoding sequence that has room for its last token, or gets it: the oldest first."""
        size = self._block_size
        for seq in [s for s in self._decoding if len(s.tokens) > len(s.block_table) * size]:
            if seq.decoding:  # else it has just given its blocks to an older one
                self._grow(seq)
        return list(self._decoding)

    def _grow(self, seq: Sequence) -> None:
        """A block for the sequence's last token; if none can be had, the youngest gives up all of its own."""
        assert self._blocks_for(len(seq.tokens)) == len(seq.block_table) + 1
        while self._pool.num_allocatable < 1:
            running = (*self._decoding, *self._prefilling)
            victim = max((s for s in running if s.kind is not SequenceKind.LENT), key=_ARRIVAL)
            self._preempt(victim)
            if victim is seq:
                return
        grown = self._pool.allocate(seq.holder, 1)
        assert grown is not None
        seq.has_blocks(seq.block_table + grown)

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        self._pool.drop(seq.holder)
        seq.has_blocks(())
        seq.computed = seq.published = 0
        seq.preempted = True
        self._wait(seq)
        self._preempted.append(seq.seq_id)

    def _plan_prefills(self, budget: int) -> list[tuple[Sequence, int]]:
        """Chunks in order of rank, of running and newly admitted sequences alike, until the budget is used up. Who runs and
        was overtaken gets a chunk even so."""
        chunks: list[tuple[Sequence, int]] = []
        running = list(self._prefilling)
        before = running and self._waiting and self._waiting[0].rank < running[0].rank
        held = overtaken(running, self._waiting[0] if before else None)
        floor = floor_of(held, budget)
        while budget > floor:
            admissible = self._head_fits() and (not running or self._waiting[0].rank < running[0].rank)
            if admissible:
                seq = self._admit()
            elif running:
                seq = running.pop(0)
            else:
                break
            if seq is held:
                floor = 0
            budget -= self._take_chunk(chunks, seq, budget - floor)
        if floor and held is not None:
            self._take_chunk(chunks, held, budget)
        return chunks

    def _take_chunk(self, chunks: list[tuple[Sequence, int]], seq: Sequence, budget: int) -> int:
        count = self._chunk(seq, budget)
        chunks.append((seq, count))
        seq.served = self._steps
        self._prompt_tokens += count
        return count

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of the next chunk. One that does not end what is known ends with a block, where the budget reaches one:
        numbers of a quantised block depend on how its tokens were cut into steps, so it is written in one."""
        if seq.remaining <= budget:
            return seq.remaining
        beyond = (seq.computed + budget) % self._block_size
        return budget - beyond if beyond < budget else budget

    def _head_fits(self) -> bool:
        if not self._waiting or self.num_running + len(self._inbound) >= self._max_seqs:
            return False
        head = self._waiting[0]
        return self._pool.fits(
            self._blocks_for(len(head.tokens)), self.prefix.hashes(head.chain, head.tokens, len(head.tokens) - 1)
        )

    def _admit(self) -> Sequence:
        seq = self._waiting[0]
        self._leave(seq)
        hashes = self.prefix.hashes(seq.chain, seq.tokens, len(seq.tokens) - 1)
        blocks = self.prefix.take(seq, seq.holder, self._blocks_for(len(seq.tokens)), hashes).block_ids
        self._run(seq)
        if seq.kind is SequenceKind.LENT:
            self._pool.share(seq.holder, Holder(HolderKind.LEASE, seq.seq_id))
            self._admitted.append(Admitted(seq.seq_id, blocks))
        return seq

    # --- where a sequence stands

    def _wait(self, seq: Sequence) -> None:
        bisect.insort(self._waiting, seq, key=_RANK)
        self._waiting_tokens += seq.remaining

    def _run(self, seq: Sequence) -> None:
        seq.decoding = seq.decodes
        if seq.decoding:
            bisect.insort(self._decoding, seq, key=_ARRIVAL)
        else:
            bisect.insort(self._prefilling, seq, key=_RANK)

    def _leave(self, seq: Sequence) -> None:
        """It neither waits nor runs any more."""
        if not seq.block_table:
            self._waiting_tokens -= seq.remaining
        place = self._decoding if seq.decoding else self._prefilling if seq.block_table else self._waiting
        place.remove(seq)
        seq.decoding = False

    def _prefilled(self, seq: Sequence, advanced: list[Advance], *, drawn: bool) -> None:
        """A chunk was computed, and a token drawn after it or not: then, or if only that is left, it decodes from now on."""
        self.prefix.publish(seq)
        if seq.kind is SequenceKind.LENT:
            advanced.append(Advance(seq.seq_id, seq.computed))
        if drawn or seq.decodes:
            self._prefilling.remove(seq)
            bisect.insort(self._decoding, seq, key=_ARRIVAL)
            seq.decoding = True

    def _final(self, seq: Sequence) -> Final:
        """The blocks that its last chunk has completed."""
        ended = seq.computed == len(seq.tokens)
        blocks = self._blocks_for(seq.computed) if ended else seq.computed // self._block_size
        first, seq.final = seq.final, blocks
        return Final(seq.seq_id, first, seq.block_table[first:blocks])

    def _append(self, seq: Sequence, sampled: Sampled) -> OutputToken:
        token_id, logprobs = sampled
        index = len(seq.tokens) - seq.prompt_len
        seq.tokens.append(token_id)
        reason = seq.finish_reason()
        if reason is not None or seq.kind is SequenceKind.LENT:
            self._forget(seq)
        return OutputToken(seq.seq_id, index, token_id, reason, logprobs)

    def _fail(self, seq: Sequence, failed: list[SeqId]) -> None:
        """Its logits were not numbers, for which its KV may be the reason: nobody is to find that."""
        self.prefix.withdraw(seq)
        self._forget(seq)
        failed.append(seq.seq_id)

    def _forget(self, seq: Sequence) -> None:
        """The one place where a sequence's own references end."""
        self._pool.drop(seq.holder)
        del self._sequences[seq.seq_id]
        self._leave(seq)

    def _blocks_for(self, tokens: int) -> int:
        return ceil_div(tokens, self._block_size)

    def _blocks_awaited(self) -> int:
        return sum(self._blocks_for(len(s.tokens)) for s in self._waiting)

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq.remaining >= max(seq.planned, 1)
        assert not seq.planned or (self._step is not None and seq in self._step)
        assert not seq.decoding or seq in self._decoding
        kind = HolderKind.INBOUND if seq.seq_id in self._inbound else HolderKind.SEQUENCE
        assert self._pool.blocks_of(Holder(kind, seq.seq_id)) == seq.block_table
        assert bool(seq.block_table) == (seq not in self._waiting)
        assert seq.computed <= len(seq.block_table) * self._block_size
