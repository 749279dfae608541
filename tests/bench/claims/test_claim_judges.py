"""The rules that judge claims, with made-up figures: each verdict can come out, and none comes out of figures that lack."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.claims.claim import Claim, Verdict, inside, together
from bench.claims.figures import Figures
from bench.claims.registry import CLAIMS, by_worth
from bench.ratios import Ratio

C, R, D = Verdict.CONFIRMED, Verdict.REFUTED, Verdict.DEPENDS
BY_NAME = {claim.name: claim for claim in CLAIMS}


def figures(samples: dict[str, float], **counts: float) -> Figures:
    """Return figures of five equal rounds."""
    return Figures({name: [value] * 5 for name, value in samples.items()}, counts)


def rates(one: float, eight: float, many: float) -> Figures:
    return figures({"tokens/s at 1": one, "tokens/s at 8": eight, "tokens/s at 32": many})


def prompt(prompt_s: float, *steps_s: float) -> Figures:
    return figures({"prompt s": prompt_s} | {f"step s at {b}": s for b, s in zip((1, 8, 32), steps_s, strict=True)})


def batching(times: float) -> Figures:
    return Figures({"continuous tokens/s": [times] * 5, "static tokens/s": [1.0] * 5}, {"requests": 1, "output tokens": 9})


def kv_cache(*gains: float, equal: float = 24) -> Figures:
    samples = {}
    for context, gain in zip((128, 512, 2048), gains, strict=True):
        samples |= {f"cached s at {context}": 1.0, f"computed s at {context}": gain}
    found = figures(samples)
    found.counts = {"tokens compared": 24, "tokens equal": equal}
    return found


def paging(paged_waste: float, whole_waste: float, gain: float) -> Figures:
    found = figures({"paged tokens/s": gain, "contiguous tokens/s": 1.0})
    found.counts = {
        "paged sequences": 20,
        "contiguous sequences": 10,
        "paged waste": paged_waste,
        "contiguous waste": whole_waste,
    }
    return found


def stall(steps: float, gain: float) -> Figures:
    samples = {"chunked steps": steps, "whole longest gap s": gain, "chunked longest gap s": 1.0}
    return Figures(
        {
            name: [value] * 5
            for name, value in (samples | {"chunked TTFT s": 1.0, "whole TTFT s": 1.0, "whole steps": 1.0}).items()
        },
        {"chunks": 16, "prompt tokens": 8190},
    )


def sizes(tpot: float, ttft: float) -> Figures:
    middle = {f"{name} at 512": 1.0 for name in ("TTFT s", "TPOT s", "longest gap s")}
    ends = {"TPOT s at 2048": tpot, "TPOT s at 128": 1.0, "TTFT s at 128": ttft, "TTFT s at 2048": 1.0}
    return figures(middle | ends | {"longest gap s at 128": 1.0, "longest gap s at 2048": 1.0})


def prefix(half: float, most: float) -> Figures:
    return figures({"TTFT s at 0": 1.0, "TTFT s at 512": half, "TTFT s at 960": most})


def kv_dtype(more: float, fp8: float, int8: float) -> Figures:
    gains = {"bfloat16": 1.0, "fp8_e4m3": fp8, "int8": int8, "int4": 1.0}
    found = figures({f"{name} tokens/s": gain for name, gain in gains.items()})
    found.counts = {f"{name} sequences": 10 * (1 if name == "bfloat16" else more) for name in gains}
    return found


def weights(int8: tuple[float, float], int4: tuple[float, float]) -> Figures:
    samples = {}
    for kind, (prefill, decode) in {"bfloat16": (1.0, 1.0), "int8": int8, "int4": int4}.items():
        samples |= {f"{kind} prefill": prefill, f"{kind} decode of 1": decode, f"{kind} decode of 32": 1.0}
    return figures(samples)


def interference(colocated_s: float) -> Figures:
    names = [f"{side} {what} s" for side in ("disaggregated", "colocated") for what in ("ITL p50", "ITL p99", "TTFT")]
    return figures(dict.fromkeys(names, 1.0) | {"colocated ITL p99 s": colocated_s})


def link(slowest: float, fastest: float) -> Figures:
    found = figures({"colocated s": 1.0, "8 MB/s s": slowest} | {f"{speed} MB/s s": fastest for speed in (32, 128, 512, 2048)})
    found.counts = {"modelled break-even MB/s": 30.0}
    return found


def intensity(prompt: float, single: float, many: float) -> Figures:
    names = {"prefill of 512": prompt, "prefill of 2,048": prompt, "decode of 1": single, "decode of 8": single}
    names |= {"decode of 32": many, "decode of 64": many}
    found = figures({"bytes/s": 1.0, "operations/s": 20.0} | {f"{name} s": 1.0 for name in names})
    found.counts = {f"{name} operations": at for name, at in names.items()} | {f"{name} bytes": 1.0 for name in names}
    return found


def speculation(gain: float, acceptance: float) -> Figures:
    cells = [f"{kind} at {batch}" for kind in ("chat", "code", "summary") for batch in (1, 16)]
    samples = {f"{cell} {mode}, tokens/s": 1.0 for cell in cells for mode in ("with", "without")}
    found = figures(samples | {f"{cell} with, tokens/s": gain for cell in cells})
    found.counts = {f"{cell} {what}": count for cell in cells for what, count in (("drafts", 100), ("accepted", acceptance))}
    return found


CASES = [
    ("decode-batch", rates(100, 500, 1200), C),
    ("decode-batch", rates(100, 500, 600), D),
    ("decode-batch", rates(100, 100, 100), R),
    ("prompt-in-steps", prompt(1.0, 0.14, 0.2, 0.4), C),
    ("prompt-in-steps", prompt(1.0, 0.02, 0.14, 0.4), D),
    ("prompt-in-steps", prompt(1.0, 0.01, 0.02, 0.03), R),
    ("continuous-batching", batching(2.5), C),
    ("continuous-batching", batching(1.5), R),
    ("kv-cache", kv_cache(10, 40, 160), C),
    ("kv-cache", kv_cache(10, 40, 160, equal=23), R),
    ("kv-cache", kv_cache(10, 11, 160), D),
    ("paging", paging(0.02, 0.7, 3), C),
    ("paging", paging(0.02, 0.7, 1), D),
    ("paging", paging(0.1, 0.3, 1), R),
    ("chunked-stall", stall(16, 10), C),
    ("chunked-stall", stall(16, 2), D),
    ("chunked-stall", stall(1, 2), R),
    ("chunk-size", sizes(9, 1.2), C),
    ("chunk-size", sizes(9, 1.0), D),
    ("chunk-size", sizes(0.9, 0.9), R),
    ("prefix-hit", prefix(0.5, 0.08), C),
    ("prefix-hit", prefix(0.5, 0.5), D),
    ("prefix-hit", prefix(1.0, 1.0), R),
    ("kv-dtype", kv_dtype(2, 1.5, 1.4), C),
    ("kv-dtype", kv_dtype(2, 1.5, 0.9), D),
    ("kv-dtype", kv_dtype(1, 1.0, 1.0), R),
    ("weight-bits", weights((1.0, 1.8), (0.9, 2.6)), C),
    ("weight-bits", weights((1.5, 1.8), (0.9, 2.6)), D),
    ("weight-bits", weights((1.5, 1.8), (1.2, 2.6)), R),
    ("speculation", speculation(2.5, 80), C),
    ("speculation", speculation(1.5, 80), R),
    ("speculation", speculation(2.5, 20), D),
    ("interference", interference(3.0), C),
    ("interference", interference(0.9), R),
    ("link-speed", link(2.0, 1.01), C),
    ("link-speed", link(1.0, 1.0), D),
    ("link-speed", link(1.0, 1.5), R),
    ("intensity", intensity(400, 1, 15), C),
    ("intensity", intensity(400, 1, 30), D),
    ("intensity", intensity(10, 30, 30), R),
]


@pytest.mark.parametrize(("name", "found", "verdict"), CASES)
def test_a_rule_follows_its_figures(name: str, found: Figures, verdict: Verdict) -> None:
    judgement = BY_NAME[name].judgement(found)
    assert (judgement.verdict, judgement.why[-1]) == (verdict, "."), judgement
    table = BY_NAME[name].table(found)
    assert {len(row) for row in table.rows} == {len(table.header)}


def confirmed() -> list[tuple[Claim, Figures]]:
    return [(BY_NAME[name], found) for name, found, verdict in CASES if verdict is C]


def test_every_claim_has_figures_that_confirm_it_and_figures_that_do_not() -> None:
    assert sorted(claim.name for claim, _ in confirmed()) == sorted(BY_NAME)
    assert {name for name, _, verdict in CASES if verdict is not C} == set(BY_NAME)


@pytest.mark.parametrize(("claim", "found"), confirmed(), ids=lambda value: getattr(value, "name", ""))
def test_no_claim_is_confirmed_without_its_figures(claim: Claim, found: Figures) -> None:
    """(1) no figures, (2) too few rounds, (3) one round that failed, and (4) one figure that is missing."""
    bad = [Figures(), Figures({name: values[:2] for name, values in found.samples.items()}, found.counts)]
    bad += [
        Figures({n: [*v[:-1], wrong] for n, v in found.samples.items()}, found.counts) for wrong in (math.nan, 0.0, math.inf)
    ]
    assert {claim.judgement(one).verdict for one in bad} == {Verdict.NOT_MEASURED}
    asked = [
        claim.judgement(Figures({n: v for n, v in found.samples.items() if n != name}, found.counts)) for name in found.samples
    ]
    assert any(one.verdict is Verdict.NOT_MEASURED for one in asked)


@given(st.floats(0.1, 10), st.floats(0, 5), st.floats(0, 5), st.floats(0.1, 10), st.floats(0, 10))
def test_an_interval_is_confirmed_only_as_a_whole(low: float, width: float, middle: float, floor: float, room: float) -> None:
    found = Ratio(low + min(middle, width), low, low + width)
    verdict = inside(found, floor, floor + room)
    holds = [floor <= value <= floor + room for value in (found.low, found.high)]
    assert (verdict is C) == all(holds)
    assert verdict is not R or not any(holds)


@pytest.mark.parametrize(("claim", "found"), confirmed(), ids=lambda value: getattr(value, "name", ""))
def test_what_was_not_counted_confirms_nothing(claim: Claim, found: Figures) -> None:
    """A break-even may not exist, so the model's count of it may be missing: no verdict follows from it."""
    judged = claim.judgement(Figures(found.samples))
    assert judged.verdict is Verdict.NOT_MEASURED or set(found.counts) <= {
        "requests",
        "output tokens",
        "prompt tokens",
        "modelled break-even MB/s",
    }


def test_parts_that_disagree_depend() -> None:
    assert [together([C, C]), together([R, R]), together([C, R]), together([C, D]), together([R, D])] == [C, R, D, D, D]


def test_the_most_valuable_minute_comes_first_and_all_fit_the_budget() -> None:
    worth = [claim.value / claim.minutes for claim in by_worth()]
    assert worth == sorted(worth, reverse=True)
    assert sum(claim.minutes for claim in CLAIMS) <= 25
