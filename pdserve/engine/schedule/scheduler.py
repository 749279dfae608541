"""The scheduler decides which tokens the next step computes and which sequence holds which KV block.

The module is pure: no torch, no clock, no threads.

Continuous batching: sequences join and leave between steps. Decodes go first; chunks of prompts fill the rest of the token
budget. A running sequence holds the blocks of all its known tokens from the start, so a prompt that has started can always
finish. Only decodes grow, one block at a time. When no block is free, the youngest running sequence gives all its blocks
back and is recomputed later. If blocks were reserved chunk by chunk instead, half-computed prompts could fill the pool and
wait for each other.

turns.py defines the order of service and keeps a small priority from waiting for ever. Waiting sequences are admitted
strictly in that order: when the first one does not fit, all others wait. `reserve` leaves the blocks that waiting sequences
need, so small requests never starve a big one.

A block that a step may write is freed only after that step is collected.

Sequences that begin with the same tokens share blocks: see prefix_cache.py.
"""

from __future__ import annotations

import bisect
from operator import attrgetter

from pdserve.core.block_hash import PrefixChain
from pdserve.core.blocks import BlockPool, Holder, HolderKind, Reservation
from pdserve.core.ids import SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.request_spec import RequestSpec
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
    """Plans and collects the steps of one engine. A worker's engine thread owns it.

    Every method is called between steps, except `abort`, which may be called during a step.
    """

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
        """Make a scheduler over `pool`. Asserts that the limits are positive and that the longest request fits the pool.

        At most `max_num_batched_tokens` sequences run, so that a step has a token for each of them. `prefix_salt` turns
        prefix caching on; it names everything besides the tokens that KV depends on (see `core.block_hash`).
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
        self._prompt_tokens = 0  # prompt tokens planned so far: the clock for turns
        self._steps = 0  # steps planned so far
        self._sequences: dict[SeqId, Sequence] = {}
        self._waiting: list[Sequence] = []  # by rank
        self._waiting_tokens = 0  # tokens that waiting sequences still have to compute
        # A running sequence is in exactly one of these two lists.
        self._prefilling: list[Sequence] = []  # by rank
        self._decoding: list[Sequence] = []  # by arrival, oldest first
        self._inbound: dict[SeqId, Sequence] = {}
        self._step: list[Sequence] | None = None  # the step that is planned and not yet collected
        self._decodes_planned = 0  # the first sequences of that step, which decode
        self._aborted: set[SeqId] = set()  # sequences of that step that were aborted during it
        self._admitted: list[Admitted] = []
        self._preempted: list[SeqId] = []

    # --- sequences come and go

    def add(self, seq_id: SeqId, spec: RequestSpec, *, kind: SequenceKind, resumed: tuple[int, ...] = ()) -> None:
        """Queue a sequence. It runs as soon as the pool has all blocks of its prompt at once.

        `resumed` is output that another worker drew. It follows the prompt, and the next token drawn comes after it. Blocks are
        shared only with sequences of the same `cache_salt`.
        """
        assert kind is not SequenceKind.INBOUND, "inbound sequences come through reserve"
        self._wait(self._new(seq_id, spec, kind, resumed, self.prefix.chain(spec.cache_salt)))

    def reserve(
        self, seq_id: SeqId, spec: RequestSpec, *, local_prefill: bool, resumed: tuple[int, ...] = ()
    ) -> Reservation | None:
        """Reserve blocks for a whole sequence now, or return None and hold nothing.

        The result lists the blocks of the prompt in order, then a block to grow into if the sequence can grow. Its first
        `hits` blocks hold their KV already. None means that the pool has no room beside the needs of waiting sequences, or
        that all slots are taken.

        With `local_prefill` the sequence starts to run here at once. Otherwise a peer's KV is pulled into the blocks, and
        `activate` or `abort` follows. `resumed` is that of `add`.
        """
        tokens = spec.prompt_ids + resumed
        count = self.blocks_to_reserve(len(tokens), spec.sampling, len(resumed))
        kind = SequenceKind.LOCAL if local_prefill else SequenceKind.INBOUND
        chain = self.prefix.chain(spec.cache_salt)
        # A local prefill must compute at least the last token, which gives the first logits; a pulled prompt computes none.
        hashes = self.prefix.hashes(chain, tokens, len(tokens) - 1 if local_prefill else len(tokens))
        if self.num_live >= self._max_seqs or not self._pool.fits(count, hashes, spare=self._blocks_awaited()):
            return None
        seq = self._new(seq_id, spec, kind, resumed, chain)
        holder = seq.holder if local_prefill else Holder(HolderKind.INBOUND, seq_id)
        reservation = self.prefix.take(seq, holder, count, hashes)
        if local_prefill:
            self._run(seq)
        else:
            self._inbound[seq_id] = seq
        return reservation

    def activate(self, seq_id: SeqId, first_token: int) -> None:
        """Start to decode an inbound sequence whose KV is here and whose lease is committed.

        Raises KeyError when the sequence is not inbound.
        """
        seq = self._inbound.pop(seq_id)
        self._pool.hand_over(Holder(HolderKind.INBOUND, seq_id), seq.holder)
        seq.computed = len(seq.tokens)
        self.prefix.publish(seq)
        seq.tokens.append(first_token)
        assert seq.finish_reason() is None, "a sequence that its first token ended is aborted, not activated"
        self._run(seq)

    def abort(self, seq_id: SeqId, read_in_flight: bool = False) -> None:
        """Forget a sequence in any state. An unknown id is no error, since the sequence may just have finished.

        `read_in_flight`: a transfer may still write its inbound blocks, so they stay quarantined until `end_quarantine`.
        The references of a lease stay until `return_lease`.
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
        """Free the blocks of an aborted inbound sequence: the transport has said that nothing writes them any more."""
        self._pool.end_quarantine(seq_id)

    def return_lease(self, seq_id: SeqId) -> None:
        """Drop the references of a lease that has ended. A second call does nothing."""
        self._pool.drop(Holder(HolderKind.LEASE, seq_id))

    # --- steps

    def plan(self) -> StepPlan:
        """Plan the next step. It is empty when nothing can run now; otherwise `collect` must be called before the next plan."""
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
        """Return the lent sequences admitted since the last call. Each of them now needs a lease."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def collect(self, sampled: list[Sampled]) -> StepOutcome:
        """Finish the planned step: its tokens count as computed, and every sampled token is appended to its sequence.

        sampled: one token for each slice that draws one, in the order of the slices.
        """
        assert self._step is not None, "no step was planned"
        step, self._step = self._step, None
        aborted, self._aborted = self._aborted, set()
        tokens: list[OutputToken] = []
        advanced: list[Advance] = []
        failed: list[SeqId] = []
        final: list[Final] = []
        drawn, decodes = iter(sampled), self._decodes_planned
        assert len(sampled) >= decodes, "there are fewer sampled tokens than decodes"
        for seq, token in zip(
            step[:decodes], drawn, strict=False
        ):  # zip asks for a sequence first, so it takes no token too many
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
            if seq.decoding:  # it was admitted with all but its last token computed
                self.prefix.publish(seq)
            else:
                self._prefilled(seq, advanced, drawn=last is not None)
            if last is not None:
                tokens.append(self._append(seq, last))
        assert next(drawn, None) is None, "there are more sampled tokens than slices that draw one"
        preempted, self._preempted = tuple(self._preempted), []
        return StepOutcome(tuple(tokens), tuple(advanced), preempted, tuple(failed), tuple(final))

    # --- numbers for others

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that prefill or decode."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_live(self) -> int:
        """All sequences that have a slot or wait for one: running, waiting and inbound."""
        return len(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts and of preempted sequences that must be computed before these sequences can decode."""
        return self._waiting_tokens + sum(s.remaining for s in self._prefilling)

    @property
    def has_work(self) -> bool:
        """True when `plan` would return a step now. When it is False, only a new command changes that: the engine may sleep."""
        return bool(self._decoding or self._prefilling) or self._head_fits()

    def blocks_to_reserve(self, prompt_len: int, params: SamplingParams, resumed: int = 0) -> int:
        """Return the number of blocks for the prompt, plus one to grow into unless the sequence can never need it."""
        longest = min(prompt_len - resumed + params.max_tokens, self._rule.max_model_len)
        return min(self._blocks_for(prompt_len) + 1, self._blocks_for(longest))

    def check_invariants(self) -> None:
        """Check the scheduler's lists against each other and against the pool. Raises AssertionError when they disagree."""
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
        spec: RequestSpec,
        kind: SequenceKind,
        resumed: tuple[int, ...],
        chain: PrefixChain | None,
    ) -> Sequence:
        tokens = [*spec.prompt_ids, *resumed]
        assert seq_id not in self._sequences
        assert spec.prompt_ids, "the caller refuses an empty prompt"
        assert len(resumed) < spec.sampling.max_tokens, "the caller refuses an output that is complete already"
        assert len(tokens) < self._rule.max_model_len, "the caller refuses prompts that leave no room for a token"
        self._arrivals += 1
        turn = turn_of(self._prompt_tokens, spec.priority, self._token_budget)
        seq = Sequence(seq_id, kind, tokens, spec, turn, self._arrivals, self._rule)
        seq.chain = chain
        self._sequences[seq_id] = seq
        return seq

    def _plan_decodes(self) -> list[Sequence]:
        """Return all decoding sequences, oldest first. Each that needs a block for its last token gets it.

        Sequences that are preempted for lack of blocks are left out.
        """
        size = self._block_size
        for seq in [s for s in self._decoding if len(s.tokens) > len(s.block_table) * size]:
            if seq.decoding:  # otherwise it has just been preempted for an older one
                self._grow(seq)
        return list(self._decoding)

    def _grow(self, seq: Sequence) -> None:
        """Give the sequence one more block. While the pool has none, preempt the youngest sequence, perhaps this one."""
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
        """Return (sequence, tokens) of the chunks that use up the budget, in order of rank.

        Running and newly admitted sequences are treated alike. A running sequence that was overtaken gets a chunk as well.
        """
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
        """Return the number of tokens of the next chunk.

        A chunk that does not reach the last known token ends at the end of a block, if the budget reaches one. The numbers
        of a quantised block depend on how its tokens are cut into steps, so a block should be written in one step.
        """
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
        """Remove the sequence from the list in which it waits or runs."""
        if not seq.block_table:
            self._waiting_tokens -= seq.remaining
        place = self._decoding if seq.decoding else self._prefilling if seq.block_table else self._waiting
        place.remove(seq)
        seq.decoding = False

    def _prefilled(self, seq: Sequence, advanced: list[Advance], *, drawn: bool) -> None:
        """Finish a chunk of a prefilling sequence: publish its blocks and report the advance of a lent one.

        The sequence decodes from now on when a token was drawn after the chunk, or when only its last output token is left.
        """
        self.prefix.publish(seq)
        if seq.kind is SequenceKind.LENT:
            advanced.append(Advance(seq.seq_id, seq.computed))
        if drawn or seq.decodes:
            self._prefilling.remove(seq)
            bisect.insort(self._decoding, seq, key=_ARRIVAL)
            seq.decoding = True

    def _final(self, seq: Sequence) -> Final:
        """Return the blocks of a lent sequence that became final with its last chunk."""
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
        """End a sequence whose logits are not finite numbers. Its KV may be the reason, so no other sequence may find it."""
        self.prefix.withdraw(seq)
        self._forget(seq)
        failed.append(seq.seq_id)

    def _forget(self, seq: Sequence) -> None:
        """Remove the sequence and drop its own references. This is the only place where they end for good."""
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
