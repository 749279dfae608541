"""The gated MLP of `DenseSpec`. It satisfies `MlpPart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pdserve.core.model_spec import DenseSpec
from pdserve.engine.layers.linear import LinearFor
from pdserve.engine.layers.torch_ops import Ops

if TYPE_CHECKING:
    from pdserve.engine.models.weights import DenseWeights


class DenseMlp:
    """The function down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: DenseSpec, weights: DenseWeights, ops: Ops, linear: LinearFor) -> None:
        """Lay out the weights."""
        self._gated = ops.silu_and_mul if spec.activation == "silu" else ops.gelu_and_mul
        self._gate_up = linear(weights.gate_up)
        self._down = linear(weights.down)

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the result [rows, hidden] of normed [rows, hidden]."""
        return self._down(self._gated(self._gate_up(normed)))
