"""The commands that the loop thread gives to the engine thread, and the events that an engine step returns. Immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.core.block_hash import KeyChanges
from pdserve.core.block_pools import BlockTables
from pdserve.core.errors import PdserveError
from pdserve.core.ids import BlockId, BlockSum, SeqId
from pdserve.core.kv_layout import Shortage
from pdserve.core.request_spec import RequestSpec
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.core.worker import WorkerLoad
from pdserve.engine.schedule.collect import Advance, OutputToken


class EngineKv(NamedTuple):
    """KV that a foreign engine holds for the engine of a reader. `params` is the engines' own ticket (JSON); empty: there is
    nothing to fetch, because token 0 has ended the request."""

    num_blocks: int
    params: bytes


@dataclass(frozen=True, slots=True)
class AddLent:
    """Compute this request's prompt and one token, and lend the blocks to a remote reader. `Scheduler.add` explains the
    fields."""

    seq_id: SeqId
    spec: RequestSpec
    resumed: tuple[int, ...] = ()
    grammar: GrammarState | None = None
    """That of the constraint, before the first output token. The engine owns it from now on."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks for this sequence now or not at all. With `local_prefill` it starts to run at once."""

    seq_id: SeqId
    spec: RequestSpec
    local_prefill: bool
    resumed: tuple[int, ...] = ()
    grammar: GrammarState | None = None
    """As in `AddLent`."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Decode this sequence, because its inbound KV is committed. `first_token` is the id of token 0."""

    seq_id: SeqId
    first_token: int
    kv: EngineKv | None = None
    """The KV that a foreign engine fetches by itself. None: it is in our blocks."""


@dataclass(frozen=True, slots=True)
class DiscardKv:
    """Let a foreign engine free what it holds of this KV for us. Nobody will use it: its lease was committed for a request that
    has ended."""

    prompt_ids: tuple[int, ...]
    kv: EngineKv


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop this sequence if it is still there. `read_in_flight` True: its inbound blocks are quarantined."""

    seq_id: SeqId
    read_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    """Free this sequence's quarantined blocks, because the read into them has stopped."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """Drop the lease's references on this sequence's blocks, because the lease has ended. `read` False: nobody has committed
    it, so a foreign engine keeps its KV until its own time is over."""

    seq_id: SeqId
    read: bool = True


@dataclass(frozen=True, slots=True)
class Rehash:
    """Sum the lent blocks of this sequence again, because a reader's checksums differ."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class SetBudget:
    """Let a step have at most so many tokens, and at most so many sequences run, from now on. 0: it stays as it is."""

    max_num_batched_tokens: int
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class SetLending:
    """Sum each block once it is final, and the cached blocks now, because the worker lends from now on. False: it lends
    nothing any more. No block may be held or quarantined."""

    lends: bool


Command = AddLent | Reserve | Activate | DiscardKv | Abort | EndQuarantine | ReturnLease | Rehash | SetBudget | SetLending


@dataclass(frozen=True, slots=True)
class Lent:
    """All prompt blocks of a sequence are allocated, with references for a lease that the loop must now grant."""

    seq_id: SeqId
    block_tables: BlockTables
    sums: tuple[tuple[BlockSum, ...], ...] | None = None
    """Checksums of its prefix hits in each KV group, which were final before. None: no block is summed."""
    hits: int = 0
    """The number of leading blocks of each group that held their KV already."""
    kv: EngineKv | None = None
    """The KV that a foreign engine holds for a reader. None: it is in our blocks."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The checksums of a lent sequence's blocks from `first` on in each KV group. These blocks are final now."""

    seq_id: SeqId
    first: int
    sums: tuple[tuple[BlockSum, ...], ...]


@dataclass(frozen=True, slots=True)
class Rehashed:
    """The answer to `Rehash`: the lent blocks that no longer match their checksums, each with the index of its KV group."""

    seq_id: SeqId
    rotted: tuple[tuple[int, BlockId], ...]


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """The answer to `Reserve`."""

    seq_id: SeqId
    block_tables: BlockTables | None
    """The reserved blocks of each KV group. None: there is no room."""
    hits: int = 0
    """The number of leading blocks of each group that hold their KV already."""
    shortage: Shortage | None = None
    """The KV group that has no room. None: there is room, or a slot for a sequence is lacking."""


class EngineSnapshot(NamedTuple):
    """The state of the engine after a step."""

    load: WorkerLoad
    """The part of the worker's load that the engine knows."""
    commands_taken: int = 0
    """The number of commands that the engine has taken since the start."""
    has_work: bool = False
    """True when the engine goes on without a further command."""
    last_seq_id: SeqId = SeqId(0)
    """The last sequence that the loop had asked for when these counts were taken."""
    keys: KeyChanges | None = None
    """The changes of the keys that the pool holds, since the snapshot before. None: there are none."""


class StepEvents(NamedTuple):
    """All events of one engine step."""

    lent: tuple[Lent, ...] = ()
    reserved: tuple[ReserveResult, ...] = ()
    advanced: tuple[Advance, ...] = ()
    """The progress of lent sequences whose prompt is not finished."""
    tokens: tuple[OutputToken, ...] = ()
    preempted: tuple[SeqId, ...] = ()
    failed: tuple[SeqId, ...] = ()
    """Sequences whose logits were not finite numbers; the engine has forgotten them."""
    snapshot: EngineSnapshot | None = None
    sealed: tuple[Sealed, ...] = ()
    rehashed: tuple[Rehashed, ...] = ()
    grammars_failed: tuple[tuple[SeqId, str], ...] = ()
    """Sequences whose grammar could not go on, with the reason; the engine has forgotten them."""
    given_up: tuple[tuple[SeqId, PdserveError], ...] = ()
    """Sequences that a foreign engine could not go on with, with the reason; it has forgotten them."""
