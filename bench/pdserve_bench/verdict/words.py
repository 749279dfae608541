"""The verdict in simple sentences. The terminal, the page and the picture print the same ones. Pure.

Every number of a sentence is a number of the verdict.
"""

from __future__ import annotations

from typing import Final

from pdserve_bench.verdict import units
from pdserve_bench.verdict.data import (
    Binding,
    CandidateData,
    ConstraintData,
    DecisionData,
    DegreeData,
    Doubt,
    FlipData,
    VerdictData,
)
from pdserve_bench.verdict.units import number, percent, rate, seconds, spread, times


def headline(verdict: VerdictData) -> str:
    """Return the answer in one line."""
    return HEADLINES[verdict.decision]


def trust(verdict: VerdictData) -> str:
    """Return how far the verdict may be trusted, in one sentence."""
    serious = sum(one.serious for one in verdict.doubts)
    if not serious:
        return "Nothing serious speaks against this measurement."
    return "One thing could change this answer." if serious == 1 else "Several things could change this answer."


def reasons(verdict: VerdictData) -> list[str]:
    """Return the sentences below the headline."""
    found = [_ratio(verdict)]
    if verdict.chosen is not None and verdict.decision not in (DecisionData.NOTHING, DecisionData.OPEN):
        found.append(_run(verdict, verdict.chosen))
    found += [_degree(one, verdict.device) for one in verdict.degrees]
    if verdict.compared is not None:
        found += _compared(verdict)
    if verdict.moved is not None and verdict.moved.bytes_per_request:
        one = verdict.moved
        found.append(
            f"Two pools move {units.size(one.bytes_per_request)} of KV for each request, "
            f"{units.size(one.bytes_per_s)} a second at {rate(one.rate_per_s)}. The median request waits "
            f"{seconds(one.exposed_transfer_p50_s)} for it after its first "
            "token."
        )
    return [one for one in found if one]


def _ratio(verdict: VerdictData) -> str:
    two, one, ratio = verdict.apart, verdict.together, verdict.ratio
    if verdict.decision is DecisionData.UNMEASURED:
        return "The search has no layout with a point that counts. Mend what is named below, and measure again."
    if verdict.decision is DecisionData.NOTHING:
        return (
            f"At every measured rate fewer than {percent(verdict.attainment)} of the requests met {targets(verdict)}. "
            "Allow longer times, or use faster workers."
        )
    if verdict.decision is DecisionData.OPEN:
        return (
            "No measured rate is known to be kept, and not every layout is known to miss one: the runs were too few or too "
            "short. Search for longer (--budget-minutes, --max-point-s)."
        )
    if two is None or one is None or ratio is None:
        missing = "no layout with two pools" if two is None else "no colocated layout"
        return f"The search measured {missing}. Measure one on the same {verdict.device}s."
    if ratio.value is None:
        return f"Only two pools meet the targets: {two.name} serves {rate(two.goodput.value or 0.0)}, and {one.name} none."
    return (
        f"Two pools ({two.name}) serve {times(ratio.value)} times the requests of the best colocated layout ({one.name}) "
        f"on the same {verdict.device}s; 95 % interval: {units.ratio_between(ratio)}."
    )


def _degree(found: DegreeData, device: str) -> str:
    """Return whether gangs pay in one place."""
    who, least = f"TP {number(found.ranks)} for {PLACES[found.place]}", f"TP {number(found.least_ranks)}"
    if not found.each.value and not found.least_each.value:
        return f"{who} was measured, and no rate was kept with it, nor with {least}."
    pays = {True: "pays beside", False: "does not pay beside", None: "cannot be told apart from"}[found.pays]
    ratio = "" if found.ratio.value is None else f", {times(found.ratio.value)} times as many"
    return (
        f"{who} {pays} {least}: {found.name} serves {spread(found.each)} requests/s a {device}, and {found.least_name} "
        f"{spread(found.least_each)}{ratio}; 95 % interval of the ratio: {units.ratio_between(found.ratio)}."
    )


