"""The assignment of GPUs to workers: from the GPUs that are there to each worker's `num_gpus` and its share of memory. Pure.

A worker gets a GPU of its own where there are enough, and an equal share of one where there are not: 4 workers on 2 GPUs get
half a GPU each, and half of the memory that `gpu_memory_utilization` allows. All workers get the same, because a request must
fit wherever it may be placed. Only ranks never share a GPU: where a worker has several, each of them gets a GPU of its own. Ray
then hides all other GPUs from each worker (CUDA_VISIBLE_DEVICES).

Pools that say `num_gpus` themselves, and those on the CPU, are left as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pdserve.cluster.nodes import GPU, Node
from pdserve.config import ClusterConfig, PoolConfig
from pdserve.core.errors import ConfigError

# The GPUs of this machine, counted without loading torch or CUDA, which takes seconds and memory on each of them.

DEVICES: Final = Path("/dev")
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def gpus_here(environment: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Count the GPUs that a process with this environment may use.

    NVIDIA's driver has a file nvidia0, nvidia1, ... for each GPU, and a container has those that were given to it. The variable
    lists some of them; as in CUDA, an id below 0 ends the list.
    """
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
    listed = environment.get(VISIBLE)
    if listed is None:
        return count
    ids = [one.strip() for one in listed.split(",")]
    end = next((index for index, one in enumerate(ids) if not one or one.startswith("-")), len(ids))
    return min(count, end)


SHARES: Final = 10_000
"""Ray counts resources in ten-thousandths, so a share is rounded down to a whole number of them."""


def gpus_of(nodes: Sequence[Node]) -> int:
    """Count the GPUs that the nodes of a Ray cluster have, those in use included: they may be those of our own workers."""
    return sum(int(node.total.get(GPU, 0.0)) for node in nodes)


def workers_of_a_gpu(workers: int, gpus: int) -> int:
    """Return how many workers share a GPU, so that all workers find a place and as few as possible share."""
    assert workers > 0
    assert gpus > 0
    return math.ceil(workers / gpus)


def assigned(config: ClusterConfig, present: int) -> ClusterConfig:
    """Return the configuration with `num_gpus`, the device and the share of memory of each pool.

    present: the number of GPUs that were found. 0 changes nothing: workers take what torch finds on their node. Raises
    `ConfigError` when the pools of a private Ray ask for more GPUs than its one machine has.
    """
    if config.gpus == 0:
        return _replaced(config, {name: _on_cpu(config, pool) for name, pool in _pools(config).items()})
    if present == 0:
        return config
    most = present if config.gpus is None else min(present, config.gpus)
    named = {name: pool for name, pool in _pools(config).items() if pool.num_gpus}
    if named:
        if config.address == "local":  # elsewhere more nodes may come
            _check_fits(named, most)
        return _replaced(config, {name: _on_cpu(config, pool) for name, pool in _pools(config).items() if not pool.num_gpus})
    takers = {name: pool for name, pool in _pools(config).items() if _device(config, pool) != "cpu"}
    workers = sum(pool.offered for pool in takers.values())
    if not workers:
        return config
    engines = {name: config.engine_for(pool) for name, pool in takers.items()}
    for name, engine in engines.items():
        engine.check_gang_on_gpus(f"{name}.engine.device is {engine.device}, there are GPUs")
    if any(engine.degrees.ranks > 1 for engine in engines.values()):
        gangs = {name: dataclasses.replace(pool, num_gpus=float(engines[name].ranks)) for name, pool in takers.items()}
        if config.address == "local":
            _check_fits(gangs, most)
        return _replaced(config, gangs)
    sharing = workers_of_a_gpu(workers, most)
    return _replaced(config, {name: _on_gpu(config, pool, sharing) for name, pool in takers.items()})


def free_gpu(given: str, share: float, used: Sequence[tuple[str, float]], others: Sequence[str]) -> str | None:
    """Return the GPU of a worker that starts beside others: `given` by Ray, if these leave room there, else one of `others`.

    A worker that runs keeps its GPU when it gets another keeper, and Ray may give that keeper another GPU. So the GPU that Ray
    gives to a new worker may be in use. Then the GPU that Ray gave to a worker that runs on another GPU (`others`) is free.
    used: the GPU of each worker that runs, with its share. None: none has room now.
    """
    for gpu in (given, *others):
        if share + sum(part for name, part in used if name == gpu) <= 1 + 1 / SHARES:
            return gpu
    return None


def _pools(config: ClusterConfig) -> dict[str, PoolConfig]:
    return {"prefill": config.prefill, "decode": config.decode}


def _device(config: ClusterConfig, pool: PoolConfig) -> str:
    return config.engine_for(pool).device


def _check_fits(pools: dict[str, PoolConfig], most: int) -> None:
    wanted = sum(pool.num_gpus * pool.offered for pool in pools.values())
    if wanted > most + 1 / SHARES:
        parts = " and ".join(f"{name}: {pool.offered} x num_gpus {pool.num_gpus:g}" for name, pool in pools.items())
        raise ConfigError(
            f"the workers ask for {wanted:g} GPUs ({parts}), and {most} may be used: start fewer workers, or let some share a "
            "GPU with num_gpus below 1 and a smaller engine.gpu_memory_utilization"
        )


def _on_cpu(config: ClusterConfig, pool: PoolConfig) -> PoolConfig:
    """Return a pool that gets no GPU. Only "auto" becomes the CPU: who asks for CUDA by name gets it, or an error."""
    return dataclasses.replace(pool, engine=pool.engine | {"device": "cpu"}) if _device(config, pool) == "auto" else pool


def _on_gpu(config: ClusterConfig, pool: PoolConfig, sharing: int) -> PoolConfig:
    memory_share = config.engine_for(pool).gpu_memory_utilization / sharing
    engine = pool.engine | {"device": "cuda", "gpu_memory_utilization": memory_share}
    return dataclasses.replace(pool, num_gpus=(SHARES // sharing) / SHARES, engine=engine)


def _replaced(config: ClusterConfig, pools: dict[str, PoolConfig]) -> ClusterConfig:
    prefill, decode = pools.get("prefill", config.prefill), pools.get("decode", config.decode)
    return dataclasses.replace(config, prefill=prefill, decode=decode)
