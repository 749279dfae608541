"""What quantisation costs: perplexity on real English text, and how often the most likely token is the same.

    python -m bench.quality [--model default] [--text FILE] [--tokens 8192]

The text is the language reference that Python ships (`pydoc_data.topics`) unless a file is given, cut into windows of
512 tokens. Every setting reads the same windows; agreement is with float32 at the same place of the same text.
"""

from __future__ import annotations

import argparse
import gc
import math
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]

import torch
from rich.console import Console
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.batch import SequenceSlice, StepPlan
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.engine.runner import ModelRunner
from pdserve.text.tokenizer import Tokenizer

WINDOW = 512
SETTINGS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
)


def windows_of(directory: Path, text: str, tokens: int) -> list[tuple[int, ...]]:
    ids = Tokenizer.load(directory).encode(text[: 8 * tokens])[:tokens]
    return [tuple(ids[i : i + WINDOW]) for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def read(runner: ModelRunner, windows: list[tuple[int, ...]]) -> tuple[float, torch.Tensor]:
    """Mean negative log-likelihood of each next token, and the most likely token at every place."""
    loss, best = 0.0, []
    table = tuple(BlockId(i) for i in range(ceil_div(WINDOW, runner.kv.layout.block_size)))
    for window in windows:
        logits = runner.logits(StepPlan((SequenceSlice(SeqId(0), 0, window, table, None),)))
        loss += torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:])).item()
        best.append(logits.argmax(-1))
    return loss / len(windows), torch.cat(best)


def run(directory: Path, text: str, tokens: int) -> Table:
    card = ModelCard.load(directory)
    windows = windows_of(directory, text, tokens)
    table = Table("setting", "perplexity", "against float32", "same token as float32", title=f"{card.name}, {tokens:,} tokens")
    expected: tuple[float, torch.Tensor] | None = None
    for setting in SETTINGS:
        runner = ModelRunner.load(directory, card, EngineConfig(kv_cache_memory=64 * MIB, **setting))  # type: ignore[arg-type]
        loss, best = read(runner, windows)
        expected = expected or (loss, best)
        same = (best == expected[1]).double().mean().item()
        cells = (f"{math.exp(loss):.3f}", f"{math.expm1(loss - expected[0]):+.2%}", f"{same:.1%}")
        table.add_row(" ".join(setting.values()), *cells)
        del runner
        gc.collect()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    text = "\n\n".join(topics.topics.values()) if args.text is None else args.text.read_text(encoding="utf-8")
    Console(width=100).print(run(resolve(args.model), text, args.tokens))


if __name__ == "__main__":
    main()