def _run(verdict: VerdictData, chosen: CandidateData) -> str:
    layout = chosen.layout
    why = ""
    if verdict.decision is DecisionData.UNDECIDED:
        why = " until it is decided, because one pool is simpler" if not layout.disaggregated else " until it is decided"
    pools = {"prefill": layout.prefill_ranks if layout.disaggregated else 1, "decode": layout.decode_ranks}
    gangs = [f", --set {pool}.engine.tensor_parallel_size={number(ranks)}" for pool, ranks in pools.items() if ranks > 1]
    chunk, sequences = number(layout.chunk_tokens), number(layout.max_num_seqs)
    limits = f"chunks of {chunk} tokens (--max-num-batched-tokens) and --max-num-seqs {sequences}"
    if layout.disaggregated:
        limits = (
            f"chunks of {chunk} tokens in prefill workers (prefill.engine.max_num_batched_tokens), and {sequences} sequences "
            "and their default chunk in decode workers (decode.engine.max_num_seqs)"
        )
    return (
        f"Run {chosen.name}, with {limits}{''.join(gangs)}{why}. Expect {spread(chosen.goodput)} requests/s with "
        f"{percent(verdict.attainment)} of them within {targets(verdict)}."
    )


def _compared(verdict: VerdictData) -> list[str]:
    found = verdict.compared
    assert found is not None
    gain = "shorter" if found.itl_p99_gained_s >= 0 else "longer"
    pay = "later" if found.ttft_p50_paid_s >= 0 else "earlier"
    return [
        f"At {rate(found.apart_rate_per_s)} against {rate(found.together_rate_per_s)}, two pools have a p99 ITL of "
        f"{seconds(found.apart_itl_p99_s)} instead of {seconds(found.together_itl_p99_s)}: "
        f"{seconds(abs(found.itl_p99_gained_s))} {gain}.",
        f"Their first token comes {seconds(abs(found.ttft_p50_paid_s))} {pay}: the median TTFT is "
        f"{seconds(found.apart_ttft_p50_s)} instead of {seconds(found.together_ttft_p50_s)}.",
    ]


def targets(verdict: VerdictData) -> str:
    """Return the targets of requests."""
    slo = verdict.slo
    parts = [f"{name} {seconds(one)}" for name, one in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if one is not None]
    return " and ".join(parts) or "no targets"


def cards(verdict: VerdictData) -> list[tuple[str, str, str]]:
    """Return the key figures: (name, value, note)."""
    found = []
    if (chosen := verdict.chosen) is not None:
        sizes = f"chunk {number(chosen.layout.chunk_tokens)}, {number(chosen.layout.max_num_seqs)} seqs"
        found.append(("layout", chosen.name, sizes))
        found.append(("goodput, requests/s", number(chosen.goodput.value or 0.0), units.between(chosen.goodput)))
    if verdict.ratio is not None and verdict.decision not in (DecisionData.NOTHING, DecisionData.OPEN):
        value = "no baseline" if verdict.ratio.value is None else f"{times(verdict.ratio.value)} x"
        found.append(("two pools to one", value, units.ratio_between(verdict.ratio)))
    for one in verdict.degrees:
        value = "no baseline" if one.ratio.value is None else f"{times(one.ratio.value)} x"
        found.append((f"TP {number(one.ranks)}, {one.place}", value, units.ratio_between(one.ratio)))
    if (compared := verdict.compared) is not None:
        note = f"{seconds(compared.apart_itl_p99_s)}, not {seconds(compared.together_itl_p99_s)}"
        found.append(("p99 ITL gained", seconds(compared.itl_p99_gained_s), note))
        note = f"{seconds(compared.apart_ttft_p50_s)}, not {seconds(compared.together_ttft_p50_s)}"
        found.append(("median TTFT paid", seconds(compared.ttft_p50_paid_s), note))
    if (moved := verdict.moved) is not None and moved.bytes_per_request:
        found.append(("KV a request", units.size(moved.bytes_per_request), f"{units.size(moved.bytes_per_s)}/s"))
    return [*found, *_money(verdict)]


def _money(verdict: VerdictData) -> list[tuple[str, str, str]]:
    cost = verdict.cost
    if cost is None:
        return []
    name, own, other = f"tokens a {verdict.device}-hour", cost.tokens_per_worker_hour, cost.baseline_tokens_per_worker_hour
    if cost.tokens_per_dollar is not None:
        name, own, other = "tokens a dollar", cost.tokens_per_dollar, cost.baseline_tokens_per_dollar
    note = f"{units.between(own)}"
    if other is not None and other.value is not None:
        note = f"colocated: {units.tokens(other.value)}"
    return [(name, units.tokens(own.value or 0.0), note)]


