"""The most output tokens a second that any server can give in a cell on this machine, whatever its code."""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine.floors import Machine
from bench.service.cells import Cell
from pdserve.core.model_spec import ModelSpec
from pdserve.core.roofline import ModelShape, StepFlops, StepTraffic

BFLOAT16_BITS = 16


@dataclass(frozen=True, slots=True)
class Floor:
    """The work of a model in bfloat16. Its time is the time of the products at the peak of products, or of the bytes at the
    peak of reads."""

    flops: StepFlops
    traffic: StepTraffic

    @classmethod
    def of(cls, spec: ModelSpec) -> Floor:
        """Return the floor of a model."""
        shape = ModelShape.of(spec)
        return cls(StepFlops.of(shape), StepTraffic.of(shape, weight_bits=BFLOAT16_BITS, kv_bits=BFLOAT16_BITS))

    def tokens_per_s(self, cell: Cell, machine: Machine) -> float:
        """Return the output tokens a second of a server that does only this work, and always has full batches."""
        prompt_s = self.flops.chunk(0, cell.prompt_tokens, rows=1) / machine.bf16_flops_s
        starts = [cell.prompt_tokens + cell.output_tokens // 2] * cell.streams
        step_s = max(self.flops.decodes(starts) / machine.bf16_flops_s, self.traffic.decodes(starts) / machine.read_bytes_s)
        return cell.output_tokens / (prompt_s + (cell.output_tokens - 1) * step_s / cell.streams)
