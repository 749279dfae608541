"""`make bench-load`: how long a checkpoint takes from its files to a model that is laid out, and how much memory this takes.

A Llama of a wanted size with random weights is written once into the cache. A separate process then loads it twice: from
the disk, after its files were dropped from the page cache, and from the page cache. The peak of anonymous memory, which no
file holds, is set against its bound: the weights in their final layout, and one shard.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from pdserve.checkpoint.cache import build_once, default_cache_dir
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.layout import weight_files
from pdserve.checkpoint.shards import INDEX
from pdserve.checkpoint.tiny import write_tiny
from pdserve.config import DTYPES, MIB, QUANTIZATIONS, EngineConfig
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.memory.host import anonymous_bytes, return_freed_memory
from pdserve.engine.runner import ModelRunner

VERSION: Final = 1
SAMPLE_S: Final = 0.002
KV_BYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a Llama without shared KV heads, and the bytes of a shard of its checkpoint."""

    layers: int
    hidden: int
    ffn: int
    vocab: int = 32_000
    shard_bytes: int = 1 << 30


SIZES: Final = {
    "0.03B": Size(layers=8, hidden=512, ffn=2048, vocab=512, shard_bytes=16 << 20),
    "0.5B": Size(layers=32, hidden=1024, ffn=2816, shard_bytes=256 << 20),
    "1B": Size(layers=16, hidden=2048, ffn=5632),
    "3B": Size(layers=26, hidden=3072, ffn=8192),
    "7B": Size(layers=32, hidden=4096, ffn=11008),
}


@dataclass(frozen=True, slots=True)
class Loading:
    """One loading, in bytes and seconds. weights_bytes: in the dtype of the model."""

    way: str
    cached: bool
    load_s: float
    file_bytes: int
    weights_bytes: int
    shard_bytes: int
    peak_bytes: int


def write_model(directory: Path, size: Size) -> None:
    """Write a checkpoint in bfloat16 with random weights into the empty `directory`."""
    write_tiny(directory)
    for old in weight_files(directory):
        old.unlink()
    path = directory / "config.json"
    heads = size.hidden // 64
    own = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "vocab_size": size.vocab,
    }
    own |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    card = ModelCard.load(directory, load_format="dummy")
    dummy = stream_weights(directory, card, torch.bfloat16, torch.device("cpu"), load_format="dummy")
    where = {}
    with dummy.source.opened() as copy:
        for number, shard in enumerate(_shards(card, size.shard_bytes), start=1):
            file = f"model-{number:05d}.safetensors"
            tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shard.items()}
            for name, tensor in tensors.items():
                copy(name, tensor)
            save_file(tensors, directory / file)
            where |= dict.fromkeys(shard, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))


def _shards(card: ModelCard, limit: int) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in card.tensors.shapes(card.spec).items():
        nbytes = 2 * torch.Size(shape).numel()
        if shard and filled + nbytes > limit:
            yield shard
            shard, filled = {}, 0
        shard[name] = shape
        filled += nbytes
    yield shard


def measure(directory: Path, dtype: str, quantization: str | None, *, cached: bool) -> Loading:
    """Load a model in this process and return what it took. The model is dropped afterwards."""
    card, files = ModelCard.load(directory), weight_files(directory)
    config = EngineConfig(dtype=dtype, quantization=quantization, device="cpu", kv_cache_memory=KV_BYTES)
    for path in files:
        _read(path) if cached else _forget(path)
    return_freed_memory()
    before, began_s = anonymous_bytes(), time.perf_counter()
    with _sampled() as seen:
        runner = ModelRunner.load(directory, card, config, progress=lambda *_: seen.append(anonymous_bytes()))
    load_s = time.perf_counter() - began_s
    sizes = [path.stat().st_size for path in files]
    way = f"{runner.describe().partition(' (')[0]}{f' {quantization}' if quantization else ''}"
    return Loading(way, cached, load_s, sum(sizes), runner.weights_bytes, max(sizes), max(*seen, anonymous_bytes()) - before)


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """Collect the anonymous memory of this process every `SAMPLE_S` until the end of the context."""
    seen: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            seen.append(anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(16 * MIB):
            pass


def _table(size: str, found: Sequence[Loading]) -> Table:
    made = Table(title=f"a Llama of {size} with random weights, in bfloat16 on the disk")
    for name in ("computed by", "files", "seconds", "GB/s", "weights MiB", "peak MiB", "bound MiB", "peak / bound"):
        made.add_column(name, justify="left" if name in ("computed by", "files") else "right")
    for one in found:
        bound = one.weights_bytes + one.shard_bytes
        cells = (one.weights_bytes / MIB, one.peak_bytes / MIB, bound / MIB)
        rate = one.file_bytes / one.load_s / 1e9
        where = "cached" if one.cached else "on disk"
        numbers = [f"{cell:,.0f}" for cell in cells]
        made.add_row(one.way, where, f"{one.load_s:.1f}", f"{rate:.2f}", *numbers, f"{one.peak_bytes / bound:.2f}")
    return made


def main() -> None:
    """Write the checkpoint if it is not there, and load it in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="7B", help="7B needs 27 GB: half on the disk, half in memory")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"])
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--measure", type=Path, metavar="DIRECTORY", help="load this one, and print JSON")
    args = parser.parse_args()
    if args.measure is not None:
        found = [
            measure(args.measure, dtype, args.quantization, cached=cached) for dtype in args.dtype for cached in (False, True)
        ]
        print(json.dumps([asdict(one) for one in found]))
        return
    size = SIZES[args.size]
    directory = build_once(default_cache_dir() / f"bench-load-{args.size}-v{VERSION}", lambda path: write_model(path, size))
    command = [sys.executable, "-m", "bench.engine.loading", "--measure", str(directory), "--dtype", *args.dtype]
    command += ["--quantization", args.quantization] if args.quantization else []
    said: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    Console(width=120).print(_table(args.size, [Loading(**one) for one in said]))


if __name__ == "__main__":
    main()
