"""The layouts that a search tries, from what the operator wrote and what the workers say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import inference_pb2

CHUNKS: Final = (128, 256, 512, 1024)
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """The limits that the workers of a cluster were started with, the smallest one of each."""

    workers: int
    chunk_tokens: int
    """The largest step in tokens. 0: a worker did not say."""
    max_num_seqs: int


def limits_of(state: inference_pb2.GetClusterStateResponse) -> SpaceLimits:
    """Return the limits of the linked workers. Raises `ConfigError` when there are none."""
    hellos = [one.hello for one in state.workers]
    if not hellos:
        raise ConfigError("no worker is linked to this router: wait until `pdserve status` shows the workers")
    chunk_tokens = min(one.max_num_batched_tokens for one in hellos)
    return SpaceLimits(len(hellos), chunk_tokens, min(one.max_num_seqs for one in hellos))


def chunks_of(text: str, limits: SpaceLimits) -> tuple[int, ...]:
    """Read `--chunks`, numbers with commas between. Raises `ConfigError` for one above what the workers have memory for.

    "auto" means those of `CHUNKS` that fit, or else the largest step of the workers.
    """
    most = limits.chunk_tokens
    if text == AUTO:
        return tuple(one for one in CHUNKS if not most or one <= most) or (most,)
    try:
        chunks = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--chunks: {text!r} is not a list of whole numbers with commas between, nor {AUTO}") from None
    if chunks[0] < 1 or (most and chunks[-1] > most):
        raise ConfigError(f"--chunks: {text} must be from 1 to {most}, the largest max_num_batched_tokens of all workers")
    return chunks


def splits_of(text: str, workers: int, prompt_share: float | None) -> tuple[int, ...]:
    """Read `--splits`, such as 1:3,2:2,0:4, and return the numbers of prefill workers, the most promising first.

    "auto" means every split, with the one first whose prefill workers have the `prompt_share` of all computing, and then its
    neighbours. None: it is unknown, and the split in halves comes first. Raises `ConfigError`.
    """
    if text == AUTO:
        middle = workers * (0.5 if prompt_share is None else prompt_share)
        return (0, *sorted(range(1, workers), key=lambda prefill: (abs(prefill - middle), prefill)))
    found: list[int] = []
    for part in text.split(","):
        prefill, colon, decode = part.strip().partition(":")
        if not colon or not prefill.isascii() or not prefill.isdigit() or not decode.isascii() or not decode.isdigit():
            raise ConfigError(f"--splits: {part!r} is not of the form PREFILL:DECODE, such as 1:3, nor {AUTO}")
        if int(prefill) + int(decode) != workers or int(decode) < 1:
            raise ConfigError(
                f"--splits: {part!r} must have all {workers} workers of the cluster, and at least one that decodes"
            )
        if int(prefill) not in found:
            found.append(int(prefill))
    return tuple(found)


def first_chunk(chunks: Sequence[int], limits: SpaceLimits) -> int:
    """Return the size with which splits are compared: 512 as vLLM's older default, or the one nearest to it."""
    wanted = min(512, limits.chunk_tokens or 512)
    return min(chunks, key=lambda one: abs(one - wanted))
