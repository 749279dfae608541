"""The scheduler decides which tokens the next step computes and which sequence holds which KV block.

The module is pure: no torch, no clock, no threads.
Continuous batching: sequences join and leave between steps. Decodes go first; chunks of prompts fill the rest of the token
budget, or less of it where sequences that decode have a target for the time between tokens (see step_rates.py). A running
sequence has the blocks of all its known tokens from the start, or a promise where a group has a window (see room.py), so
a prompt that has started can always finish. Only decodes grow, one block at a time. When no block is free, the youngest running
sequence gives all its blocks back and is recomputed later. If blocks were reserved chunk by chunk without a promise,
half-computed prompts could fill the pool and wait for each other.

`Turns` defines the order of service and keeps a small priority from waiting for ever. Waiting sequences are admitted
strictly in that order: when the first one does not fit, all others wait. `reserve` leaves the blocks that waiting sequences
need, so small requests never starve a big one.

A block that a step may write is freed only after that step is collected. A block behind a sliding window, which no later
token sees, is freed then as well, while its sequence goes on. A lease keeps what its reader needs.

Sequences that begin with the same tokens share blocks: see room.py. `plan` takes guesses of next tokens (drafts). They
change how many steps an output takes, and nothing else. Drafts take only what the step leaves: tokens of the
budget, and rows that draw a token, of which a step has at most as many as there is memory for logits. Drafts preempt nobody.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import Final

from pdserve.core.block_hash import PrefixChain
from pdserve.core.block_pools import BlockPools, TableReservation
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.errors import ConfigError
from pdserve.core.ids import SeqId
from pdserve.core.kv_layout import Shortage
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import NO_DRAFTS, Drafts, Sampled, SampleSpec, StepPlan
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.drafting.api import DraftView
from pdserve.engine.schedule.collect import Admitted, Advance, Collector, OutputToken, PlannedStep, StepOutcome
from pdserve.engine.schedule.room import PrefixCache, Room
from pdserve.engine.schedule.sequence import Sequence, SequenceEvent, SequenceKind, SequenceState, StopRule, Turn, drawable
from pdserve.engine.schedule.step_rates import StepRates, chunk_budget

# The order of prompts -------------------------------------------------------------------------------------------------
#
# The order in which prompts are computed: priorities that age, turns between clients, and a floor for prompts that have begun.
# It is pure.
#
# A priority is worth time. The clock counts planned prompt tokens. A *turn* is the time at which a sequence arrived, less a
# fixed number of tokens for each level of its priority. So a larger priority overtakes earlier sequences. But a waiting
# sequence is overtaken only by those that arrive within that time, so its wait is bounded whatever others ask for.
#
# Within a priority, clients share the turns (start-time fair queueing). Each prompt has a *tag*: where the prompt before it of
# the same client ends, whatever the priorities of both are, or the virtual time if that is later. The virtual time rises with
# all computed prompt tokens, by the share of one prompt. The prompt with the smallest tag has the first turn. So 64 prompts of
# one client delay the prompt of another one by about one of them, and other priorities notice nothing of it.
#
# A running prompt that is overtaken holds blocks and mostly a lease, which a reader renews and waits for. So it goes on: a
# part of each step is kept for such prompts, which take it in turn.


STEPS_A_LEVEL: Final = 16
"""Full prompt steps that one level of priority is worth: 5 s on a CPU with a small model (512 tokens in 0.3 s), 3 s on a GPU
(8,192 tokens in 0.2 s). Then twenty levels outweigh a minute, and all two hundred levels outweigh the default deadline."""
FLOOR_SHARE: Final = 4
"""Divisor: 1 / FLOOR_SHARE of a step's prompt tokens is kept for an overtaken prompt. It makes larger priorities a third
slower, and twice as slow where a step has few units."""


KEPT_CLIENTS: Final = 1024
"""At most about so many clients are remembered. A forgotten one begins at the virtual time like a new one."""


class Turns:
    """Gives sequences their turns, in prompt tokens. Turns only move between the sequences of one priority."""

    def __init__(self, token_budget: int) -> None:
        """token_budget: tokens that one step may compute."""
        self._level = STEPS_A_LEVEL * token_budget
        self._clock = 0  # prompt tokens planned so far
        self._virtual = self._top = 0.0
        self._ends: dict[int, float] = {}  # of a client: where its last prompt ends, as a tag

    def of(self, spec: RequestSpec, arrival: int) -> Turn:
        """Return the turn of a sequence that has just arrived. `arrival` is its number."""
        return self._clock - spec.priority * self._level, arrival

    def tag(self, client: int, tokens: int) -> float:
        """Return the tag of a prompt of so many tokens. Client 0 is not known, and has no other prompts."""
        begin = max(self._virtual, self._ends.get(client, 0.0))
        if client:
            self._ends[client] = begin + tokens
            self._top = max(self._top, begin + tokens)
            if len(self._ends) > 2 * KEPT_CLIENTS:
                self._ends = dict(sorted(self._ends.items(), key=lambda item: -item[1])[:KEPT_CLIENTS])
        return begin

    def share(self, seq: Sequence, *places: list[Sequence]) -> None:
        """Tag a new sequence whose prompt is computed here, and give the turns of its priority out by tags. Preempted sequences
        come first and keep theirs. places: lists of the others, sorted by rank, and again afterwards."""
        if seq.kind is SequenceKind.INBOUND:
            return
        seq.tag = self.tag(seq.spec.client, len(seq.tokens))
        peers = [one for place in places for one in place if one.spec.priority == seq.spec.priority and not one.preemptions]
        if all(one.tag <= seq.tag for one in peers):
            return
        peers.append(seq)
        turns = sorted(one.turn for one in peers)
        for one, turn in zip(sorted(peers, key=lambda one: (one.tag, one.arrival)), turns, strict=True):
            one.turn = turn
        for place in places:
            place.sort(key=lambda one: one.rank)

    def planned(self, seq: Sequence, tokens: int, prompts: int) -> None:
        """Count tokens of a sequence that the next step computes. prompts: those that wait or run, this one included."""
        self._clock += tokens
        self._virtual = max(self._virtual, seq.tag, min(self._top, self._virtual + tokens / max(1, prompts)))


def overtaken(running: Many[Sequence], next_in: Sequence | None) -> Sequence | None:
    """Return the overtaken prompt whose last chunk is the oldest, or None. Among equals, it is the last by rank.

    A prompt is overtaken when a later turn, which a larger priority has moved, ranks before it. running: prompts that run, by
    rank. next_in: the waiting sequence that would be admitted before all of them, if any.
    """
    latest = 0 if next_in is None else next_in.turn[1]
    found: Sequence | None = None
    for seq in running:
        if seq.turn[1] < latest and (found is None or seq.served <= found.served):
            found = seq
        latest = max(latest, seq.turn[1])
    return found


def floor_of(seq: Sequence | None, budget: int, *, unit: int, steps: int) -> int:
    """Return the tokens of a step that are kept for the overtaken prompt `seq`; 0 when there is none.

    These are whole units, at least one. A step of less than two units cannot be divided, so every second one is kept whole.

    budget: tokens that the step may spend on prompts. unit: tokens that are not divided. steps: the number of the step.
    """
    if seq is None:
        return 0
    if budget < 2 * unit:
        return 0 if steps % 2 else min(seq.remaining, budget)
    return min(seq.remaining, max(unit, budget // FLOOR_SHARE // unit * unit))


__all__ = ["Scheduler", "SequenceKind", "Admitted", "Advance", "OutputToken", "StepOutcome"]

_RANK = attrgetter("rank")
_ARRIVAL = attrgetter("arrival")
_S, _E = SequenceState, SequenceEvent
_ORDER = {
    _S.WAITING: _RANK,
    _S.INBOUND: _ARRIVAL,
    _S.PREFILLING: _RANK,
    _S.DECODING: _ARRIVAL,
    _S.ABORTING: _ARRIVAL,
}
"""The order of the list of each state, smallest first. The other states have no list."""


# Steps -----------------------------------------------------------------------------------------------------------


class Scheduler:
    """Plans and collects the steps of one engine. A worker's engine thread owns it.

    Every method is called between steps, except `abort`, which may be called during a step.
    """

    def __init__(
        self,
        pool: BlockPools,
        layout_block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        prefix_salt: bytes | None = None,
        drafts_obstacle: str | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Make a scheduler over `pool`. Asserts that the limits are positive and that the longest request fits the pool.

        At most `max_num_batched_tokens` sequences run, so that a step has a token for each of them. `prefix_salt` turns
        prefix caching on; it names everything besides the tokens that KV depends on (see `core.block_hash`).
        `drafts_obstacle`: the reason, in words, why this engine cannot take drafts; None when it can. `max_drafts`: a step may
        draw after so many rows more than sequences may run.
        """
        longest = pool.longest_table
        assert longest is None or max_model_len <= longest * layout_block_size, "it must fit an empty pool"
        assert max_model_len >= 1
        assert min(max_num_seqs, max_num_batched_tokens) >= 1
        self._pool = pool
        self._block_size = layout_block_size
        self._max_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_rows = self._max_seqs + max_drafts
        self.max_num_seqs = self._max_seqs
        """The largest number of sequences that may run now, never more than there is memory for. More of them run for a while
        after it was lowered. Only `set_max_num_seqs` changes it."""
        self._largest_step = max_num_batched_tokens
        self.max_num_batched_tokens = max_num_batched_tokens
        """The largest number of tokens that a step may have now. Only `set_budget` changes it."""
        self._targets = 0  # sequences that have a target for the time between tokens
        self._rule = StopRule(eos_token_ids, max_model_len)
        self.prefix = PrefixCache(pool, layout_block_size, prefix_salt)
        self._room = Room(pool, self.prefix, layout_block_size, max_num_batched_tokens)
        self.rates = StepRates()
        self.shortage: Shortage | None = None  # the KV group that had no room when `reserve` was last asked
        self._arrivals = 0
        self._turns = Turns(max_num_batched_tokens)
        self._steps = 0  # steps planned so far
        self._sequences: dict[SeqId, Sequence] = {}
        # A sequence is in the list of its state, and in no other one: only `_move` changes these lists.
        self._places: dict[SequenceState, list[Sequence]] = {state: [] for state in _ORDER}
        self._waiting = self._places[_S.WAITING]
        self._prefilling = self._places[_S.PREFILLING]
        self._decoding = self._places[_S.DECODING]
        self._aborting = self._places[_S.ABORTING]
        self._waiting_tokens = 0  # tokens that waiting sequences still have to compute
        self._step: PlannedStep | None = None  # the step that is planned and not yet collected
        self.step_tokens = (0, 0)
        """The prompt tokens and the other tokens of the last planned step."""
        self._collector = Collector(self.prefix, layout_block_size, self._move, self._forget)
        self._drafts_obstacle = drafts_obstacle
        self.ended: Callable[[SeqId, list[int], bytes], None] | None = None
        """It is called with each sequence that ends: its id, its tokens, and its group of those that may learn from them."""
        self._admitted: list[Admitted] = []
        self._preempted: list[SeqId] = []

    # --- sequences come and go

    def add(
        self,
        seq_id: SeqId,
        spec: RequestSpec,
        *,
        kind: SequenceKind,
        resumed: tuple[int, ...] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """Queue a sequence. It runs as soon as the pool has all blocks of its prompt at once.

        `resumed` is output that another worker drew. It follows the prompt, and the next token drawn comes after it. Blocks are
        shared only with sequences of the same `cache_salt`. `grammar`: the output follows it.
        """
        assert kind is not SequenceKind.INBOUND, "inbound sequences come through reserve"
        self._move(self._new(seq_id, spec, kind, resumed, self.prefix.chain_to_compute(spec, resumed), grammar), _E.QUEUED)

    def reserve(
        self,
        seq_id: SeqId,
        spec: RequestSpec,
        *,
        local_prefill: bool,
        resumed: tuple[int, ...] = (),
        grammar: GrammarState | None = None,
    ) -> TableReservation | None:
        """Reserve blocks for a whole sequence now, or return None and hold nothing.

        The result lists the blocks of the prompt in order, for each KV group, and then a block to grow into if the sequence
        can grow. Its first `hits` blocks hold their KV already; blocks that are dead once a peer's KV is here are null. None
        means that the pool has no room beside the needs of waiting sequences, or that all slots are taken.

        With `local_prefill` the sequence starts to run here at once. Otherwise a peer's KV is pulled into the blocks, and
        `activate` or `abort` follows. `resumed` and `grammar` are those of `add`.
        """
        tokens = spec.prompt_ids + resumed
        count = self.blocks_to_reserve(len(tokens), spec.sampling, len(resumed))
        kind = SequenceKind.LOCAL if local_prefill else SequenceKind.INBOUND
        chain = self.prefix.chain_to_compute(spec, resumed) if local_prefill else self.prefix.chain(spec.cache_salt)
        # A local prefill must compute at least the last token, which gives the first logits; a pulled prompt computes none.
        limit, arriving = (len(tokens) - 1, 0) if local_prefill else (len(tokens), len(tokens))
        hashes = self.prefix.hashes(chain, tokens, limit)
        spare, prefill = self._room.awaited(self._waiting), self._room.prefill(len(tokens), kind) if local_prefill else None
        self.shortage = self._pool.shortage(count, hashes, spare=spare, arriving=arriving, prefill=prefill)
        if self.num_live >= self.max_num_seqs or self.shortage is not None:
            return None
        seq = self._new(seq_id, spec, kind, resumed, chain, grammar)
        holder = seq.holder if local_prefill else Holder(HolderKind.INBOUND, seq_id)
        reservation = self.prefix.take(seq, holder, count, hashes, arriving=arriving, prefill=prefill)
        self._move(seq, _E.RESERVED_LOCAL if local_prefill else _E.RESERVED_INBOUND)
        if local_prefill:
            self._skip_prefill(seq)
        return reservation

    def activate(self, seq_id: SeqId, first_token: int) -> None:
        """Start to decode an inbound sequence whose KV is here and whose lease is committed.

        Raises KeyError when there is no such sequence, and `IllegalTransition` when it is not inbound.
        """
        seq = self._sequences[seq_id]
        self._move(seq, _E.ACTIVATED)
        self._pool.hand_over(Holder(HolderKind.INBOUND, seq_id), seq.holder)
        seq.computed = len(seq.tokens)
        self.prefix.publish(seq)
        seq.tokens.append(first_token)
        assert seq.finish_reason() is None, "a sequence that its first token ended is aborted, not activated"

    def abort(self, seq_id: SeqId, read_in_flight: bool = False) -> None:
        """Forget a sequence in any state. An unknown id is no error, since the sequence may just have finished.

        `read_in_flight`: a transfer may still write its inbound blocks, so they stay quarantined until `end_quarantine`.
        The references of a lease stay until `return_lease`.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        if seq.planned:
            self._move(seq, _E.ABORTED_IN_STEP)
        elif seq.state is not _S.INBOUND:
            self._forget(seq, _E.ABORTED)
        else:
            self._end(seq, _E.ABORTED)
            if read_in_flight:
                self._pool.quarantine(seq_id)
            else:
                self._pool.drop(Holder(HolderKind.INBOUND, seq_id))

    def end_quarantine(self, seq_id: SeqId) -> None:
        """Free the blocks of an aborted inbound sequence: the transport has said that nothing writes them any more."""
        self._pool.end_quarantine(seq_id)

    def return_lease(self, seq_id: SeqId) -> None:
        """Drop the references of a lease that has ended. A second call does nothing."""
        self._pool.drop(Holder(HolderKind.LEASE, seq_id))

    # --- steps

    def plan(self, drafts: Drafts = NO_DRAFTS) -> StepPlan:
        """Plan the next step. It is empty when nothing can run now; otherwise `collect` must be called before the next plan.

        drafts: guesses of the next tokens of decoding sequences. The step computes as many of them as it can without harm to
        others (see `take_drafts`); the rest and those of other sequences are ignored. Raises `ConfigError` for drafts that
        this engine cannot take.
        """
        assert self._step is None, "the last step was not collected"
        self._steps += 1
        step = self._plan_decodes()
        chunks = self._plan_prefills(*self._prompt_share(step)) if self._prefilling or self._waiting else []
        taken = self._plan_drafts(step, chunks, drafts) if drafts else {}
        if taken:
            step.sort(key=lambda seq: seq.seq_id in taken)
        decodes = len(step) - len(taken)
        decode_tokens, chunk_tokens = decodes, 0
        slices = list(map(Sequence.last_slice, step[:decodes]))
        for seq in step[decodes:]:
            slices.append(seq.drafted_slice(*taken[seq.seq_id]))
            decode_tokens += len(slices[-1].token_ids)
        for seq, count in chunks:
            step.append(seq)
            slices.append(seq.next_slice(count))
            chunk_tokens += count
        self.step_tokens = (chunk_tokens, decode_tokens)
        self._step = PlannedStep(step, decodes, tuple([drafts for drafts, _ in taken.values()])) if step else None
        return StepPlan(tuple(slices), decodes)

    # --- what a choice of drafts needs to know

    @property
    def next_rows(self) -> tuple[int, int, int]:
        """The number of decoding sequences, of the prompt tokens that the next step will compute beside them, about, and of the
        drafts for which it has room."""
        decoding = len(self._decoding)
        left = self.max_num_batched_tokens - decoding
        prompt_tokens = min(left, self.queued_tokens)
        return decoding, prompt_tokens, min(left - prompt_tokens, self._max_rows - decoding - len(self._prefilling))

    def draft_views(self, most: int) -> list[DraftView]:
        """Return the decoding sequences that may have drafts, at most `most` each."""
        return [seq.draft_view(min(most, seq.most_drafts)) for seq in self._decoding if seq.most_drafts > 0]

    def with_blocks(self, view: DraftView) -> DraftView | None:
        """Return the view with blocks for its drafts, or for fewer, of those that nobody else may need. None: there are no
        such blocks."""
        seq = self._sequences[view.seq_id]
        if seq.taken is not None or len(seq.tokens) > seq.num_blocks * self._block_size:  # its next token has no block yet
            return None
        most = self._room_for_drafts(seq, view.most)
        return view._replace(most=most, block_tables=seq.block_tables) if most > 0 else None

    def take_admitted(self) -> tuple[Admitted, ...]:
        """Return the lent sequences admitted since the last call. Each of them now needs a lease."""
        admitted, self._admitted = tuple(self._admitted), []
        return admitted

    def collect(self, sampled: list[Sampled]) -> StepOutcome:
        """Finish the planned step: its tokens count as computed, and every accepted token is appended to its sequence.

        sampled: one token for each sample of the plan, in the order of the slices.
        """
        assert self._step is not None, "no step was planned"
        step, self._step = self._step, None
        preempted, self._preempted = tuple(self._preempted), []
        return self._collector.collect(step, sampled, preempted, aborting=bool(self._aborting))

    def set_budget(self, tokens: int) -> None:
        """Let each step from now on have at most so many tokens. What a priority is worth does not change.

        Asserts that a step has a token for each sequence that may run, and that there is memory for it.
        """
        assert self._max_seqs <= tokens <= self._largest_step
        self.max_num_batched_tokens = tokens

    def set_max_num_seqs(self, count: int) -> None:
        """Let at most so many sequences run from now on. Those that run already go on, and new ones wait until fewer are left.

        Asserts that there is memory for so many.
        """
        assert 1 <= count <= self._max_seqs
        self.max_num_seqs = count

    def took(self, step_s: float) -> None:
        """Learn the time of the last planned step, in seconds."""
        self.rates.add(*self.step_tokens, step_s)

    # --- numbers for others

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that prefill or decode, also those that were aborted during the step under way."""
        return len(self._prefilling) + len(self._decoding) + len(self._aborting)

    @property
    def num_live(self) -> int:
        """All sequences that have a slot or wait for one: running, waiting and inbound."""
        return len(self._sequences)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts and of preempted sequences that must be computed before these sequences can decode."""
        return self._waiting_tokens + (sum([seq.remaining for seq in self._prefilling]) if self._prefilling else 0)

    @property
    def has_work(self) -> bool:
        """True when `plan` would return a step now. When it is False, only a new command changes that: the engine may sleep."""
        return bool(self._decoding or self._prefilling) or self._head_fits()

    def blocks_to_reserve(self, prompt_len: int, params: SamplingParams, resumed: int = 0) -> int:
        """Return the number of blocks for the prompt, plus one to grow into unless the sequence can never need it."""
        longest = min(prompt_len - resumed + params.max_tokens, self._rule.max_model_len)
        return min(self._room.blocks_for(prompt_len) + 1, self._room.blocks_for(longest))

    def check_invariants(self) -> None:
        """Check the scheduler's lists against each other and against the pool. Raises AssertionError when they disagree."""
        self._pool.check_invariants()
        assert self._waiting_tokens == sum(s.remaining for s in self._waiting)
        assert self._targets == sum(s.spec.tpot_s > 0.0 for s in self._sequences.values())
        for state, place in self._places.items():
            assert place == sorted(place, key=_ORDER[state])
            assert all(seq.state is state for seq in place)
        placed = [seq.seq_id for place in self._places.values() for seq in place]
        assert sorted(placed) == sorted(self._sequences)
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
        grammar: GrammarState | None,
    ) -> Sequence:
        tokens = [*spec.prompt_ids, *resumed]
        assert seq_id not in self._sequences
        assert spec.prompt_ids, "the caller refuses an empty prompt"
        assert len(resumed) < spec.sampling.max_tokens, "the caller refuses an output that is complete already"
        assert len(tokens) < self._rule.max_model_len, "the caller refuses prompts that leave no room for a token"
        self._arrivals += 1
        turn = self._turns.of(spec, self._arrivals)
        seq = Sequence(seq_id, kind, tokens, spec, turn, self._arrivals, self._rule, chain=chain)
        if grammar is not None:
            seq.constrain(grammar)
        self._turns.share(seq, self._waiting, self._prefilling)
        self._sequences[seq_id] = seq
        self._targets += spec.tpot_s > 0.0
        return seq

    def _plan_decodes(self) -> list[Sequence]:
        """Return all decoding sequences, oldest first. Each that needs a block for its last token gets it.

        Sequences that are preempted for lack of blocks are left out.
        """
        size = self._block_size
        if self._room.windowed:
            self._room.complete(self._decoding)
        for seq in list(self._decoding):
            if len(seq.tokens) > seq.num_blocks * size and seq.state is _S.DECODING:  # not just preempted for an older one
                self._grow(seq)
        return list(self._decoding)

    def _plan_drafts(self, decoding: list[Sequence], chunks: list[tuple[Sequence, int]], drafts: Drafts) -> dict[SeqId, Taken]:
        if self._drafts_obstacle is not None:
            raise ConfigError(f"this engine takes no drafts: {self._drafts_obstacle}")
        tokens = self.max_num_batched_tokens - len(decoding) - sum(count for _, count in chunks)
        return take_drafts(drafts, decoding, min(tokens, self._max_rows - len(decoding) - len(chunks)), self._room_for_drafts)

    def _room_for_drafts(self, seq: Sequence, count: int) -> int:
        """Return how many of `count` drafts the sequence's blocks hold, after it grew by blocks that nobody else may need.

        A block stays free for each running sequence, and all blocks that waiting sequences need.
        """
        missing = self._room.blocks_for(len(seq.tokens) + count) - seq.num_blocks
        running = self.num_running
        if missing > 0 and self._pool.leaves(missing, [n + running for n in self._room.awaited(self._waiting)]):
            self._take_blocks(seq, missing)
        return min(count, seq.num_blocks * self._block_size - len(seq.tokens))

    def _grow(self, seq: Sequence) -> None:
        """Give the sequence one more block. While the pool has none, preempt the youngest sequence, perhaps this one."""
        assert self._room.blocks_for(len(seq.tokens)) == seq.num_blocks + 1
        while self._pool.num_allocatable < 1:
            running = (*self._decoding, *self._prefilling)
            victim = max((s for s in running if s.kind is not SequenceKind.LENT), key=_ARRIVAL)
            self._preempt(victim)
            if victim is seq:
                return
        self._take_blocks(seq, 1)

    def _take_blocks(self, seq: Sequence, count: int) -> None:
        """Give a sequence `count` more blocks in each group. The caller has checked that the pools have them."""
        grown = self._pool.allocate(seq.holder, count)
        assert grown is not None
        seq.grow(grown)

    def _preempt(self, seq: Sequence) -> None:
        self._pool.drop(seq.holder)
        seq.has_blocks(())
        seq.computed, seq.published, seq.taken = 0, 0, None
        self._move(seq, _E.PREEMPTED)
        self._preempted.append(seq.seq_id)

    def _prompt_share(self, decoding: list[Sequence]) -> tuple[int, int]:
        """Return the tokens that the step may spend on prompts, and the unit in which they share them. The tightest target of
        the decoding sequences bounds them, and such a share, which may be a single block, is given out in whole blocks."""
        left = self.max_num_batched_tokens - len(decoding)
        if not self._targets or not (self._prefilling or self._waiting):
            return left, 1
        target_s = min([seq.spec.tpot_s for seq in decoding if seq.spec.tpot_s > 0.0], default=0.0)
        target_s /= self.rates.strain
        share = chunk_budget(target_s, self.rates.cost, decodes=len(decoding), floor=self._block_size, ceiling=left)
        return share, self._block_size if target_s else 1

    def _plan_prefills(self, budget: int, unit: int) -> list[tuple[Sequence, int]]:
        """Return (sequence, tokens) of the chunks that use up the budget, in order of rank.

        Running and newly admitted sequences are treated alike. A running sequence that was overtaken gets a chunk as well.
        `unit`: what is left of the budget is not used where it would cut a unit of a further prompt.
        """
        chunks: list[tuple[Sequence, int]] = []
        running = list(self._prefilling)
        before = running and self._waiting and self._waiting[0].rank < running[0].rank
        held = overtaken(running, self._waiting[0] if before else None)
        floor = floor_of(held, budget, unit=unit, steps=self._steps)
        while budget > floor:
            admissible = self._head_fits() and (not running or self._waiting[0].rank < running[0].rank)
            if admissible:
                seq = self._admit()
            elif running:
                seq = running.pop(0)
            else:
                break
            if seq.scores is not None and any(one.scores is not None for one, _ in chunks):
                continue  # a step scores one prompt, and one that was overtaken
            if seq is held:
                floor = 0
            if (chunks or floor) and seq.cuts(unit, self._room.chunk(seq, budget - floor)):
                break
            budget -= self._take_chunk(chunks, seq, budget - floor)
        if floor and held is not None:
            self._take_chunk(chunks, held, budget)
        return chunks

    def _take_chunk(self, chunks: list[tuple[Sequence, int]], seq: Sequence, budget: int) -> int:
        count = self._room.chunk(seq, budget)
        self._room.take(seq, count)
        chunks.append((seq, count))
        seq.served = self._steps
        self._turns.planned(seq, count, len(self._prefilling) + len(self._waiting))
        return count

    def _head_fits(self) -> bool:
        if not self._waiting or self.num_running + len(self._places[_S.INBOUND]) >= self.max_num_seqs:
            return False
        return self._room.fits(self._waiting[0])

    def _admit(self) -> Sequence:
        self._move(seq := self._waiting[0], _E.ADMITTED)
        hashes, tokens = self.prefix.hashes(seq.chain, seq.tokens, len(seq.tokens) - 1), len(seq.tokens)
        prefill = self._room.prefill(tokens, seq.kind)
        hits = self.prefix.take(seq, seq.holder, self._room.blocks_for(tokens), hashes, prefill=prefill).hits
        self._skip_prefill(seq)
        if seq.kind is SequenceKind.LENT:
            lent = self._pool.share(seq.holder, Holder(HolderKind.LEASE, seq.seq_id), len(seq.tokens))
            self._admitted.append(Admitted(seq.seq_id, lent, hits))
        return seq

    def _skip_prefill(self, seq: Sequence) -> None:
        """Let a sequence decode at once if only its last output token is left to compute."""
        if seq.decodes:
            self._room.take(seq, 1)
            self._move(seq, _E.PREFILLED)

    # --- where a sequence stands

    def _move(self, seq: Sequence, event: SequenceEvent) -> None:
        """Change the sequence's state as the table says, and put it into the list of its new state."""
        source, target = seq.state, seq.move(event)
        if target is source:
            return
        if source in self._places:
            self._places[source].remove(seq)
        if target in self._places:
            bisect.insort(self._places[target], seq, key=_ORDER[target])
        if source is _S.WAITING:
            self._waiting_tokens -= seq.remaining
        if target is _S.WAITING:
            self._waiting_tokens += seq.remaining

    def _forget(self, seq: Sequence, event: SequenceEvent) -> None:
        """End the sequence and drop its own references."""
        self._pool.drop(seq.holder)
        self._end(seq, event)

    def _end(self, seq: Sequence, event: SequenceEvent) -> None:
        """End the sequence. This is the only place where sequences end for good."""
        self._move(seq, event)
        self._targets -= seq.spec.tpot_s > 0.0
        del self._sequences[seq.seq_id]
        if self.ended is not None:
            self.ended(seq.seq_id, seq.tokens, seq.group)

    def _check_sequence(self, seq: Sequence) -> None:
        assert seq.remaining >= max(seq.planned, 1)
        assert not seq.planned or (self._step is not None and seq in self._step.sequences)
        assert seq.planned or seq.state is not _S.ABORTING
        assert seq.decodes or seq.state is not _S.DECODING
        self._room.check(seq)


Taken = tuple[tuple[int, ...], tuple[SampleSpec, ...]]
"""The drafts of a sequence that a step computes, and the draws of their slice."""


def take_drafts(drafts: Drafts, decoding: Many[Sequence], room: int, fit: Callable[[Sequence, int], int]) -> dict[SeqId, Taken]:
    """Return the drafts that the step computes. Sequences without drafts are left out. The order is that of `decoding`.

    room: the largest number of drafts of all sequences together. fit: takes a sequence and a number of drafts, and returns how
    many of them the sequence's blocks can hold. A sequence gets at most `most_drafts`, and none that nothing may follow.
    """
    taken: dict[SeqId, Taken] = {}
    for seq in decoding:
        wanted = drafts.get(seq.seq_id, ())[: max(0, min(room, seq.most_drafts))]
        if not wanted:
            continue
        kept, samples = drawable(seq, wanted[: fit(seq, len(wanted))])
        if kept:
            taken[seq.seq_id] = kept, samples
            room -= len(kept)
    return taken
