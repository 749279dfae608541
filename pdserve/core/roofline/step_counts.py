"""The counts of what an engine has computed since its start: tokens, busy seconds, operations and bytes. Pure.

The counts cost a few microseconds a step, so there is no work for single tokens where all slices are plain decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from pdserve.core.roofline.expert_load import ExpertLoad
from pdserve.core.roofline.flops import StepFlops
from pdserve.core.roofline.traffic import StepTraffic
from pdserve.core.step_plan import StepPlan
from pdserve.core.worker import WorkerLoad

COUNTED: Final = (
    "computed_prompt_tokens", "output_tokens", "prompt_busy_s", "decode_busy_s", "prompt_steps", "decode_steps",
    "prompt_flops", "decode_read_bytes",
)  # fmt: skip
"""The fields of `WorkerLoad` that are counted here."""
_START: Final = attrgetter("start")
EXPERT_STEPS: Final = 64
"""The spread over experts is taken once in this many steps, and when no work is left. It walks over all experts of all
layers."""


class StepCounts:
    """The counts of one engine. The engine thread owns it."""

    def __init__(
        self,
        flops: StepFlops | None = None,
        traffic: StepTraffic | None = None,
        experts: Callable[[], ExpertLoad | None] = lambda: None,
    ) -> None:
        """`flops` and `traffic` describe the model. None: operations and bytes stay 0, so they are unknown.

        experts: returns the present spread over the model's experts; None: there is none.
        """
        self._flops = flops
        self._traffic = traffic
        self._experts = experts
        self._steps = 0
        self.experts: ExpertLoad | None = None
        self.computed_prompt_tokens = 0
        self.output_tokens = 0
        self.prompt_busy_s = 0.0
        self.prompt_steps = 0
        self.decode_busy_s = 0.0
        self.decode_steps = 0
        self.prompt_flops = 0.0
        self.decode_read_bytes = 0.0

    def add(self, plan: StepPlan, *, prompt_tokens: int, output_tokens: int, step_s: float, idle: bool = False) -> None:
        """Count one step, which computed `prompt_tokens` of prompts and drew `output_tokens`. idle: no work is left."""
        self.computed_prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if idle or self._steps % EXPERT_STEPS == 0:
            self.experts = self._experts()
        self._steps += 1
        if prompt_tokens:
            self.prompt_busy_s += step_s
            self.prompt_steps += 1
            if self._flops is not None:
                self.prompt_flops += _flops(self._flops, plan)
        else:
            self.decode_busy_s += step_s
            self.decode_steps += 1
            if self._traffic is not None:
                # The KV of a sequence is read once, also where the sequence has drafts.
                starts = list(map(_START, plan.slices[: plan.decodes]))
                tokens = len(starts)
                for drafted in plan.slices[plan.decodes :]:
                    tokens += len(drafted.token_ids)
                    starts.append(drafted.start + len(drafted.token_ids) - 1)
                self.decode_read_bytes += self._traffic.weights(tokens) + self._traffic.kv(starts)


def _flops(flops: StepFlops, plan: StepPlan) -> float:
    chunks = plan.slices[plan.decodes :]
    decodes = flops.decodes(list(map(_START, plan.slices[: plan.decodes])))
    return decodes + sum([flops.chunk(one.start, len(one.token_ids), len(one.samples)) for one in chunks])


def since(load: WorkerLoad, base: WorkerLoad) -> dict[str, Any]:
    """Return the counts of `load` since `base` was taken, by their names. The engine counts on through a role flip."""
    return {name: getattr(load, name) - getattr(base, name) for name in COUNTED}
