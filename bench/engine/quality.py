"""Measures the loss by quantisation: perplexity on real English text, and how often the most likely token is the same.

    python -m bench.engine.quality [--model default] [--text FILE] [--tokens 8192]

The text is the language reference that Python ships (`pydoc_data.topics`) unless a file is given, cut into windows of
512 tokens. Every setting reads the same windows; the token is compared with that of float32 at the same place of the text.
The columns of blocks and tokens say how many the default KV memory holds. Quantised KV depends on how its tokens were cut
into steps: a block of a prompt is rounded once, while a block that is filled token by token is rounded several times (`1 a
step`, with fewer windows because it takes longer).
"""

from __future__ import annotations

import argparse
import gc
import math
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.runner import ModelRunner
from pdserve.text.tokenizer import Tokenizer

WINDOW = 512
SLOWER = 4  # one of this many windows is computed token by token as well
QUANTISED: Final = ("fp8_e4m3", "int8", "int4")
NAMES: Final = {"quantization": "weights ", "kv_cache_dtype": "KV "}
SETTINGS: Final[tuple[dict[str, str], ...]] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    *({"dtype": "bfloat16", "kv_cache_dtype": kind} for kind in QUANTISED),
)


def windows_of(directory: Path, text: str, tokens: int) -> list[tuple[int, ...]]:
    """Return the first `tokens` token ids of the text, cut into whole windows."""
    ids = Tokenizer.load(directory).encode(text[: 8 * tokens])[:tokens]
    return [tuple(ids[i : i + WINDOW]) for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def read(runner: ModelRunner, windows: list[tuple[int, ...]], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the windows, `step` tokens at once.

    Returns the mean negative log-likelihood of the next token [windows], and the most likely token [windows, WINDOW].
    """
    losses, best = [], []
    table = tuple(BlockId(i) for i in range(ceil_div(WINDOW, runner.kv.spec.block_size)))
    for window in windows:
        pieces = [SequenceSlice(SeqId(0), at, window[at : at + step], (table,), ()) for at in range(0, WINDOW, step)]
        logits = torch.cat([runner.logits(StepPlan((piece,))) for piece in pieces])
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:])))
        best.append(logits.argmax(-1))
    return torch.stack(losses), torch.stack(best)


def run(directory: Path, text: str, tokens: int) -> Table:
    """Measure all settings and return the table of results."""
    card = ModelCard.load(directory)
    windows = windows_of(directory, text, tokens)
    columns = ("setting", "perplexity", "against float32", "same token as float32", "KV blocks", "KV tokens")
    table = Table(*columns, title=f"{card.name}, {tokens:,} tokens")
    expected: tuple[torch.Tensor, torch.Tensor] | None = None
    for setting in SETTINGS:
        config = EngineConfig(kv_cache_memory=64 * MIB, **setting)  # type: ignore[arg-type]
        runner = ModelRunner.load(directory, card, config)
        blocks = EngineConfig().kv_cache_memory // runner.kv.spec.block_bytes
        for step, some in ((WINDOW, windows), (1, windows[: max(1, len(windows) // SLOWER)])):
            if step == 1 and not runner.kv.spec.quantised:
                continue
            losses, best = read(runner, some, step)
            expected = expected or (losses, best)
            loss, loss_then = losses.mean().item(), expected[0][: len(some)].mean().item()
            same = (best == expected[1][: len(some)]).double().mean().item()
            name = " ".join(NAMES.get(key, "") + value for key, value in setting.items()) + ("" if step > 1 else ", 1 a step")
            cells = (f"{math.exp(loss):.3f}", f"{math.expm1(loss - loss_then):+.2%}", f"{same:.1%}", f"{blocks:,}")
            table.add_row(name, *cells, f"{blocks * config.block_size:,}")
        del runner
        gc.collect()
    return table


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    text = "\n\n".join(topics.topics.values()) if args.text is None else args.text.read_text(encoding="utf-8")
    Console(width=120).print(run(resolve(args.model), text, args.tokens))


if __name__ == "__main__":
    main()
