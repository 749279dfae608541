"""The fixed sentences of a verdict. Pure."""

from __future__ import annotations

from typing import Final

from pdserve_bench.verdict.data import Binding, DecisionData

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
