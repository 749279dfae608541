"""The verdict as plain data. Every number of the page comes from here. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdserve_bench.layout import Layout, Slo


class DecisionData(Enum):
    """The answer to the question whether prompts should be computed in a pool of their own."""

    DISAGGREGATE = "disaggregate"
    COLOCATE = "colocate"
    EQUAL = "equal"
    """Both serve the same rate, up to a difference that does not matter."""
    UNDECIDED = "undecided"
    """The intervals allow both answers."""
    ONE_SIDE = "one_side"
    """The other kind of layout was not measured."""
    UNMEASURED = "unmeasured"
    """No point counts."""
    NOTHING = "nothing"
    """No layout meets the targets at any rate that was measured."""
    OPEN = "open"
    """No layout was seen to keep a rate, and not every one was seen to miss one."""


class Binding(Enum):
    """The resource that keeps the goodput from being higher."""

    PREFILL_COMPUTE = "prefill_compute"
    DECODE_BANDWIDTH = "decode_bandwidth"
    INTERFERENCE = "interference"
    """Prompts are computed beside decodes, and delay their tokens."""
    SEQUENCES = "sequences"
    """The decode workers run as many sequences as `max_num_seqs` allows."""
    LINK = "link"
    MEMORY_OR_ROUTER = "memory_or_router"
    """Requests wait although no pool is busy: for KV blocks, or for the router."""
    GENERATOR = "generator"
    """The load generator was late before the cluster was."""
    UNSEEN = "unseen"
    """No measured point missed the target attainment."""


@dataclass(frozen=True, slots=True)
class EstimateData:
    """A value with its 95 % interval. None: there is no such number, as for a ratio to 0, or no upper bound is known."""

    value: float | None
    low: float
    high: float | None


@dataclass(frozen=True, slots=True)
class CandidateData:
    """One measured layout, with its goodput in requests a second."""

    layout: Layout
    name: str
    goodput: EstimateData
    settled: bool


@dataclass(frozen=True, slots=True)
class DegreeData:
    """Workers of one degree in one place, beside those of the lowest degree that was measured there."""

    place: str
    """The workers that the degree is of: `prefill`, `decode`, or `colocated` for those of a cluster with one pool."""
    ranks: int
    least_ranks: int
    name: str
    least_name: str
    """The names of the best layouts with these degrees."""
    each: EstimateData
    least_each: EstimateData
    """Their goodputs in requests a second of one core or GPU."""
    ratio: EstimateData
    """The first over the second."""
    pays: bool | None
    """The higher degree serves clearly more. None: the intervals allow both answers."""


@dataclass(frozen=True, slots=True)
class ComparedData:
    """Both kinds of layouts at two points with nearly the same rate. Times are seconds."""

    apart_rate_per_s: float
    together_rate_per_s: float
    apart_itl_p99_s: float
    together_itl_p99_s: float
    itl_p99_gained_s: float
    """The time by which the longest gaps are shorter with two pools. Below 0: they are longer."""
    apart_ttft_p50_s: float
    together_ttft_p50_s: float
    ttft_p50_paid_s: float
    """The time by which the first token comes later with two pools. Below 0: it comes earlier."""
    apart_ttft_p99_s: float
    together_ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class MovedData:
    """The KV that crosses between the pools at the measured point nearest to the goodput of two pools."""

    rate_per_s: float
    bytes_per_request: float
    bytes_per_s: float
    exposed_transfer_p50_s: float


@dataclass(frozen=True, slots=True)
class CostData:
    """The output tokens for the money, at the goodput of the recommended layout. A gang counts as so many workers as it has
    ranks."""

    output_tokens_per_s: float
    tokens_per_worker_hour: EstimateData
    price_per_worker_hour: float | None
    tokens_per_dollar: EstimateData | None
    baseline_tokens_per_worker_hour: EstimateData | None
    """The same of the best colocated layout, where another layout is recommended."""
    baseline_tokens_per_dollar: EstimateData | None


@dataclass(frozen=True, slots=True)
class ConstraintData:
    """The binding constraint of the recommended layout, with the numbers of the first point that missed the attainment."""

    binding: Binding
    rate_per_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    prefill_busy_share: float | None = None
    decode_busy_share: float | None = None
    sequences_per_worker: float | None = None
    exposed_transfer_p50_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlipData:
    """A change of one thing with which the answer becomes another one. A calibrated model estimates it; nobody measured it."""

    lever: str
    """The thing that changes: see `flips.LEVERS`."""
    factor: float
    """The change, as a multiple of the present value."""
    low: float | None
    high: float | None
    """The factors with which the ends of the interval of the ratio give the same change. None: not within the scanned range."""
    value: float | None
    """The changed value in the unit of the lever. None: the present value is not known."""
    to: DecisionData


@dataclass(frozen=True, slots=True)
class Fit:
    """The calibrated model: times in seconds of one worker, and how far its goodput is from the measured one."""

    prompt_s: float
    """The computation of a mean prompt on a prefill worker."""
    prompt_beside_s: float
    """The computation of a mean prompt beside decodes."""
    delay_s: float
    """The delay that one prompt adds to each sequence beside it."""
    step_s: float
    """A decode step, without the part that grows with the sequences."""
    sequence_s: float
    """The time that each sequence adds to a step."""
    exposed_s: float
    output_tokens: float
    prompt_tokens: float | None
    apart_error: float | None
    """Measured goodput of two pools over the one of the model before it is calibrated."""
    together_error: float | None


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason to trust the verdict less. `words.DOUBTS` has a sentence for each name."""

    name: str
    serious: bool
    numbers: dict[str, float]
    quote: str = ""
    """Text of the result's file. Nobody has checked it."""


@dataclass(frozen=True, slots=True)
class VerdictData:
    """The whole answer."""

    decision: DecisionData
    slo: Slo
    attainment: float
    workers: int
    chosen: CandidateData | None
    apart: CandidateData | None
    """The best layout with two pools."""
    together: CandidateData | None
    """The best colocated layout: the baseline."""
    ratio: EstimateData | None
    """Goodput of two pools over that of the baseline."""
    rivals: tuple[CandidateData, ...]
    """Layouts of the chosen kind that cannot be told apart from the chosen one."""
    device: str
    """The place of one rank: a worker, where none is a gang."""
    degrees: tuple[DegreeData, ...]
    """The degrees that were compared. Empty: there was one."""
    compared: ComparedData | None
    moved: MovedData | None
    cost: CostData | None
    constraint: ConstraintData | None
    fit: Fit | None
    flips: tuple[FlipData, ...]
    doubts: tuple[Doubt, ...]
    candidates: tuple[CandidateData, ...]
    points: int
    requests: int
    measured_s: float
    conditions: dict[str, str]
    """Workload, model, hardware and other facts, as the result's file says them. Nobody has checked them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON has it: enums are their values, and no number is infinite."""
        return _plain(dataclasses.asdict(self))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else value
