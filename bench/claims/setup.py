"""The setting of all measurements: the model, how long they may take, and what the machine is."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from bench.claims.figures import MIN_ROUNDS
from bench.engine.floors import cpu_name
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setup:
    """The model, and short or full measurements. `quick`: sizes are a fraction of the full sizes, and the figures prove
    nothing."""

    model: str = "default"
    quick: bool = False

    @cached_property
    def directory(self) -> Path:
        """The folder of the checkpoint."""
        return resolve(self.model)

    @cached_property
    def card(self) -> ModelCard:
        """The model's card."""
        return ModelCard.load(self.directory)

    def size(self, full: int, quick: int) -> int:
        """Return the size of a measurement: tokens, requests or sequences."""
        return quick if self.quick else full

    def runner(self, kv_tokens: int, **settings: Any) -> Any:
        """Load a runner of one compute thread whose KV pool holds `kv_tokens` tokens. `settings` are fields of EngineConfig."""
        from pdserve.config import EngineConfig
        from pdserve.engine.runner import ModelRunner

        fields = {"model": self.model, "dtype": "bfloat16", "threads": 1} | settings
        spec = self.card.kv_layout(16, "bfloat16", str(fields.get("kv_cache_dtype", "auto")))
        fields.setdefault("kv_cache_memory", -(-kv_tokens // 16) * spec.block_bytes)
        return ModelRunner.load(self.directory, self.card, EngineConfig(**fields))


@dataclass
class Rounds:
    """The rounds of one claim. They end early when the time is up, but not before `MIN_ROUNDS`.

    `tick` is called after each round with the share that is done. `clock` returns seconds.
    """

    limit_s: float
    tick: Callable[[float], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    def of(self, count: int) -> Iterator[int]:
        """Yield the numbers of at most `count` rounds, from 0 on."""
        for number in range(count):
            if number >= MIN_ROUNDS and self.clock() - self.began_s > self.limit_s:
                return
            yield number
            self.tick((number + 1) / count)


def describe_machine() -> str:
    """Return the processor, its number of cores, and the memory, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def commit() -> str:
    """Return the short name of the commit. A plus sign means that files outside docs/ differ from it."""
    try:
        name = _git("rev-parse", "--short=7", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--", ".", ":!docs") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown+"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
