"""Two claims about chunked prefill: how long a long prompt stops the streams beside it, and which times the chunk size
trades."""

from __future__ import annotations

import time
from typing import Any, Final

from bench.claims.claim import Claim, Judgement, Table, inside, together
from bench.claims.figures import Figures
from bench.claims.setup import Rounds, Setup
from bench.engine.chunks import STREAM_TOKENS, percentile, run_prompt, started

LONG: Final = 8190  # with its first tokens it fills the default model's 8,192 positions
CHUNK: Final = 512
MIXED: Final = 4000
SIZES: Final = (128, 512, 2048)
STREAMS: Final = 4


def _runner(setup: Setup, tokens: int) -> Any:
    return setup.runner(tokens + 2 + STREAMS * (STREAM_TOKENS + 512), max_model_len=tokens + 2)


def measure_stall(setup: Setup, rounds: Rounds) -> Figures:
    """Run the prompt beside the streams, whole and in chunks in turns. Times are CPU time of the engine thread."""
    tokens = setup.size(LONG, 1024)
    runner = _runner(setup, tokens)
    found = Figures(counts={"prompt tokens": tokens, "chunks": -(-tokens // CHUNK)})
    for _ in rounds.of(3):
        for name, size in (("whole", tokens + STREAMS), ("chunked", CHUNK)):
            with started(runner, size, time.thread_time) as engine:
                ttft_s, gaps_s = run_prompt(engine, STREAMS, tokens)
            found.add(f"{name} longest gap s", max(gaps_s))
            found.add(f"{name} TTFT s", ttft_s)
            found.add(f"{name} steps", len(gaps_s))
    return found


def judge_stall(found: Figures) -> Judgement:
    """Confirm where each stream gets a token between two chunks and the longest gap shrinks by half the number of chunks."""
    chunks = found.count("chunks")
    tokens = inside(found.interval("chunked steps"), chunks)
    gain = found.ratio("whole longest gap s", "chunked longest gap s")
    cost = found.ratio("chunked TTFT s", "whole TTFT s")
    why = (
        f"Here each stream has {found.median('chunked steps'):.0f} tokens while the prompt's {chunks:.0f} chunks are computed, "
        f"its longest gap is {gain} times shorter, and the prompt takes {cost} times as long."
    )
    return Judgement(together([tokens, inside(gain, chunks / 2)]), why)


def table_stall(found: Figures) -> Table:
    """Return the longest gap of a stream and the prompt's time, both ways."""
    rows = tuple(
        (
            name,
            f"{found.median(f'{name} steps'):.0f}",
            f"{found.median(f'{name} longest gap s') * 1e3:,.0f}",
            f"{found.median(f'{name} TTFT s'):.2f}",
        )
        for name in ("whole", "chunked")
    )
    tokens = f"{found.count('prompt tokens'):,.0f}"
    return Table((f"prompt of {tokens} tokens", "tokens of each stream meanwhile", "longest gap ms", "TTFT s"), rows)


STALL: Final = Claim(
    name="chunked-stall",
    says="A prompt of 8,192 tokens stops all streams until it is computed; in chunks, a decode step runs between each two.",
    source='Sarathi-Serve: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference", OSDI 2024',
    rule="each stream has a token for each chunk, and the longest gap shrinks at least by half the number of chunks.",
    minutes=2.2,
    value=3,
    measure=measure_stall,
    judge=judge_stall,
    table=table_stall,
)


def measure_sizes(setup: Setup, rounds: Rounds) -> Figures:
    """Run a prompt beside the streams with each chunk size in turns."""
    tokens = setup.size(MIXED, 1024)
    runner = _runner(setup, tokens)
    found = Figures(counts={"prompt tokens": tokens})
    for _ in rounds.of(5):
        for size in SIZES:
            with started(runner, size, time.thread_time) as engine:
                ttft_s, gaps_s = run_prompt(engine, STREAMS, tokens)
            found.add(f"TTFT s at {size}", ttft_s)
            found.add(f"TPOT s at {size}", sum(gaps_s) / len(gaps_s))
            found.add(f"longest gap s at {size}", percentile(gaps_s, 99))
    return found


def judge_sizes(found: Figures) -> Judgement:
    """Confirm where the largest chunk has the longer TPOT and the smallest chunk has the longer TTFT, beyond the intervals."""
    tpot = found.ratio(f"TPOT s at {SIZES[-1]}", f"TPOT s at {SIZES[0]}")
    ttft = found.ratio(f"TTFT s at {SIZES[0]}", f"TTFT s at {SIZES[-1]}")
    sizes = f"{SIZES[-1]:,} instead of {SIZES[0]}"
    why = f"Here chunks of {sizes} make TPOT {tpot} times as long, and the reverse TTFT {ttft} times."
    return Judgement(together([inside(tpot, 1.05), inside(ttft, 1.05)]), why)


def table_sizes(found: Figures) -> Table:
    """Return TTFT of the prompt and the gaps of the streams by chunk size."""
    rows = tuple(
        (
            f"{size:,}",
            f"{found.median(f'TTFT s at {size}'):.2f}",
            f"{found.median(f'TPOT s at {size}') * 1e3:,.0f}",
            f"{found.median(f'longest gap s at {size}') * 1e3:,.0f}",
        )
        for size in SIZES
    )
    return Table(("chunk", "TTFT of the prompt s", "TPOT of the streams meanwhile ms", "longest gap ms"), rows)


SIZE: Final = Claim(
    name="chunk-size",
    says="The chunk size trades TTFT against TPOT: small chunks delay the prompt, large chunks delay the streams.",
    source="Sarathi-Serve (OSDI 2024), and the tuning advice of vLLM for `max_num_batched_tokens`",
    rule="larger chunks make TPOT longer and smaller ones TTFT, each by over 5 % between 128 and 2,048 tokens.",
    minutes=1.8,
    measure=measure_sizes,
    judge=judge_sizes,
    table=table_sizes,
)
