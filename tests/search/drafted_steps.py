"""A production scheduler whose decodes take drafts, as a model to be searched, with a lender beside it.

One sequence decodes. It gets every right and wrong draft of up to two tokens, may be aborted between a plan and its end, and
loses its blocks when the pool is full. Lent prompts begin with its tokens, right ones or wrong ones, so that they find what it
has shared. The memory has, for each slot, the tokens up to it; rows of wrong drafts leave garbage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

from pdserve.core.block_hash import PrefixChain, chain_salt
from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import StepPlan
from pdserve.engine.schedule.collect import StepOutcome
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from tests.search.explorer import Step, Violation
from tests.search.machines import Machines

BLOCK_SIZE, STOP = 2, 3
SALT: Final = b"model"
Text = tuple[int, ...]
GARBAGE: Final[Text] = ()


def drawn_after(text: Text) -> int:
    """The right token: 0 or 1, and a stop token after eight tokens."""
    return STOP if len(text) >= 8 else (sum(text) * 7 + len(text)) // 3 % 2


def output_of(prompt: Text, max_tokens: int) -> Text:
    text = prompt
    while len(text) < len(prompt) + max_tokens and text[-1] != STOP:
        text += (drawn_after(text),)
    return text[len(prompt) :]


@dataclass(frozen=True)
class DraftConfig:
    prompt: Text = (5, 6, 7)
    max_tokens: int = 4
    lent: tuple[int, ...] = (5, -5)
    """The lent prompts: so many first tokens of the prompt and its output, of which the last one is wrong if the number is
    negative, and another token."""
    blocks: int = 5
    most: int = 2

    @property
    def prompts(self) -> tuple[Text, ...]:
        """The prompt that is decoded, and the lent ones."""
        text = self.prompt + output_of(self.prompt, self.max_tokens)
        return self.prompt, *((*text[:n], 9) if n > 0 else (*text[: -n - 1], 1 - text[-n - 1], 9) for n in self.lent)


class DraftState(NamedTuple):
    scheduler: int
    memory: tuple[Text, ...]
    added: tuple[bool, ...]
    output: int = 0
    """The number of output tokens of the sequence that decodes, or 0 when it has ended."""
    leases: tuple[tuple[int, int], ...] = ()
    """Each lent sequence whose lease is held, with its final tokens."""
    plan: StepPlan | None = None


# --- what the model does to a scheduler


def add(scheduler: Scheduler, number: int, prompt: Text, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    kind = SequenceKind.LENT if number else SequenceKind.LOCAL
    scheduler.add(SeqId(number), RequestSpec(prompt, params), kind=kind)
    _forget_numbers(scheduler)


def plan(scheduler: Scheduler, drafts: tuple[tuple[SeqId, Text], ...]) -> tuple[StepPlan, tuple[SeqId, ...]]:
    planned = scheduler.plan(dict(drafts))
    admitted = tuple(one.seq_id for one in scheduler.take_admitted())
    _forget_numbers(scheduler)
    return planned, admitted


def collect(scheduler: Scheduler, ids: tuple[int, ...]) -> StepOutcome:
    outcome = scheduler.collect([(token_id, None) for token_id in ids])
    _forget_numbers(scheduler)
    return outcome


def abort(scheduler: Scheduler, number: int) -> None:
    scheduler.abort(SeqId(number))
    _forget_numbers(scheduler)


def return_lease(scheduler: Scheduler, number: int) -> None:
    scheduler.return_lease(SeqId(number))
    _forget_numbers(scheduler)


def _forget_numbers(scheduler: Scheduler) -> None:
    """Forget what only counts, so that equal schedules are equal."""
    scheduler._steps, turns = 0, scheduler._turns
    turns._clock, turns._virtual, turns._top = 0, 0.0, 0.0
    scheduler.prefix.queried = scheduler.prefix.hit = 0
    scheduler._pool.published.take()
    for seq in scheduler._sequences.values():
        seq.speculation, seq.served, seq.preemptions = None, 0, min(seq.preemptions, 1)
        seq.tag, seq.history = 0.0, ()


# --- what it asks


def decodes(scheduler: Scheduler) -> bool:
    return bool(scheduler._decoding)


def runs(scheduler: Scheduler) -> bool:
    return scheduler.has_work


def live(scheduler: Scheduler) -> tuple[int, ...]:
    return tuple(scheduler._sequences)


def free(scheduler: Scheduler) -> tuple[int, ...]:
    return tuple(scheduler._pool.groups[0]._free)


def shared(scheduler: Scheduler) -> tuple[tuple[int, bytes], ...]:
    return tuple(scheduler._pool.groups[0]._hash_of.items())


def lent_blocks(scheduler: Scheduler, number: int) -> tuple[int, ...]:
    return scheduler._pool.blocks_of(Holder(HolderKind.LEASE, SeqId(number)))[0]


def idle(scheduler: Scheduler) -> bool:
    counts = scheduler._pool.counts()
    return not scheduler._sequences and counts.free + counts.cached == counts.total


class DraftedSteps:
    """The model. Subclasses and patches break its rules."""

    def __init__(self, config: DraftConfig) -> None:
        self.config = config
        self.machines = Machines()
        self.texts = [config.prompt + output_of(config.prompt, config.max_tokens), *config.prompts[1:]]
        self.known: dict[bytes, Text] = {}
        for text in self.texts:
            chain = PrefixChain(BLOCK_SIZE, salt=chain_salt(SALT, ""))
            for i, block_hash in enumerate(chain.first(len(text) // BLOCK_SIZE, text), 1):
                self.known[block_hash] = text[: i * BLOCK_SIZE]

    def initial(self) -> DraftState:
        config = self.config
        scheduler = Scheduler(
            BlockPools(config.blocks), BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=6,
            max_model_len=config.blocks * BLOCK_SIZE, eos_token_ids=(STOP,), prefix_salt=SALT,
        )  # fmt: skip
        memory = (GARBAGE,) * (config.blocks * BLOCK_SIZE)
        return DraftState(self.machines.add(scheduler), memory, (False,) * len(self.texts))

    def successors(self, s: DraftState) -> Iterator[Step]:
        for number, added in enumerate(s.added):
            if not added:
                tokens = self.config.max_tokens if not number else 1
                scheduler, _ = self.machines.apply(s.scheduler, add, number, self.config.prompts[number], tokens)
                flags = (*s.added[:number], True, *s.added[number + 1 :])
                yield Step(("add", number), self.settled(s._replace(scheduler=scheduler, added=flags)))
        for number in self.machines.ask(s.scheduler, live):
            scheduler, _ = self.machines.apply(s.scheduler, abort, number)
            yield Step(("abort", number), self.settled(s._replace(scheduler=scheduler)))
        for number, final in s.leases:
            scheduler, _ = self.machines.apply(s.scheduler, return_lease, number)
            left = tuple(lease for lease in s.leases if lease != (number, final))
            yield Step(("return", number), self.settled(s._replace(scheduler=scheduler, leases=left)), sure=True)
        if s.plan is not None:
            yield Step(("collect",), self.collected(s, s.plan), sure=True)
        elif self.machines.ask(s.scheduler, runs):
            for drafts in self.drafts(s):
                yield Step(("plan", drafts), self.planned(s, drafts), sure=not drafts)

    def drafts(self, s: DraftState) -> Iterator[Text]:
        """Every mixture of right and wrong tokens. Behind the output come tokens that nobody draws."""
        yield ()
        if self.machines.ask(s.scheduler, decodes):
            at = len(self.config.prompt) + s.output
            right = (*self.texts[0][at:], 0, 0)
            for count in range(1, self.config.most + 1):
                for wrong in product((0, 1), repeat=count):
                    yield tuple((1 - token) % 2 if is_wrong else token for token, is_wrong in zip(right, wrong, strict=False))

    def planned(self, s: DraftState, drafts: Text) -> DraftState:
        chosen = ((SeqId(0), drafts),) if drafts else ()
        scheduler, (step, admitted) = self.machines.apply(s.scheduler, plan, chosen)
        leases = (*s.leases, *((seq_id, 0) for seq_id in admitted))
        return self.settled(s._replace(scheduler=scheduler, leases=leases, plan=step if step.slices else None))

    def collected(self, s: DraftState, step: StepPlan) -> DraftState:
        """The step reads, writes and draws. Rows of wrong drafts are garbage afterwards."""
        memory, ids = list(s.memory), list[int]()
        for piece in step.slices:
            table, known = piece.block_tables[0], self.texts[piece.seq_id]
            if not piece.seq_id:
                known = known[: len(self.config.prompt) + s.output]
            text = known[: piece.start] + piece.token_ids
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(len(text))]
            for position in range(piece.start):
                if memory[slots[position]] != text[: position + 1]:
                    raise Violation(f"sequence {piece.seq_id} reads {memory[slots[position]]} at position {position}")
            drawn = [drawn_after(text[: len(text) - k]) for k in reversed(range(len(piece.samples)))]
            right = 0
            while right < len(piece.drafts) and piece.drafts[right] == drawn[right]:
                right += 1
            sure = len(text) - len(piece.drafts) + right
            for position in range(piece.start, len(text)):
                memory[slots[position]] = text[: position + 1] if position < sure else GARBAGE
            ids += drawn
        scheduler, outcome = self.machines.apply(s.scheduler, collect, tuple(ids))
        s = s._replace(scheduler=scheduler, memory=tuple(memory), plan=None)
        return self.settled(self.told(s, outcome))

    def told(self, s: DraftState, outcome: StepOutcome) -> DraftState:
        for token in outcome.tokens:
            if token.seq_id:
                continue
            at = len(self.config.prompt) + s.output
            if token.output_index != s.output or at >= len(self.texts[0]) or token.token_id != self.texts[0][at]:
                raise Violation(f"token {token.output_index} is {token.token_id} after {s.output} tokens")
            if (token.finish_reason is not None) != (at + 1 == len(self.texts[0])):
                raise Violation(f"the output ends with token {s.output}, {token.finish_reason}")
            s = s._replace(output=s.output + 1)
        final = {one.seq_id: one.computed for one in outcome.advanced}
        return s._replace(leases=tuple((number, final.get(SeqId(number), was)) for number, was in s.leases))

    def settled(self, s: DraftState) -> DraftState:
        """What lies in free blocks is garbage. A sequence that is aborted in a step is there until its end."""
        if s.plan is None and 0 not in self.machines.ask(s.scheduler, live):
            s = s._replace(output=0)
        memory = list(s.memory)
        for block in self.machines.ask(s.scheduler, free):
            memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [GARBAGE] * BLOCK_SIZE
        return s._replace(memory=tuple(memory))

    def check(self, s: DraftState) -> None:
        for block, block_hash in self.machines.ask(s.scheduler, shared):
            if block_hash not in self.known:
                raise Violation(f"block {block} is shared under tokens that no sequence has")
            self.check_block(s, block, self.known[block_hash], BLOCK_SIZE, "shared")
        for number, final in s.leases:
            for position, block in enumerate(self.machines.ask(s.scheduler, lent_blocks, number)):
                text = self.texts[number][: (position + 1) * BLOCK_SIZE]
                count = min(BLOCK_SIZE, final - position * BLOCK_SIZE)
                self.check_block(s, block, text[: position * BLOCK_SIZE + max(count, 0)], count, "lent")

    def check_block(self, s: DraftState, block: int, text: Text, count: int, use: str) -> None:
        """Check the first `count` slots of a block, which hold the last ones of a text."""
        for i in range(count):
            if (have := s.memory[block * BLOCK_SIZE + i]) != text[: len(text) - count + i + 1]:
                raise Violation(f"block {block} is {use} and holds {have} instead of the tokens up to {text}")

    def quiescent(self, s: Any) -> bool:
        return s.plan is None and not s.leases and bool(self.machines.ask(s.scheduler, idle))
