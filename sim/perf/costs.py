"""The cost model: the time of an engine step and of a transfer, as linear functions of what they compute and carry.

```
step = base + prompt_token_s * prompt tokens + prompt_pair_s * pairs + decode_s * decodes + context_token_s * context
base = the larger of prompt_base_s and decode_base_s, if the step has both parts: weights are read once
pairs = for each prompt token, the tokens that it attends to; context = for each decode, the tokens whose KV it reads
```
The presets are least-squares fits of relative errors. `tests/clustersim` repeats the fits where the tables are there. For a
gang there are no measurements to fit: `GangCosts` takes its times from the formulas of `pdserve capacity`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Final, Self

from pdserve.capacity.worker_speed import WorkerSpeed, roofline_s
from pdserve.core.errors import ConfigError
from pdserve.core.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """The sum over all prompt tokens of the number of tokens that each attends to, itself included."""
    decodes: int = 0
    context_tokens: int = 0
    """The sum over all decodes of the number of tokens before the computed token."""


def work_of(plan: StepPlan) -> StepWork:
    """Return the work of a plan. Drafts do not count: a stride of several steps is one plan (see `engine.py`)."""
    tokens = pairs = decodes = context = 0
    for piece in plan.slices[plan.decodes :]:
        if len(piece.samples) > 1:
            decodes += 1
            context += piece.start
        else:
            count = len(piece.token_ids)
            tokens += count
            pairs += count * piece.start + count * (count + 1) // 2
    context += sum([piece.start for piece in plan.slices[: plan.decodes]])
    return StepWork(tokens, pairs, decodes + plan.decodes, context)


@dataclass(frozen=True, slots=True)
class WorkerCosts(ABC):
    """The costs of one kind of worker, and the KV that it has room for."""

    name: str
    kv_bytes_per_token: int
    kv_tokens: int
    """The number of tokens whose KV fits the pool."""
    transfer_bytes_s: float
    """The bytes that the network of one worker carries in a second, in each direction."""

    @property
    def family(self) -> str:
        """The name of the model, without the factor of `scaled`. Workers of one family serve one model."""
        return self.name.partition(" ")[0]

    @abstractmethod
    def step_s(self, work: StepWork) -> float:
        """Return the seconds of one step."""

    @abstractmethod
    def steps_s(self, work: StepWork, steps: int) -> float:
        """Return the seconds of `steps` steps that begin with `work`, in each of which every decode's context grows by one."""

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds of one step that computes a prompt of `tokens`, of which the first `cached` have their KV."""
        count = tokens - cached
        return self.step_s(StepWork(count, count * cached + count * (count + 1) // 2))

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds in which the KV of `tokens` passes an otherwise idle network."""
        return tokens * self.kv_bytes_per_token / self.transfer_bytes_s


