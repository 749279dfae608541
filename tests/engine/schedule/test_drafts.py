"""Drafts change how many steps an output takes, and nothing else."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NULL_BLOCK, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.speculation import DraftCounts
from pdserve.core.step_plan import GREEDY, NO_TOKEN, Sampled, SampleSpec, SequenceSlice, StepPlan, accept
from pdserve.engine.schedule.collect import OutputToken, StepOutcome, Verified
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

BLOCK, EOS, VOCAB = 4, 3, 13
Requests = list[tuple[tuple[int, ...], SamplingParams]]


class Words:
    """A grammar whose output is words of three tokens: each token is larger than the one before it. It ends after some words,
    and cannot go on after token 12."""

    failure: str | None = None

    def __init__(self, words: int, taken: tuple[int, ...] = ()) -> None:
        self._words = words
        self.taken = taken

    @property
    def ended(self) -> bool:
        return len(self.taken) == 3 * self._words

    def catch_up(self, tokens: list[int], prompt_len: int) -> None:
        for token_id in tokens[prompt_len + len(self.taken) :]:
            assert self._allows(token_id)
            self.taken += (token_id,)

    def after(self, token_id: int) -> Words | None:
        return Words(self._words, (*self.taken, token_id)) if self._allows(token_id) else None

    def forced(self) -> tuple[int, ...]:
        return ()

    def mask(self) -> bytes | None:
        allowed = sum(1 << token_id for token_id in range(VOCAB) if self._allows(token_id))
        self.failure = None if allowed else "there is no larger token"
        return allowed.to_bytes(2, "little") if allowed else None

    def _allows(self, token_id: int) -> bool:
        return len(self.taken) % 3 == 0 or token_id > self.taken[-1]


def make(*, blocks: int = 64, seqs: int = 16, budget: int = 32, limit: int = 64, obstacle: str | None = None) -> Scheduler:
    return Scheduler(
        BlockPools(blocks), BLOCK, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=limit, eos_token_ids=(EOS,),
        prefix_salt=b"model", drafts_obstacle=obstacle,
    )  # fmt: skip


def model(tokens: tuple[int, ...], spec: SampleSpec) -> int:
    """A draw that depends on all tokens, and on seed, index, edits, bans and grammar as those of the sampler do."""
    edits = spec.edits and (spec.edits.seen_ids.tolist(), spec.edits.output_counts.tolist())
    seed = 0 if spec is GREEDY else zlib.crc32(repr((spec.params.seed, spec.output_index, edits)).encode())
    mask = (1 << VOCAB) - 1 if spec.grammar is None else int.from_bytes(spec.grammar.mask() or b"", "little")
    if not mask:
        return NO_TOKEN
    token_id = zlib.crc32(bytes(tokens), seed) % VOCAB
    while token_id in spec.banned_ids or not mask >> token_id & 1:
        token_id = (token_id + 1) % VOCAB
    return token_id


class Play:
    """One scheduler and its outputs. `known` holds the prompt and the output of each sequence."""

    def __init__(self, requests: Requests, **sizes: int) -> None:
        self.scheduler = make(**sizes)
        self.known: dict[SeqId, list[int]] = {}
        self.reasons: dict[SeqId, FinishReason | None] = {}
        self.preempted = 0
        self.failed: set[tuple[SeqId, str]] = set()
        for i, (prompt, params) in enumerate(requests):
            grammar = Words(params.max_tokens // 4) if params.seed % 3 == 2 and not params.min_tokens else None
            self.scheduler.add(SeqId(i), RequestSpec(prompt, params), kind=SequenceKind.LOCAL, grammar=grammar)
            self.known[SeqId(i)] = list(prompt)

    def step(self, guess: Callable[[SeqId, int], tuple[int, ...]]) -> StepPlan:
        drafts = {seq_id: guess(seq_id, len(tokens)) for seq_id, tokens in self.known.items()}
        plan = self.scheduler.plan(drafts)
        self.scheduler.check_invariants()
        outcome = self.scheduler.collect([(token_id, None) for piece in plan.slices for token_id in self._draw(piece)])
        self.scheduler.check_invariants()
        self.preempted += len(outcome.preempted)
        self.failed |= set(outcome.grammars_failed)
        assert not outcome.failed
        for token in outcome.tokens:
            self.known[token.seq_id].append(token.token_id)
            self.reasons[token.seq_id] = token.finish_reason
        return plan

    def _draw(self, piece: SequenceSlice) -> list[int]:
        tokens = (*self.known[piece.seq_id][: piece.start], *piece.token_ids)
        first = len(tokens) - len(piece.samples) + 1
        return [model(tokens[: first + i], spec) for i, spec in enumerate(piece.samples)]

    def run(self, guess: Callable[[SeqId, int], tuple[int, ...]] = lambda *_: ()) -> Play:
        while self.scheduler.has_work:
            self.step(guess)
        return self


def oracle(play: Play, errors: random.Random, wrong: float, most: int) -> Callable[[SeqId, int], tuple[int, ...]]:
    """Guess up to `most` tokens of the output that `play` has found; a share of `wrong` is replaced."""

    def guess(seq_id: SeqId, known: int) -> tuple[int, ...]:
        right = (play.known[seq_id] + [0] * most)[known : known + errors.randint(0, most)]
        return tuple((token + (errors.random() < wrong)) % VOCAB for token in right)

    return guess


@st.composite
def workloads(draw: st.DrawFn) -> Requests:
    requests = []
    for seed in range(draw(st.integers(1, 6))):
        prompt = (1,) * draw(st.sampled_from([1, 3, 4, 8, 9])) + draw(st.sampled_from([(), (2,), (5, 6)]))
        least = draw(st.integers(0, 6))
        temperature = draw(st.sampled_from([0.0, 1.0]))
        most = least + draw(st.integers(1, 24))
        stops = draw(st.sampled_from([(), (5,)]))
        penalty, bias = draw(st.sampled_from([(0.0, ()), (0.0, ((7, 3.0),)), (1.0, ())]))
        params = SamplingParams(
            max_tokens=most, min_tokens=least, temperature=temperature, seed=seed, stop_token_ids=stops,
            presence_penalty=penalty, logit_bias=bias,
        )  # fmt: skip
        requests.append((prompt, params))
    return requests


@given(workloads(), st.sampled_from([0.0, 0.2, 1.0]), st.integers(1, 9), st.integers(10, 64), st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_drafts_change_no_output_no_reason_and_no_block_that_stays(requests, wrong, most, blocks, seed):
    """A small pool preempts; then blocks are evicted at other times, so only a large one has the same cached blocks."""
    sizes = {"blocks": blocks, "seqs": 4, "budget": 12, "limit": 40}
    plain = Play(requests, **sizes).run()
    drafted = Play(requests, **sizes).run(oracle(plain, random.Random(seed), wrong, most))
    assert drafted.known == plain.known
    assert drafted.reasons == plain.reasons
    assert drafted.failed == plain.failed
    counts = [play.scheduler._pool.counts() for play in (plain, drafted)]
    assert all(one.held == one.quarantined == 0 for one in counts)
    if blocks == 64:
        assert counts[0] == counts[1]


def decoding(*, length: int = 5, sizes: dict[str, int] | None = None, **params: object) -> Scheduler:
    """A scheduler with one sequence after its prompt: `length` tokens are known, the last of them not computed."""
    scheduler = make(**(sizes or {}))
    scheduler.add(SeqId(1), RequestSpec((1,) * (length - 1), SamplingParams(**params)), kind=SequenceKind.LOCAL)  # type: ignore[arg-type]
    scheduler.plan()
    scheduler.collect([(7, None)])
    return scheduler


def drawn(scheduler: Scheduler, drafts: tuple[int, ...], tokens: list[int]) -> StepOutcome:
    plan = scheduler.plan({SeqId(1): drafts})
    outcome = scheduler.collect([(token_id, None) for token_id in tokens[: len(plan.specs)]])
    scheduler.check_invariants()
    return outcome


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(-1, 2), min_size=7, max_size=7))
def test_the_rule_is_the_loop_of_single_steps(drafts, truth):
    """truth[i] is drawn after right drafts only; a row behind a wrong draft has some other token."""
    rows: list[Sampled] = [(truth[i] if drafts[:i] == truth[:i] else 99, None) for i in range(len(drafts) + 1)]
    expected = [truth[0]]
    while len(expected) <= len(drafts) and drafts[: len(expected)] == expected:
        expected.append(truth[len(expected)])
    assert [token_id for token_id, _ in accept(tuple(drafts), rows)] == expected


def test_right_drafts_give_one_token_more_than_there_are_drafts():
    scheduler = decoding(max_tokens=20)
    plan = scheduler.plan({SeqId(1): (8, 9)})
    assert [(s.start, s.token_ids, len(s.samples)) for s in plan.slices] == [(4, (7, 8, 9), 3)]
    assert plan.decodes == 0
    assert plan.sampled_rows == [0, 1, 2]
    outcome = scheduler.collect([(8, None), (9, None), (10, None)])
    counts = DraftCounts(1, 2, 2, (1, 1))
    assert outcome.tokens == tuple(OutputToken(SeqId(1), i, i + 7, None, speculation=counts) for i in (1, 2, 3))
    assert [(s.start, s.token_ids) for s in scheduler.plan().slices] == [(7, (10,))]


def test_a_wrong_draft_is_computed_again_with_the_right_token():
    scheduler = decoding(max_tokens=20)
    assert [t.token_id for t in drawn(scheduler, (8, 9), [8, 11, 12]).tokens] == [8, 11]
    assert [(s.start, s.token_ids) for s in scheduler.plan().slices] == [(6, (11,))]


def test_drafts_end_before_a_stop_token():
    """No token may follow it, so its row is of no use. It is drawn after the draft before it."""
    scheduler = decoding(max_tokens=20)
    tokens = drawn(scheduler, (8, EOS, 9), [8, EOS, 9, 10]).tokens
    assert [(t.token_id, t.finish_reason) for t in tokens] == [(8, None), (EOS, FinishReason.STOP)]
    assert scheduler.num_live == 0


def test_every_row_has_the_index_and_the_bans_of_its_own_token():
    scheduler = decoding(max_tokens=20, min_tokens=3, temperature=1.0, seed=5)
    (piece,) = scheduler.plan({SeqId(1): (8, 9)}).slices
    assert [(spec.output_index, spec.banned_ids) for spec in piece.samples] == [(1, (EOS,)), (2, (EOS,)), (3, ())]


def test_drafts_end_before_the_last_token_that_can_be_drawn():
    scheduler = decoding(max_tokens=4)
    plan = scheduler.plan({SeqId(1): (8,) * 9})
    assert len(plan.specs) == 3, "one token is out, and three are left"


@pytest.mark.parametrize(("sizes", "room"), [({"budget": 4}, 3), ({"seqs": 3}, 2), ({"seqs": 1}, 0)])
def test_drafts_take_what_the_step_leaves(sizes, room):
    """A step draws at most as many rows as sequences may run: memory for logits is measured for so many."""
    scheduler = decoding(max_tokens=30, sizes=sizes)
    assert scheduler.plan({SeqId(1): (8,) * 9}).num_tokens == 1 + room


def test_there_may_be_memory_for_more_rows_than_sequences():
    scheduler = Scheduler(
        BlockPools(64), BLOCK, max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, eos_token_ids=(EOS,), max_drafts=5
    )
    scheduler.add(SeqId(1), RequestSpec((1,) * 4, SamplingParams(max_tokens=30)), kind=SequenceKind.LOCAL)
    scheduler.plan()
    scheduler.collect([(7, None)])
    assert scheduler.next_rows == (1, 0, 5)
    assert len(scheduler.plan({SeqId(1): (8,) * 9}).slices[0].drafts) == 5


def test_prompts_go_before_drafts():
    scheduler = decoding(max_tokens=30, sizes={"budget": 9})
    scheduler.add(SeqId(2), RequestSpec((2,) * 20, SamplingParams()), kind=SequenceKind.LOCAL)
    assert [len(s.token_ids) for s in scheduler.plan({SeqId(1): (8,) * 9}).slices] == [1, 8]


def test_plain_decodes_stand_before_those_with_drafts():
    """The first `decodes` slices have one token each, whichever sequences have drafts."""
    play = Play([((1, 2), SamplingParams(max_tokens=9, ignore_eos=True))] * 3)
    play.step(lambda *_: ())
    plan = play.step(lambda seq_id, _: (8,) if seq_id < 2 else ())
    assert [(s.seq_id, len(s.token_ids)) for s in plan.slices] == [(2, 1), (0, 2), (1, 2)]
    assert plan.decodes == 1


@pytest.mark.parametrize(("held", "tokens"), [(2, 1 + BLOCK), (3, 1), (4, 1)])
def test_a_sequence_grows_for_drafts_only_while_a_block_is_left_for_each_running_one(held, tokens):
    """It has two of six blocks and needs one more; `held` are reserved for a prompt that is pulled."""
    scheduler = decoding(length=2 * BLOCK, max_tokens=16, sizes={"blocks": 6, "limit": 6 * BLOCK})
    other = (2,) * (held * BLOCK - 1)
    assert scheduler.reserve(SeqId(2), RequestSpec(other, SamplingParams(max_tokens=1)), local_prefill=False) is not None
    assert scheduler.plan({SeqId(1): (8,) * BLOCK}).num_tokens == tokens
    assert scheduler._pool.num_allocatable == (4 - held) - (1 if tokens > 1 else 0)


def test_a_sequence_that_was_recomputed_behind_a_window_has_no_blocks_for_drafts_before_its_last_one():
    """Its last token has no block until the next plan, though its table is long enough: a drafter would write into block -1."""
    layouts = [KvGroup((0,), ((1, 1),), BLOCK, "float32", window) for window in (None, 1)]
    scheduler = Scheduler(
        BlockPools(9, 7, layouts=layouts), BLOCK, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=28, eos_token_ids=()
    )  # fmt: skip
    for i, (prompt_len, max_tokens) in enumerate([(12, 13), (10, 10)]):
        spec = RequestSpec((1,) * prompt_len, SamplingParams(max_tokens=max_tokens))
        scheduler.add(SeqId(i), spec, kind=SequenceKind.LOCAL)
    without, recomputed = 0, 0
    while scheduler.has_work:
        for view in scheduler.draft_views(3):
            ready = scheduler.with_blocks(view)
            without += ready is None
            tables = () if ready is None else ready.block_tables
            assert all(table[(len(view.tokens) - 1) // BLOCK] != NULL_BLOCK for table in tables)
        plan = scheduler.plan()
        outcome = scheduler.collect([(5, None) for piece in plan.slices for _ in piece.samples])
        recomputed += len(outcome.preempted)
    assert recomputed
    assert without


@pytest.mark.parametrize(("held", "most"), [(2, 5), (3, 1)])
def test_a_drafter_that_writes_kv_gets_no_more_drafts_than_there_are_blocks_for(held, most):
    """The sequence has two of six blocks, with room for one more token; `held` are reserved for a prompt that is pulled."""
    scheduler = decoding(length=2 * BLOCK - 1, max_tokens=16, sizes={"blocks": 6, "limit": 6 * BLOCK})
    other = (2,) * (held * BLOCK - 1)
    assert scheduler.reserve(SeqId(2), RequestSpec(other, SamplingParams(max_tokens=1)), local_prefill=False) is not None
    (view,) = scheduler.draft_views(5)
    ready = scheduler.with_blocks(view)
    assert ready is not None
    assert ready.most == most
    assert len(ready.tokens) + ready.most <= BLOCK * len(ready.block_tables[0])


def test_every_row_has_the_edits_of_the_tokens_before_it():
    scheduler = decoding(max_tokens=30, presence_penalty=1.0)
    (piece,) = scheduler.plan({SeqId(1): (8, 7, 9)}).slices
    edits = [spec.edits for spec in piece.samples]
    counts = [dict(zip(one.seen_ids, one.output_counts, strict=True)) for one in edits if one is not None]
    assert counts == [{7: 1}, {7: 1, 8: 1}, {7: 2, 8: 1}, {7: 2, 8: 1, 9: 1}]
    assert [token.token_id for token in scheduler.collect([(8, None), (5, None), (9, None), (9, None)]).tokens] == [8, 5]
    (spec,) = scheduler.plan().specs
    assert spec.edits is not None
    assert dict(zip(spec.edits.seen_ids, spec.edits.output_counts, strict=True)) == {7: 1, 8: 1, 5: 1}


def test_drafts_that_a_grammar_forbids_or_ends_with_are_left_out():
    """Words of three rising tokens: 5 may not follow 7, and nothing may follow the third token."""
    scheduler = make()
    scheduler.add(SeqId(1), RequestSpec((1,) * 4, SamplingParams(max_tokens=9)), kind=SequenceKind.LOCAL, grammar=Words(1))
    scheduler.plan()
    scheduler.collect([(7, None)])
    assert scheduler.plan({SeqId(1): (5, 9)}).num_tokens == 1
    scheduler.collect([(8, None)])
    assert scheduler.plan({SeqId(1): (9, 10)}).num_tokens == 1


def test_a_request_may_limit_its_drafts_or_have_none():
    for limit, count in ((0, 0), (2, 2), (None, 9)):
        scheduler = make()
        scheduler.add(
            SeqId(1), RequestSpec((1,) * 4, SamplingParams(max_tokens=30), draft_limit=limit), kind=SequenceKind.LOCAL
        )
        scheduler.plan()
        scheduler.collect([(7, None)])
        assert len(scheduler.plan({SeqId(1): (8,) * 9}).slices[0].drafts) == count


def test_the_drafts_of_a_sequence_are_counted():
    scheduler = decoding(max_tokens=8)
    assert drawn(scheduler, (8, 9), [8, 11, 12]).verified == (Verified(SeqId(1), 2, 1),)
    assert drawn(scheduler, (8, 9, 10), [8, 9, 10, 11]).verified == (Verified(SeqId(1), 3, 3),)
    (last,) = drawn(scheduler, (8,), [9]).tokens
    assert last.finish_reason is FinishReason.LENGTH
    assert last.speculation == DraftCounts(2, 5, 4, (2, 1, 1))


def test_an_engine_that_cannot_take_drafts_says_why():
    scheduler = make(obstacle="kv_cache_dtype is int8")
    assert not scheduler.plan().slices
    with pytest.raises(ConfigError, match="takes no drafts: kv_cache_dtype is int8"):
        scheduler.plan({SeqId(1): (8,)})


def test_tokens_before_a_row_without_numbers_count_and_the_next_step_computes_it_again():
    scheduler = decoding(max_tokens=30)
    outcome = drawn(scheduler, (8, 9), [8, NO_TOKEN, 5])
    assert [t.token_id for t in outcome.tokens] == [8]
    assert outcome.failed == ()
    assert [(s.start, s.token_ids) for s in scheduler.plan().slices] == [(5, (8,))]
    assert scheduler.collect([(NO_TOKEN, None)]).failed == (SeqId(1),)
    assert scheduler.num_live == 0


def test_a_first_row_without_numbers_is_computed_again_without_drafts():
    """A draft behind it may be the reason."""
    scheduler = decoding(max_tokens=30)
    outcome = drawn(scheduler, (8, 9), [NO_TOKEN, NO_TOKEN, 5])
    assert (outcome.tokens, outcome.failed) == ((), ())
    assert [(s.start, s.token_ids) for s in scheduler.plan({SeqId(1): (8, 9)}).slices] == [(4, (7,))]
    assert [t.token_id for t in scheduler.collect([(8, None)]).tokens] == [8]
    assert scheduler.plan({SeqId(1): (8, 9)}).num_tokens == 1


def test_rows_behind_a_wrong_draft_may_have_no_numbers():
    scheduler = decoding(max_tokens=30)
    outcome = drawn(scheduler, (8, 9), [11, NO_TOKEN, NO_TOKEN])
    assert [t.token_id for t in outcome.tokens] == [11]
    assert outcome.failed == ()


def test_an_abort_during_a_step_with_drafts_frees_all_blocks():
    scheduler = decoding(max_tokens=30)
    scheduler.plan({SeqId(1): (8,) * 6})
    scheduler.abort(SeqId(1))
    outcome = scheduler.collect([(8, None)] * 7)
    assert outcome.tokens == ()
    scheduler.check_invariants()
    assert scheduler._pool.counts().held == 0
