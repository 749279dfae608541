"""A mixture of experts as loops over Python floats and float64 tensors, and a small layer with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers.elementwise import silu_and_mul_fixed
from pdserve.engine.layers.linear import Linear, scheme_for
from pdserve.engine.layers.moe import Expert, MoeMlp
from pdserve.engine.layers.rows import PROBE_ROWS, Rows


def chosen(spec: MoeSpec, ranks: Sequence[float]) -> list[int]:
    """Return the experts that rank highest, ascending. Of equal ones the lowest comes first."""
    size = spec.experts // spec.groups
    groups = [ranks[g * size : (g + 1) * size] for g in range(spec.groups)]
    of_groups = [max(one) if spec.group_score == "best" else sum(sorted(one)[-2:]) for one in groups]
    allowed = sorted(range(spec.groups), key=lambda g: (-of_groups[g], g))[: spec.top_groups]
    candidates = [expert for expert in range(spec.experts) if expert // size in allowed]
    return sorted(sorted(candidates, key=lambda expert: (-ranks[expert], expert))[: spec.experts_per_token])


def routed(spec: MoeSpec, outputs: Sequence[float], bias: Sequence[float] | None) -> dict[int, float]:
    """Return the chosen experts of one row with their weights."""
    if spec.score == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in outputs]
    else:
        grown = [math.exp(x - max(outputs)) for x in outputs]
        scores = [x / sum(grown) for x in grown]
    experts = chosen(spec, scores if bias is None else [a + b for a, b in zip(scores, bias, strict=True)])
    total = sum(scores[expert] for expert in experts) if spec.renormalise else 1.0
    return {expert: spec.scale * scores[expert] / total for expert in experts}


@dataclass(frozen=True)
class Weights:
    """Random weights of one layer. `router` has one row more for a shared gate."""

    spec: MoeSpec
    router: Tensor
    bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    shared: tuple[Tensor, Tensor] | None

    @classmethod
    def random(cls, spec: MoeSpec, hidden: int, seed: int = 0) -> Weights:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

        shared = (draw(2 * spec.shared, hidden), draw(hidden, spec.shared)) if spec.shared else None
        return cls(
            spec,
            2 * draw(spec.experts + spec.shared_gate, hidden),
            draw(spec.experts) if spec.correction_bias else None,
            draw(spec.experts, 2 * spec.intermediate, hidden),
            draw(spec.experts, hidden, spec.intermediate),
            shared,
        )

    def layer(self, rows: Rows, dtype: torch.dtype = torch.float32) -> MoeMlp:
        """Return the layer with these weights, settled."""
        experts = [_gated(gate_up, down, dtype) for gate_up, down in zip(self.gate_up, self.down, strict=True)]
        shared = _gated(*self.shared, dtype) if self.shared else None
        layer = MoeMlp(self.spec, self.router.to(dtype), self.bias, experts, shared, rows)
        random = torch.Generator().manual_seed(1)
        rows.settle(layer.samples(torch.randn(PROBE_ROWS, self.router.shape[1], generator=random).to(dtype)))
        return layer

    def loop(self, x: Tensor) -> Tensor:
        """Return the result for x [rows, hidden] in float64, one row and one expert at a time."""
        spec, found = self.spec, []
        for row in x.double():
            outputs = self.router.double() @ row
            total = torch.zeros_like(row)
            bias = None if self.bias is None else self.bias.tolist()
            for expert, weight in routed(spec, outputs[: spec.experts].tolist(), bias).items():
                total += weight * _mlp(row, self.gate_up[expert], self.down[expert])
            if self.shared:
                total += _mlp(row, *self.shared) * (torch.sigmoid(outputs[-1]) if spec.shared_gate else 1.0)
            found.append(total)
        return torch.stack(found)


def _mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up.double() @ row).chunk(2)
    return down.double() @ (F.silu(gate) * up)


def _gated(gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Expert:
    scheme = scheme_for(gate_up.device, dtype)
    wide, narrow = Linear(scheme, gate_up.to(dtype)), Linear(scheme, down.to(dtype))
    return lambda rows: narrow(silu_and_mul_fixed(wide(rows)))
