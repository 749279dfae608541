"""The clusters of a search over degrees: what the model and the machine allow, and how a cluster for a layout is started.

A worker cannot change its degree. So such a search starts clusters itself, one after the other, on this machine. Each layout
has all cores or GPUs that the search has, so goodputs of different degrees are compared at one cost.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.resolve import resolve
from pdserve.client.own_cluster import OwnCluster
from pdserve.config import ClusterConfig
from pdserve.config_loader import load
from pdserve.core.errors import ConfigError
from pdserve.core.shards import MOST_DEGREE, Degrees
from pdserve_bench.layout import Layout
from pdserve_bench.search.result import Device
from pdserve_bench.search.settings import split_ranks, splits_of

FLAG: Final = "--tensor-parallel-size"


@dataclass(frozen=True, slots=True)
class DegreeSpace:
    """The degrees that a search tries, and the clusters that it may start."""

    pairs: tuple[tuple[int, int], ...]
    """The ranks of one prefill and of one decode worker. Pairs of equal numbers, between which workers flip, come first."""
    ranks: int
    """The cores or GPUs: as many as each layout has ranks."""
    device: Device
    config: Path | None
    model: str | None

    @property
    def first(self) -> Layout:
        """A layout with the highest degree. Its cluster is started first, so that what refuses gangs does so at once."""
        most = max(itertools.chain.from_iterable(self.pairs))
        pair = next(pair for pair in self.pairs if most in pair)
        colocated, apart = split_ranks(range(self.ranks), self.ranks, *pair)
        prefill = (*colocated, *apart)[0]
        return Layout(prefill, (self.ranks - prefill * pair[0]) // pair[1], 1, 1, *pair)

    def start(self, layout: Layout) -> OwnCluster:
        """Return a cluster that can be brought to a layout, not started yet.

        Where all workers are alike, half of them are in each pool, so that flips lead to every split.
        """
        prefill, decode = layout.prefill, layout.decode
        if layout.prefill_ranks == layout.decode_ranks:
            prefill, decode = layout.workers // 2, layout.workers - layout.workers // 2
        settings = {
            "prefill.engine.tensor_parallel_size": layout.prefill_ranks,
            "decode.engine.tensor_parallel_size": layout.decode_ranks,
            "gpus": self.ranks if self.device == "GPU" else 0,
            **({"engine.threads": 1} if self.device == "core" else {}),
        }
        flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return OwnCluster(prefill, decode, self.config, flags=[*flags, *(["--model", self.model] if self.model else [])])

    @staticmethod
    def fits(running: Layout, wanted: Layout) -> bool:
        """Tell whether the cluster that was started for one layout can be brought to another one by flips and limits."""
        alike = wanted.prefill_ranks == wanted.decode_ranks
        return wanted.degrees == running.degrees and (alike or wanted.prefill == running.prefill)


def degree_space(flags: Mapping[str, Any]) -> DegreeSpace:
    """Return what the flags of a search over degrees ask for. Raises `ConfigError` for what the model, the settings or the
    machine do not allow, before anything is started."""
    degrees = _degrees_of(flags["tensor_parallel_size"])
    model = flags["model"]
    config = load(ClusterConfig, flags["config"], settings={"engine.model": model} if model else {})
    device, ranks = _devices_of(flags, config, degrees)
    _check_settings(config, device)
    if config.engine.backend == "pdserve":
        spec = ModelCard.load(resolve(config.engine.model, load_format=config.engine.load_format)).spec
        for degree in degrees:
            try:
                Degrees(degree).check(spec, equal=resolve_dtype(config.engine.dtype) != "float32")
            except ConfigError as exc:
                raise ConfigError(f"{FLAG}: {exc.message}") from exc
    prefills = splits_of(flags["splits"], ranks, None, f"{device}s")
    every = [*((one, one) for one in degrees), *itertools.permutations(degrees, 2)]
    pairs = tuple(pair for pair in every if any(split_ranks(prefills, ranks, *pair)))
    for degree in degrees:
        if not any(degree in pair for pair in pairs):
            raise ConfigError(
                f"{FLAG}: no split of {ranks} {device}s has workers of {degree} ranks and uses all {device}s: give "
                f"--{device.lower()}s {-(-ranks // degree) * degree}, other --splits, or leave {degree} out"
            )
    return DegreeSpace(pairs, ranks, device, flags["config"], model)


def _degrees_of(text: str) -> tuple[int, ...]:
    """Read `--tensor-parallel-size`, numbers with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_DEGREE for part in parts):
        raise ConfigError(f"{FLAG}: {text!r} is not a list of numbers from 1 to {MOST_DEGREE} with commas between, such as 1,2")
    return tuple(sorted({int(part) for part in parts}))


def _devices_of(flags: Mapping[str, Any], config: ClusterConfig, degrees: Sequence[int]) -> tuple[Device, int]:
    """Return on what ranks compute, and how many there are of it."""
    if flags["cores"] is not None and flags["gpus"] is not None:
        raise ConfigError("--cores and --gpus: a rank computes on a core or on a GPU: leave one of the two away")
    if flags["gpus"] is not None:
        if config.engine.backend == "pdserve" and max(degrees) > 1:
            raise ConfigError(
                "--gpus: gangs of pdserve's own engine compute on CPUs: give --cores, or set engine.backend: vllm"
            )
        return "GPU", flags["gpus"]
    here = len(os.sched_getaffinity(0))
    cores = flags["cores"] or here
    if cores > here and not config.engine.oversubscribe:
        raise ConfigError(f"--cores: {cores} is more than this machine has ({here})")
    return "core", cores


def _check_settings(config: ClusterConfig, device: Device) -> None:
    """Refuse settings with which a rank is not one core or GPU of this machine."""
    if config.address != "local":
        raise ConfigError(
            f"address is {config.address}: a search over degrees starts its clusters on this machine: set it to local"
        )
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        engine = config.engine_for(pool)
        if engine.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{name}.engine.pipeline_parallel_size is {engine.pipeline_parallel_size}: a search over tensor_parallel_size "
                "needs 1, since a rank is one core or GPU"
            )
        if device == "core" and engine.threads > 1:
            raise ConfigError(
                f"{name}.engine.threads is {engine.threads}: a search over degrees gives each rank one core: set it to 1 or 0"
            )
