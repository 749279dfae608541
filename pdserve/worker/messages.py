"""What the loop thread asks of the engine thread, and what one engine step answers. Immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import BlockId, BlockSum, SeqId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.outcome import Advance, OutputToken


@dataclass(frozen=True, slots=True)
class AddLent:
    """Compute this prompt and one token, and lend the blocks to a remote reader. See `Scheduler.add` for the rest."""

    seq_id: SeqId
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    resumed: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold room for this sequence now or not at all. With `local_prefill` it starts to run at once."""

    seq_id: SeqId
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    local_prefill: bool
    resumed: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Activate:
    """The inbound KV of this sequence is committed: decode it."""

    seq_id: SeqId
    first_token: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop this sequence, if it is still there. A read in flight quarantines its inbound blocks."""

    seq_id: SeqId
    read_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    """The read into this sequence's blocks has stopped for good."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """The lease over this sequence's blocks has ended."""

    seq_id: SeqId


@dataclass(frozen=True, slots=True)
class Rehash:
    """A reader did not read what was summed: look at what the lent blocks of this sequence hold now."""

    seq_id: SeqId


Command = AddLent | Reserve | Activate | Abort | EndQuarantine | ReturnLease | Rehash


@dataclass(frozen=True, slots=True)
class Lent:
    """All prompt blocks of a sequence are allocated, and referenced for a lease that is yet to be granted."""

    seq_id: SeqId
    block_ids: tuple[BlockId, ...]
    sums: tuple[BlockSum, ...] | None = None
    """Checksums of its prefix hits, which were final before; None: nothing is summed."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The checksums of blocks of a lent sequence from `first` on, which are final."""

    seq_id: SeqId
    first: int
    sums: tuple[BlockSum, ...]


@dataclass(frozen=True, slots=True)
class Rehashed:
    """The lent blocks that do not hold what was summed."""

    seq_id: SeqId
    rotted: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ReserveResult:
    seq_id: SeqId
    block_ids: tuple[BlockId, ...] | None
    """None: no room."""
    hits: int = 0
    """Leading blocks that hold their KV already."""


class EngineSnapshot(NamedTuple):
    """The engine's level state after a step."""

    blocks: BlockCounts
    num_waiting: int
    num_running: int
    queued_tokens: int
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    commands_taken: int = 0
    """How many commands the engine has taken, of all that were submitted since the start."""
    numerical_errors: int = 0
    """Sequences since the start that failed because their logits were not finite numbers."""
    has_work: bool = False
    """Whether the engine goes on without a further command."""
    last_seq_id: SeqId = SeqId(0)
    """The last sequence that was asked for before these counts were taken."""


class StepEvents(NamedTuple):
    """Everything one engine step did."""

    lent: tuple[Lent, ...] = ()
    reserved: tuple[ReserveResult, ...] = ()
    advanced: tuple[Advance, ...] = ()
    """Of lent sequences whose prompt is not finished."""
    tokens: tuple[OutputToken, ...] = ()
    preempted: tuple[SeqId, ...] = ()
    failed: tuple[SeqId, ...] = ()
    """Sequences whose logits were not finite numbers; the engine has forgotten them."""
    snapshot: EngineSnapshot | None = None
    sealed: tuple[Sealed, ...] = ()
    rehashed: tuple[Rehashed, ...] = ()