def constraint(found: ConstraintData) -> list[str]:
    """Return what binds, how it was seen, and what to do about it."""
    said, lever = BINDINGS[found.binding]
    seen = []
    if found.rate_per_s is not None:
        parts = [f"at {rate(found.rate_per_s)}"]
        if found.ttft_p99_s is not None and found.tpot_p99_s is not None:
            parts.append(f"p99 TTFT {seconds(found.ttft_p99_s)}, p99 TPOT {seconds(found.tpot_p99_s)}")
        if found.prefill_busy_share is not None:
            parts.append(f"prefill workers compute {percent(found.prefill_busy_share)} of the time")
        if found.decode_busy_share is not None:
            parts.append(f"decode workers compute {percent(found.decode_busy_share)} of the time")
        if found.sequences_per_worker:
            parts.append(f"{number(found.sequences_per_worker)} sequences a decode worker")
        seen = [f"Seen {', '.join(parts)}."]
    return [said, *seen, lever]


def flip(found: FlipData) -> str:
    """Return one change of the answer as a sentence."""
    name, up, down = LEVERS[found.lever]
    units_of = {"prompt": "tokens", "output": "tokens", "workers": "workers"}
    value = (
        "" if found.value is None else seconds(found.value) if found.lever in ("tpot", "ttft") else number(round(found.value))
    )
    value = f" ({value}{' ' + units_of[found.lever] if found.lever in units_of else ''})" if value else ""
    sure = ""
    if found.low is not None and found.high is not None and found.high > 1.01 * found.low:
        sure = f", somewhere from {times(found.low)} to {times(found.high)}"
    way = up if found.factor >= 1 else down
    return f"{way.capitalize()} {name}: at {times(found.factor)} times the present value{value}{sure}, {OUTCOMES[found.to]}."


def effort(verdict: VerdictData) -> str:
    """Return how much was measured."""
    return (
        f"Measured: layouts: {number(len(verdict.candidates))}, points: {number(verdict.points)}, requests that count: "
        f"{number(verdict.requests)}, in {seconds(verdict.measured_s)} of load. Targets: {percent(verdict.attainment)} of the "
        f"requests within {targets(verdict)}."
    )


def flips(verdict: VerdictData) -> list[str]:
    """Return the sentences about what would change the answer."""
    if verdict.flips:
        return [flip(one) for one in verdict.flips]
    if verdict.fit is None:
        return [
            "No model could be calibrated: it needs points and a goodput of both kinds of layouts, with workers of one degree."
        ]
    return ["No single change of up to a factor of 16 changes the answer, or the model does not fit the measurement."]


def doubt(found: Doubt) -> str:
    """Return a doubt as a sentence."""
    said = {
        name: seconds(value) if name in AS_TIME else percent(value) if name in AS_SHARE else number(value)
        for name, value in found.numbers.items()
    }
    quote = LEVERS[found.quote][0] if found.name == "near_flip" else found.quote
    return DOUBTS[found.name].format(quote=quote, **said)


# The fixed sentences of a verdict. Pure.


PLACES: Final = {"prefill": "prefill workers", "decode": "decode workers", "colocated": "colocated workers"}