@dataclass(frozen=True, slots=True)
class CostModel(WorkerCosts):
    """Costs that are linear in what a step computes."""

    prompt_base_s: float
    prompt_token_s: float
    prompt_pair_s: float
    decode_base_s: float
    decode_s: float
    context_token_s: float

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of one step."""
        base_s = max(self.prompt_base_s if work.prompt_tokens else 0.0, self.decode_base_s if work.decodes else 0.0)
        prompt_s = self.prompt_token_s * work.prompt_tokens + self.prompt_pair_s * work.prompt_pairs
        return base_s + prompt_s + self.decode_s * work.decodes + self.context_token_s * work.context_tokens

    def steps_s(self, work: StepWork, steps: int) -> float:
        """Return the seconds of `steps` steps that begin with `work`, in each of which every decode's context grows by one."""
        growth = work.decodes * steps * (steps - 1) // 2
        return steps * self.step_s(work) + self.context_token_s * growth

    def scaled(self, factor: float) -> CostModel:
        """Return the costs of a worker whose steps take `factor` times as long."""
        names = ("prompt_base_s", "prompt_token_s", "prompt_pair_s", "decode_base_s", "decode_s", "context_token_s")
        return replace(self, name=f"{self.name} x {factor:g}", **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class GangCosts(WorkerCosts):
    """The costs of a worker with degrees, by the formulas of `pdserve capacity`."""

    worker: WorkerSpeed

    @classmethod
    def of(cls, worker: WorkerSpeed, link_bytes_per_s: float) -> Self:
        """Return the costs of this worker with a link of this rate.

        Raises `ConfigError` for stages: a simulated engine computes one batch at a time.
        """
        if worker.lanes > 1:
            raise ConfigError(f"pipeline_parallel_size {worker.lanes}: the cluster simulator has no stages; use 1")
        question, token_bytes = worker.question, worker.kv_bytes(1)
        kv_tokens = int(worker.room_bytes / token_bytes)
        link_share = question.shares.link
        return cls(question.model.name, round(token_bytes), kv_tokens, link_bytes_per_s * link_share, worker)

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of one step. Windows of attention do not shorten prompts here."""
        worker, tokens, pairs = self.worker, work.prompt_tokens, work.prompt_pairs
        context = round(work.context_tokens / max(1, work.decodes)) + 1
        if not tokens:
            return worker.decode_s(work.decodes, context) if work.decodes else 0.0
        pair_flops = sum([prompt * pairs for _, prompt, _ in worker.flops.pairs])
        if work.decodes:
            return worker.beside_s(work.decodes, context, tokens, pair_flops)
        flops = worker.token_flops(tokens) * tokens + worker.flops.row + pair_flops
        return roofline_s(worker.weights_bytes(tokens), flops, worker.bytes_per_s, worker.flops_per_s) + worker.links_s(tokens)

    def steps_s(self, work: StepWork, steps: int) -> float:
        """Return the seconds of `steps` steps that begin with `work`. The contexts of all of them are those in the middle."""
        grown = work.context_tokens + work.decodes * (steps - 1) // 2
        return steps * self.step_s(replace(work, context_tokens=grown))


_LLAMA2_70B_KV: Final = 2 * 80 * 8 * 128 * 2
"""Bytes of KV a token: two planes of 80 layers with 8 heads of 128 numbers in 2 bytes."""
_LINK_BYTES_S: Final = 25e9
"""200 Gbit/s, one port of ConnectX-6 or InfiniBand HDR."""

LLAMA2_70B_A100: Final = CostModel(
    name="llama2_70b_a100",
    prompt_base_s=21.53e-3,
    prompt_token_s=0.15024e-3,
    prompt_pair_s=3.937e-9,
    decode_base_s=44.16e-3,
    decode_s=0.20005e-3,
    context_token_s=0.30996e-6,
    kv_bytes_per_token=_LLAMA2_70B_KV,
    kv_tokens=(8 * 80 * 9 // 10 - 140) * 10**9 // _LLAMA2_70B_KV,
    transfer_bytes_s=_LINK_BYTES_S,
)
"""Llama-2-70B on eight A100-80GB, tensor parallel. The fit is over 105 measurements of splitwise-sim's perf_model.csv (prompts
of 128 to 8,192 tokens in batches of 1 to 64): half of the prompt times are within 7 % and nine tenths within 36 %; of the token
times within 1 % and 3 %. KV gets 90 % of the memory less 140 GB of weights."""

LLAMA2_70B_H100: Final = CostModel(
    name="llama2_70b_h100",
    prompt_base_s=22.70e-3,
    prompt_token_s=0.06488e-3,
    prompt_pair_s=7.043e-9,
    decode_base_s=29.80e-3,
    decode_s=0.20160e-3,
    context_token_s=0.17776e-6,
    kv_bytes_per_token=_LLAMA2_70B_KV,
    kv_tokens=LLAMA2_70B_A100.kv_tokens,
    transfer_bytes_s=2 * _LINK_BYTES_S,
)
"""The same on eight H100-80GB: half of the prompt times are within 17 % and nine tenths within 28 %; of the token times within
2 % and 5 %."""

OPT_13B_A100: Final = CostModel(
    name="opt_13b_a100",
    prompt_base_s=18.1025e-3 + 1e-3,
    prompt_token_s=0.101912e-3,
    prompt_pair_s=2 * 7.12226e-9,
    decode_base_s=19.9347e-3 + 1e-3,
    decode_s=0.0385070e-3,
    context_token_s=0.626936e-6,
    kv_bytes_per_token=2 * 40 * 5120 * 2,
    kv_tokens=(80 * 9 // 10 - 26) * 10**9 // (2 * 40 * 5120 * 2),
    transfer_bytes_s=_LINK_BYTES_S,
)
"""OPT-13B on one A100-80GB: the coefficients of DistServe's own profile for batches of up to 95, whose formulas add 1 ms. Its
sum of squared lengths is twice the pairs."""

PRESETS: Final = {model.name: model for model in (LLAMA2_70B_A100, LLAMA2_70B_H100, OPT_13B_A100)}
