"""The process of a rank other than rank 0: `python -m pdserve.engine.gang.rank`, with a `RankOrder` on its standard input.

It loads its share of the model, writes one line to standard output, and computes the steps of rank 0. It ends when the gang
is lost, and when standard input closes, which the kernel does when rank 0 ends in any way. A rank that is stopped ends as well:
the kernel kills it when the thread of rank 0 that has started it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.config import EngineConfig
from pdserve.core.errors import PdserveError, ReplicaLost
from pdserve.core.shards import RankShare, shares_of_rank
from pdserve.engine.gang.collective import CollectiveRanks
from pdserve.engine.gang.meeting import MetRanks, RankDecoder, meeting_bytes
from pdserve.engine.gang.memory import SharedMemory, gang_bytes, place_of
from pdserve.engine.kv.paged import TORCH_DTYPES
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.models.choice import torch_model
from pdserve.engine.models.native_decoder import NativeDecoder
from pdserve.engine.models.weights import WeightSource
from pdserve.engine.native import library
from pdserve.observe.logs import setup_logging
from pdserve.observe.title import set_title
from pdserve.plugins import resolve

PR_SET_PDEATHSIG: Final = 1
LOAD_S: Final = 600.0
"""The longest time that the other ranks may load after one rank has loaded. All of them read the same files."""
RankModel = NativeDecoder | RankDecoder
"""The share of a rank, which computes steps in rank 0 and follows in the others."""


@dataclass(frozen=True, slots=True)
class RankService:
    """The service of ranks with memory of their own. `name` is `module:function`, a function of as many connections as `lines`
    and of the rank's `KvPool`."""

    name: str
    lines: int


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The order by which rank 0 starts another rank. `number` is the rank's place in the gang, `gpu` the number of its GPU.

    kv, meeting: the descriptors of the memory of each KV group, and of the place where ranks meet. layout: `NativeGang` as
    bytes; None where torch computes. kv_bytes: the bytes of all KV groups. title: the name of the worker, for the list of
    processes. folder: where ranks find each other that gather by collectives of torch; None: they gather in shared memory.
    Such ranks have KV pools of their own, and `kv` is empty. lines: the descriptors of the lines that `service` serves then.
    """

    directory: Path
    card: ModelCard
    config: EngineConfig
    number: int
    max_model_len: int
    kv_bytes: int
    kv: tuple[int, ...]
    meeting: int
    layout: bytes | None
    title: str
    gpu: int | None = None
    folder: Path | None = None
    lines: tuple[int, ...] = ()
    service: str = ""

    @property
    def device(self) -> torch.device:
        """The device on which the rank computes."""
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    @property
    def share(self) -> RankShare:
        """The share of the model that the rank has."""
        return RankShare(self.card.spec, self.config.degrees, self.number)


def main() -> None:
    """Serve as one rank until the gang ends. It never returns."""
    order: RankOrder = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that has started this one
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_leader, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker drains, and then ends the gang
    set_title(order.title)
    setup_logging("info")
    try:
        model, memory = load(order)  # the memory must stay mapped
        _tell({"ready": model.way})
        model.follow()
        del memory
    except ReplicaLost:
        os._exit(0)
    except PdserveError as exc:
        _tell({"error": exc.message})
    except MemoryError:
        _tell({"error": "not enough memory to lay the model's weights out for the compiled code"})
    os._exit(1)


def load(order: RankOrder) -> tuple[RankModel, tuple[KvPool, SharedMemory]]:
    """Load the share of a rank. Return it with the memory in which it computes. Raises `ConfigError` or `ReplicaLost`."""
    config, card = order.config, order.card
    device, dtype = order.device, TORCH_DTYPES[resolve_dtype(config.dtype)]
    torch.set_num_threads(config.threads or 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = SharedMemory(memory_bytes(order), order.meeting)
    kv = pool_of(order, device, dtype)
    with torch.inference_mode():
        weights = stream_weights(order.directory, card, dtype, device, load_format=config.load_format)
        model = model_of(order, weights, kv, meeting)
    if order.service:
        serve: Callable[[list[Connection], KvPool], None] = resolve(order.service, {}, "the service of ranks")
        serve([Connection(descriptor) for descriptor in order.lines], kv)
    return model, (kv, meeting)


def memory_bytes(order: RankOrder) -> int:
    """Return the bytes of the place where the ranks meet."""
    if order.layout is None:
        return meeting_bytes(order.share)
    return gang_bytes(library.NativeGang.from_buffer_copy(order.layout))


def model_of(order: RankOrder, weights: WeightSource, kv: KvPool, meeting: SharedMemory) -> RankModel:
    """Lay out the share of a rank, rank 0 included. Raises `ConfigError`, or `ReplicaLost` when the gang ends meanwhile."""
    config = order.config
    if order.layout is not None:
        scheme = COMPILED_SCHEMES[config.quantization]
        place = place_of(library.NativeGang.from_buffer_copy(order.layout), order.share, meeting)
        return NativeDecoder(order.share, weights, kv, order.max_model_len, scheme, place)
    ranks = _met(order, kv.device, meeting)
    model = torch_model(weights, kv, config, order.max_model_len, ranks)
    ranks.timeout_s = config.step_timeout_s  # all ranks have met
    return RankDecoder(model, ranks)


def _met(order: RankOrder, device: torch.device, meeting: SharedMemory) -> MetRanks:
    """Return the ranks of a gang that computes by torch, which may wait for one that still loads."""
    library = order.config.collective(device.type)
    if order.folder is None or library not in ("gloo", "nccl"):
        return MetRanks(order.share, meeting, LOAD_S)
    most_s = max(LOAD_S, order.config.step_timeout_s)
    return CollectiveRanks(order.share, meeting, most_s, library=library, folder=order.folder, device=device)


def pool_of(order: RankOrder, device: torch.device, dtype: torch.dtype) -> KvPool:
    """Return the KV pool of a rank: that of rank 0, as this process has mapped it, or one of its own."""
    config, spec = order.config, order.card.spec
    kv = order.card.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    most = [group.most_useful(*config.largest_limits(device.type)) for group in kv.groups]
    if not order.kv:
        shares = shares_of_rank(spec, config.degrees, kv, order.number)
        return KvPool(kv, order.kv_bytes, device, dtype, most=most, shares=shares)
    descriptors: Iterator[int] = iter(order.kv)

    def attach(nbytes: int, device: torch.device) -> Tensor:
        return SharedMemory(nbytes, next(descriptors)).bytes

    return KvPool(kv, order.kv_bytes, device, dtype, most=most, allocate=attach)


def _tell(message: dict[str, str]) -> None:
    print(json.dumps(message), flush=True)


def _end_with_leader() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