HEADLINES: Final = {
    DecisionData.DISAGGREGATE: "Disaggregate: two pools serve more",
    DecisionData.COLOCATE: "Do not disaggregate: one pool serves more",
    DecisionData.EQUAL: "Do not disaggregate: both serve the same, and one pool is simpler",
    DecisionData.UNDECIDED: "Cannot be told apart: the measurement allows both answers",
    DecisionData.ONE_SIDE: "No answer: only one kind of layout was measured",
    DecisionData.UNMEASURED: "No answer: no measured point counts",
    DecisionData.NOTHING: "No layout meets these targets",
    DecisionData.OPEN: "No answer: no measured rate was decided",
}
BINDINGS: Final = {
    Binding.PREFILL_COMPUTE: (
        "The computation of prompts binds: the first tokens are late.",
        "Add workers that compute prompts, use more cores or GPUs for each, quantise the weights (--quantization), let more "
        "prompts share prefixes, or allow a longer TTFT.",
    ),
    Binding.DECODE_BANDWIDTH: (
        "The decode steps bind: each step reads the weights and the KV of its sequences.",
        "Add decode workers, read fewer bytes a step (--quantization, --kv-cache-dtype), use faster memory, or "
        "allow a longer TPOT.",
    ),
    Binding.INTERFERENCE: (
        "Prompts that are computed beside decodes bind: they delay the tokens of other requests.",
        "Use two pools or a smaller chunk (--max-num-batched-tokens), or allow a longer TPOT.",
    ),
    Binding.SEQUENCES: (
        "The limit of sequences binds: the decode workers run as many as --max-num-seqs allows, and others wait.",
        "Raise --max-num-seqs if the TPOT has room, or add decode workers.",
    ),
    Binding.LINK: (
        "The link binds: requests wait for their KV after the first token.",
        "Use a faster link or transport, store KV in fewer bits (--kv-cache-dtype), or compute prompts in smaller chunks, "
        "which leaves less to transfer at the end.",
    ),
    Binding.MEMORY_OR_ROUTER: (
        "Requests wait although the pool that computes prompts is not busy: for KV blocks of a worker, or for the router.",
        "Look at the KV use in `pdserve status` under load: if it is full, raise --kv-cache-memory or add decode workers; if "
        "it is not, look at the router's CPU time.",
    ),
    Binding.GENERATOR: (
        "The load generator binds: it was late before the cluster was.",
        "Run the benchmark on a machine of its own.",
    ),
    Binding.UNSEEN: (
        "No constraint was seen: no measured point missed the target attainment.",
        "Let the search go on to higher rates (--budget-minutes).",
    ),
}
LEVERS: Final = {
    "prompt": ("prompts", "longer", "shorter"),
    "output": ("outputs", "longer", "shorter"),
    "tpot": ("TPOT target", "looser", "tighter"),
    "ttft": ("TTFT target", "looser", "tighter"),
    "link": ("link", "faster", "slower"),
    "workers": ("workers", "more", "fewer"),
}
OUTCOMES: Final = {DecisionData.DISAGGREGATE: "two pools win", DecisionData.COLOCATE: "one pool wins"}
DOUBTS: Final = {
    "incomplete": "The search did not end: it was interrupted or ran out of its budget. Resume it for a firmer answer.",
    "one_side": "One kind of layout was not measured, so nothing was compared.",
    "unsettled": "The goodput of {quote} is not settled: its interval is wider than was asked for.",
    "no_upper_end": "No rate was too high for {quote}, so it serves at least {low_per_s} requests/s, and maybe more.",
    "wide": "The interval of {quote} is {share} of its value wide.",
    "few_points": "Fewer than three points were measured with {quote}.",
    "rivals": "Other layouts of the same kind cannot be told apart from the recommended one: {rivals}.",
    "best_of_many": "The best of {layouts} layouts was taken, which favours lucky measurements. Measure the chosen one again.",
    "refused": "Points that do not count: {refused}. The first one says: {quote}",
    "mixed": "The router colocated up to {share} of the requests of two pools at one point: this is a mixture of both kinds.",
    "undecided_points": "Points whose attainment cannot be told apart from the target: {points}.",
    "few_requests": "The smallest point has only {requests} requests.",
    "not_stationary": "The same rate gave clearly different attainments, in pairs of points: {pairs}. Something changed.",
    "rising": "A higher rate had a clearly higher attainment, in pairs of points: {pairs}. Something changed.",
    "ttft_close": "The TTFT target of {target_s} is close to the lowest measured median of {floor_s}: chance decides.",
    "tpot_close": "The TPOT target of {target_s} is close to the lowest measured median of {floor_s}: chance decides.",
    "busy": "The machine was busy before the run: its load was {load} on {cores} cores.",
    "no_gpu": "No GPU was reported. Where workers compute on CPUs, the answer holds for CPUs only: their balance of compute "
    "and memory bandwidth differs.",
    "one_host": "All workers share one machine: they share its memory bandwidth, and KV crosses memory, not a network.",
    "model_error": "The model behind the estimated changes is off by a factor of {factor} before its calibration.",
    "small_gain": "The gain is small, and one pool is simpler to run.",
    "near_flip": "A small change alters the answer, as the model estimates: {quote}, at {factor} times the present value.",
    "extrapolated": "The changes of the answer are estimates of a calibrated model. They were not measured.",
}
"""One sentence for each name of a doubt. Numbers and the quote stand in braces."""
AS_TIME: Final = frozenset({"target_s", "floor_s"})
AS_SHARE: Final = frozenset({"share"})
