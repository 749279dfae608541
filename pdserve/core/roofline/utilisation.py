"""The utilisation of a worker between two of its heartbeats: how busy its engine was, and how near its steps came to the peaks.

MFU is the share of the device's peak of operations that steps with prompts reach while they run; MBU is the share of its peak
of memory reads that all other steps reach (the terms of PaLM, appendix B, and of Databricks' "LLM inference performance
engineering"). Both count what the model needs, not what the engine does, so waste lowers them. A measured peak may be too low
on a machine that was busy then, and a small model may fit into caches: then they exceed 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.core.blocks import BlockCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad

START: Final = WorkerLoad(BlockCounts(0, 0, 0, 0, 0))
"""The load of a worker at the start of its incarnation. Only its counts have a meaning."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The utilisation of one worker in one time. None: unknown, or there were no such steps."""

    busy: float | None = None
    """The share of the time in which the engine made steps, [0, 1]."""
    mfu: float | None = None
    mbu: float | None = None


def utilisation(hello: WorkerHello, old: WorkerLoad, new: WorkerLoad) -> Utilisation:
    """Return the utilisation between two loads of one incarnation. With `START` as the old load: since the start."""
    prompt_s, decode_s = new.prompt_busy_s - old.prompt_busy_s, new.decode_busy_s - old.decode_busy_s
    busy = _share(prompt_s + decode_s, new.uptime_s - old.uptime_s)
    return Utilisation(
        None if busy is None else min(1.0, busy),
        _share(new.prompt_flops - old.prompt_flops, prompt_s * hello.peak_flops_per_s) or None,
        _share(new.decode_read_bytes - old.decode_read_bytes, decode_s * hello.peak_bytes_per_s) or None,
    )


def computed_tokens(role: Role, load: WorkerLoad) -> int:
    """Return the tokens for which the role exists: prompt tokens of prefill workers, output tokens of decode workers."""
    return load.computed_prompt_tokens if role is Role.PREFILL else load.output_tokens


def _share(part: float, whole: float) -> float | None:
    share = part / whole if whole > 0.0 else math.nan
    return share if 0.0 <= share < math.inf else None
