"""Two claims about fewer bits: of KV, for concurrency; and of weights, in prefill and in decode."""

from __future__ import annotations

import gc
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside, together
from bench.claims.figures import Figures
from bench.claims.measured.steps import Steps
from bench.claims.setup import Rounds, Setup

KV_DTYPES: Final = ("bfloat16", "fp8_e4m3", "int8", "int4")
KV_BYTES: Final = 256 * 2**20  # the default of a worker on a CPU
LENGTH: Final = 1024
FASTER: Final = 1.05  # the least ratio that counts as faster
WEIGHTS: Final = ("bfloat16", "int8", "int4")
KINDS: Final = ("prefill", "decode of 1", "decode of 32")


def measure_kv(setup: Setup, rounds: Rounds) -> Figures:
    """Count the sequences that fit the same bytes, and measure steps with these numbers of sequences, in turns."""
    found, all_steps = Figures(), {}
    for dtype in KV_DTYPES:
        kind = "auto" if dtype == "bfloat16" else dtype
        all_steps[dtype] = Steps(setup.runner(0, kv_cache_dtype=kind, kv_cache_memory=setup.size(KV_BYTES, KV_BYTES // 4)))
        runner = all_steps[dtype].runner
        found.counts[f"{dtype} sequences"] = runner.kv.num_blocks * runner.kv.spec.block_size // LENGTH
    for _ in rounds.of(7):
        for dtype, steps in all_steps.items():
            batch = int(found.counts[f"{dtype} sequences"])
            found.add(f"{dtype} tokens/s", batch / steps.decode_s(batch, LENGTH))
    all_steps.clear()
    gc.collect()
    return found


def judge_kv(found: Figures) -> Judgement:
    """Confirm where 8 bits hold about twice the sequences and output more tokens a second, in both formats of 8 bits."""
    verdicts, texts = [], []
    for dtype in ("fp8_e4m3", "int8"):
        more = found.count(f"{dtype} sequences") / found.count("bfloat16 sequences")
        gain = found.ratio(f"{dtype} tokens/s", "bfloat16 tokens/s")
        verdicts += [Verdict.CONFIRMED if 1.8 <= more <= 2.2 else Verdict.REFUTED, inside(gain, FASTER)]
        texts.append(f"{dtype} holds {more:.1f} times the sequences, which output {gain} times the tokens a second")
    return Judgement(together(verdicts), f"Here {' and '.join(texts)}.")


def table_kv(found: Figures) -> Table:
    """Return sequences and throughput by the format of KV."""
    rows = tuple(
        (
            dtype,
            f"{found.count(f'{dtype} sequences'):.0f}",
            f"{found.median(f'{dtype} tokens/s'):,.0f}",
            str(found.ratio(f"{dtype} tokens/s", "bfloat16 tokens/s")),
        )
        for dtype in KV_DTYPES
    )
    return Table(("KV", f"sequences of {LENGTH:,} tokens that fit", "tokens/s of so many", "times bfloat16 (95 %)"), rows)


KV: Final = Claim(
    name="kv-dtype",
    says="KV in 8 bits holds twice the sequences in the same memory, and so raises throughput.",
    source="vLLM's page on quantised KV; KIVI, Liu et al., ICML 2024, tells the same of 2 bits",
    rule="8 bits hold 1.8 to 2.2 times the sequences, and these output over 1.05 times the tokens a second, with the interval.",
    minutes=0.8,
    measure=measure_kv,
    judge=judge_kv,
    table=table_kv,
)


def measure_weights(setup: Setup, rounds: Rounds) -> Figures:
    """Measure a prompt of 512 tokens and decode steps with each format of weights, in turns."""
    found, all_steps = Figures(), {}
    for kind in WEIGHTS:
        all_steps[kind] = Steps(setup.runner(32 * 128, quantization=None if kind == "bfloat16" else kind))
    for _ in rounds.of(7):
        for kind, steps in all_steps.items():
            found.add(f"{kind} prefill", 512 / steps.prefill_s(512))
            for batch in (1, 32):
                found.add(f"{kind} decode of {batch}", batch / steps.decode_s(batch, 128))
    all_steps.clear()
    gc.collect()
    return found


def judge_weights(found: Figures) -> Judgement:
    """Confirm where decode of one sequence is faster and prefill is not; refute where both are. If the formats differ, it
    depends."""
    verdicts, texts = [], []
    for kind in WEIGHTS[1:]:
        prefill, decode = (found.ratio(f"{kind} {phase}", f"bfloat16 {phase}") for phase in KINDS[:2])
        faster, helps = inside(decode, FASTER), inside(prefill, FASTER)
        if faster is not Verdict.CONFIRMED:
            verdicts.append(faster)
        else:
            opposite = {Verdict.CONFIRMED: Verdict.REFUTED, Verdict.REFUTED: Verdict.CONFIRMED}
            verdicts.append(opposite.get(helps, Verdict.DEPENDS))
        texts.append(f"{kind} makes prefill {prefill} and decode {decode} times as fast")
    return Judgement(together(verdicts), f"Here {' and '.join(texts)}.")


def table_weights(found: Figures) -> Table:
    """Return tokens a second by the format of weights, and the ratios to bfloat16."""
    rows = tuple(
        (
            kind,
            *(
                f"{found.median(f'{kind} {phase}'):,.0f}"
                + ("" if kind == "bfloat16" else f": {found.ratio(f'{kind} {phase}', f'bfloat16 {phase}')}")
                for phase in KINDS
            ),
        )
        for kind in WEIGHTS
    )
    return Table(("weights", *(f"{phase}, tokens/s: times bfloat16 (95 %)" for phase in KINDS)), rows)


WEIGHT: Final = Claim(
    name="weight-bits",
    says="Quantised weights make decode faster and prefill not, because prefill is bound by compute.",
    source="articles on weight-only formats such as AWQ and GPTQ; articles on int8 such as SmoothQuant say that both gain",
    rule="with int8 and with int4 decode of one sequence gains over 1.05 times, and prefill does not.",
    minutes=0.8,
    value=3,
    measure=measure_weights,
    judge=judge_weights,
    table=table_weights,
)
