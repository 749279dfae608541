"""The policies of placement: which one of the workers that may take a request gets it. Pure.

A policy is a function of one candidate and the request, and gives a score: more is better, and equals take turns. It may say
which candidates it needs scored (`Shortlist`), so that a choice costs the same in a pool of any size. The placer asks it only
about workers that may take the request, so a policy cannot break a rule of placement.

Policies see predictions: the time until the first token, and the time between later ones, by what workers measure. None says
that nobody has measured what a prediction needs; no number is invented. A prediction serves a comparison, so it leaves out the
times that are the same on all workers: messages, and the rest of the step that runs now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from pdserve.core.worker import Role
from router.core.events import LinkId

# What a policy sees ------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """An immutable snapshot of one worker in relation to one request."""

    link: LinkId
    kv_tokens: int  # tokens whose KV fits its whole pool
    promised_tokens: int  # tokens of them that are promised, by the ledger's estimate
    free_slots: int  # sequences it takes beyond what this router placed on it
    queued_tokens: int  # prompt tokens not yet computed
    max_model_len: int
    suspect: bool  # it is silent, or its engine makes no steps
    refused: bool  # it refused work and has not shown since that it takes more
    claimed: bool = False  # its next room goes to a probe
    running: int = 0  # sequences that this router placed on it
    prompt_tokens_per_s: float = 0.0  # prompt tokens that it computes in a second; 0: unknown
    decode_step_s: float = 0.0  # time of one of its steps without prompts; 0: unknown
    step_sequences: int = 0  # sequences that it ran when it reported this time
    picked: int = 0  # number of the pick, counted over the pool, that last chose it; 0: none did
    cached_tokens: int = 0  # tokens of this request's prompt whose KV it probably holds
    session: bool = False  # the last turn of the request's session was placed on it
    draw: float = 0.0  # random number in [0, 1), new for each request and worker
    role: Role = Role.DECODE
    load: float = 0.0  # how busy it is, in the measure of its pool (`router.core.pools`)
    counted_tokens_per_s: float = 0.0  # prompt rate, or the pool's mean where it is unknown or near; 0: no rate is known


class RequestView(NamedTuple):
    """An immutable view of one request."""

    prompt_tokens: int  # tokens whose KV must be computed: the prompt, and on a retry the output so far
    kv_tokens: int  # tokens whose KV the request will probably take on the worker
    ttft_left_s: float | None = None  # time until the first token is late by the request's class; None: no target
    tpot_s: float | None = None  # target for the time between tokens; None: no target


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The candidates that a policy needs scored. The groups are joined, and each worker is in the list once. The pool takes
    them from orders that it keeps: it has only workers that may take the request, and at least one worker if any may."""

    least_loaded: int = 0
    """The number of workers with the least load."""
    holders: int = 0
    """The number of workers that hold the longest beginnings of the prompt."""
    least_recent: int = 0
    """The number of workers that were picked the longest ago."""
    drawn: int = 0
    """The number of workers that are drawn by chance."""
    session: bool = False
    """The worker of the session's last turn is on the list."""
    everyone: bool = False
    """All workers that may take the request are on the list."""


EVERYONE: Final = Shortlist(everyone=True)
"""The shortlist of a policy that names no shortlist."""

Policy = Callable[[Candidate, RequestView], float]
Scorer = Callable[[Sequence[Candidate], RequestView], Sequence[float]]
"""A function that returns the score of each candidate, in order. It never raises."""

_F = TypeVar("_F", bound=Callable[..., object])


def shortlisted(shortlist: Shortlist) -> Callable[[_F], _F]:
    """Return a decorator that gives a policy its shortlist."""

    def mark(policy: _F) -> _F:
        policy.shortlist = shortlist  # type: ignore[attr-defined]
        return policy

    return mark


# Predictions -------------------------------------------------------------------------------------------------------------

FIXED_SEQUENCES: Final = 64
"""The fixed part of a decode step, reading the weights, takes as long as this many sequences.

DistServe's fits (OPT-13B and 66B on A100, 500 tokens of context each) give 57 and 106. Splitwise's measurements of 1 to 64
sequences (llama2-70b and bloom-176b, A100 and H100) give 65 to 174. The low end predicts a step rather too long.
"""
ASSUMED_TOKENS_PER_S: Final = 10_000.0
"""The rate of all workers of a pool in which no worker has reported a rate yet. Any number gives the same order."""


def seconds(amount: float, per_s: float) -> float | None:
    """Return the time that an amount takes at a rate. Nothing takes no time. Anything else takes unknown time at a rate of 0,
    because 0 stands for an unknown rate."""
    if amount <= 0:
        return 0.0
    return amount / per_s if per_s > 0 else None


def total(*parts: float | None) -> float | None:
    """Return the sum of some times. None: one of them is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def prompt_s(tokens: int, tokens_per_s: float) -> float:
    """Return the seconds that this many prompt tokens take. A rate of 0 is unknown, and the assumed rate replaces it."""
    return tokens / (tokens_per_s or ASSUMED_TOKENS_PER_S)


def uncached_tokens(candidate: Candidate, prompt_tokens: int) -> int:
    """Return how many tokens of the prompt a worker computes: those whose KV it does not hold, and at least one, because the
    last token's output is always needed."""
    return max(1, prompt_tokens - candidate.cached_tokens)


def prompt_wait_s(candidate: Candidate) -> float | None:
    """Return how long the prompts that were sent to a worker before will keep it busy."""
    return seconds(candidate.queued_tokens, candidate.prompt_tokens_per_s)


def compute_s(candidate: Candidate, prompt_tokens: int) -> float | None:
    """Return how long a worker computes this prompt."""
    return seconds(uncached_tokens(candidate, prompt_tokens), candidate.prompt_tokens_per_s)


def ttft_s(candidate: Candidate, prompt_tokens: int) -> float | None:
    """Return the time until the first token if this worker gets the prompt now. The prefill worker draws the first token, so
    a transfer of KV does not delay it."""
    return total(prompt_wait_s(candidate), compute_s(candidate, prompt_tokens))


def tpot_s(candidate: Candidate) -> float | None:
    """Return the time between two tokens on a decode worker with one more sequence.

    A step grows linearly with its sequences, from a fixed part (`FIXED_SEQUENCES`). The worker measured its step with
    `step_sequences` of them; by now `running` are placed there, and the new one comes on top.
    """
    if candidate.decode_step_s <= 0:
        return None
    then, soon = max(1, candidate.step_sequences), candidate.running + 1
    return candidate.decode_step_s * (FIXED_SEQUENCES + soon) / (FIXED_SEQUENCES + then)


# The policy "prefix_aware" -----------------------------------------------------------------------------------------------

RECOMPUTE_WEIGHT: Final = 2.0
"""Simulated on 100 workers under a public trace, at a load that saturates them, 2 met the targets of 77 % of the requests, and
0 of 22 %. At half that load they are equal. With 4, the p99 of TTFT at half load rises (docs/design/0028-placement.md)."""


@shortlisted(Shortlist(least_loaded=2, holders=4))
def prefix_aware(candidate: Candidate, request: RequestView) -> float:
    """Return the negative cost of a worker, where KV that it holds already costs nothing: seconds for a prefill worker, a share
    of the worker for a decode worker.

    A prefill worker costs the time until it would have computed the prompt: queued tokens plus the prompt's tokens that it does
    not hold, divided by its tokens in a second. This is multiplied by 1 + `RECOMPUTE_WEIGHT` times the share of the prompt that
    it does not hold: tokens that are computed again also delay all requests behind this one, and evict what others could have
    used.

    A decode worker costs the larger of two shares once it has the request, that of its KV pool and that of its slots, plus the
    share of its KV pool that must be read from another worker. Tokens that it holds take no new room and are not read. A
    step takes longer in proportion to the load, and a read in proportion to its tokens; both shares of a large pool are of
    about the same size in seconds, so their weights are equal.

    Queued work outweighs a cached prefix at the latest when it takes three times as long as the prefix would, so no worker
    becomes a hot spot.
    """
    uncached = max(0, request.prompt_tokens - candidate.cached_tokens)
    if candidate.role is Role.PREFILL:
        anew = uncached / max(1, request.prompt_tokens)
        own_s = prompt_s(candidate.queued_tokens + uncached, candidate.counted_tokens_per_s)
        return -own_s * (1 + RECOMPUTE_WEIGHT * anew)
    new_tokens = max(0, request.kv_tokens - candidate.cached_tokens)
    kv_share = (candidate.promised_tokens + new_tokens) / candidate.kv_tokens
    slot_share = (candidate.running + 1) / max(1, candidate.running + candidate.free_slots)
    return -(max(kv_share, slot_share) + uncached / candidate.kv_tokens)


# The policy "session_affinity" -------------------------------------------------------------------------------------------

SLACK_SHARE: Final = 0.25
"""The load moves by less than this when turns of other sessions come and go, so a session stays where it is. A full worker is a
quarter fuller than a worker at three quarters, so no session stays on a full worker while others have much room."""


@shortlisted(Shortlist(session=True, least_loaded=1))
def session_affinity(candidate: Candidate, request: RequestView) -> float:
    """Return the negative load. The worker of the session's last turn may have some more load than the least loaded worker and
    still wins.

    A prefill worker may have a queue that is longer by the time in which it computes this prompt, since the KV that it may
    still have saves no more. A decode worker may be fuller by `SLACK_SHARE` of its KV or slots. A request without a session
    goes to the least loaded worker.

    This policy needs no knowledge of prefixes: it works where workers do not report their blocks, and costs the same for any
    prompt.
    """
    if not candidate.session:
        return 0.0 - candidate.load
    if candidate.role is Role.PREFILL:
        return prompt_s(request.prompt_tokens, candidate.counted_tokens_per_s) - candidate.load
    return SLACK_SHARE - candidate.load


# The policy "goodput" ----------------------------------------------------------------------------------------------------

BANDS: Final = 4
LEAST_ALLOWED_S: Final = 1e-3
"""A late request has no time left. It counts as if it had this time left, so that it prefers the shortest queue."""


@shortlisted(Shortlist(least_loaded=4, holders=4))
def goodput(candidate: Candidate, request: RequestView) -> float:
    """Prefer the worker on which the request probably meets its class's targets for TTFT and TPOT. The score is in (0, 1], and
    never rises with the worker's queue, its sequences, its load or its times.

    Each score is a band, and a place within the band, which is in (0, 1]:

        3  the request meets every target it has, as predicted
        2  a rate that a prediction needs is unknown
        1  it misses one target
        0  it misses both

    The place falls with `predicted / allowed`, summed over the targets: more slack or less lateness, relative to what is
    allowed, is better. It falls with the load where the request has no targets or a rate is unknown. A worker with an unknown
    rate goes before workers that would be late: it has computed nothing recently, and it gets a rate only from work.

    A prefill worker decides about TTFT, a decode worker about TPOT, and about TTFT if it computes the prompt. The request has
    only the targets that the worker decides about.
    """
    targets = []
    if request.ttft_left_s is not None:
        targets.append((ttft_s(_counted(candidate), request.prompt_tokens), request.ttft_left_s))
    if request.tpot_s is not None:
        targets.append((tpot_s(candidate), request.tpot_s))
    missed, lateness, known = 0, 0.0, True
    for predicted_s, allowed_s in targets:
        if predicted_s is None:
            known = False
        else:
            missed += not predicted_s <= allowed_s
            lateness += predicted_s / max(allowed_s, LEAST_ALLOWED_S)
    if not targets or not known:
        return _in_band(2 if targets else 3, candidate.load)
    return _in_band((3, 1, 0)[missed], lateness)


def _counted(candidate: Candidate) -> Candidate:
    """Return the candidate with its counted rate, if that rate is known: equal workers take turns although their measured rates
    differ."""
    known = candidate.prompt_tokens_per_s > 0 and candidate.counted_tokens_per_s > 0
    return candidate._replace(prompt_tokens_per_s=candidate.counted_tokens_per_s) if known else candidate


def _in_band(band: int, burden: float) -> float:
    return (band + 1 / (1 + burden)) / BANDS


# Simple policies, with which others are compared -------------------------------------------------------------------------


@shortlisted(Shortlist(least_loaded=1))
def least_loaded(candidate: Candidate, request: RequestView) -> float:
    """Prefer the prefill worker with the shortest queue, or the emptiest decode worker."""
    return -candidate.load


@shortlisted(Shortlist(drawn=2))
def power_of_two(candidate: Candidate, request: RequestView) -> float:
    """Draw two workers by chance, and prefer the less loaded worker.

    Two draws already avoid nearly all long queues (Mitzenmacher, "The power of two choices in randomized load balancing",
    2001), and several routers that see the same loads do not all run to the same worker.
    """
    return -candidate.load


@shortlisted(Shortlist(least_recent=1))
def round_robin(candidate: Candidate, request: RequestView) -> float:
    """Give all workers the same score. Equals take turns, so the worker that was picked the longest ago gets the request."""
    return 0.0


@shortlisted(Shortlist(drawn=1))
def random(candidate: Candidate, request: RequestView) -> float:
    """Give all workers the same chance. This is the floor that other policies are compared with."""
    return candidate.draw


# The choice --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranking:
    """A policy by its name in the settings, with the candidates that it needs."""

    name: str
    shortlist: Shortlist
    scores: Scorer


@dataclass(frozen=True, slots=True)
class Rankings:
    """The ranking of each pool's workers."""

    prefill: Ranking
    decode: Ranking


def ranking_of(name: str, policy: Policy) -> Ranking:
    """Return the ranking of a policy that never raises. A policy without a shortlist scores everyone."""
    found = getattr(policy, "shortlist", EVERYONE)
    shortlist = found if isinstance(found, Shortlist) else EVERYONE
    return Ranking(name, shortlist, lambda candidates, request: [policy(candidate, request) for candidate in candidates])


_PREFIX_AWARE: Final = ranking_of("prefix_aware", prefix_aware)
BUILT_IN: Final = Rankings(prefill=_PREFIX_AWARE, decode=_PREFIX_AWARE)


def pick(candidates: Sequence[Candidate], scores: Sequence[float]) -> Candidate | None:
    """Return the candidate with the highest score. Among equals it is the least recently picked candidate, and then the
    candidate that joined first. None: there is no candidate."""
    if not candidates:
        return None
    best = max(scores)
    equals = [c for c, s in zip(candidates, scores, strict=True) if s == best]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda candidate: (candidate.picked, candidate.link))


def pick_alike(candidates: Sequence[Candidate], scores: Sequence[float]) -> Candidate:
    """Return the best one of the candidates after the first whose score is as high as that of the first, and which holds as
    much of the prompt. If there is none, return the first."""
    first, *others = candidates
    least, *theirs = scores
    good = [
        (candidate, score)
        for candidate, score in zip(others, theirs, strict=True)
        if score >= least and candidate.cached_tokens >= first.cached_tokens
    ]
    return pick([candidate for candidate, _ in good], [score for _, score in good]) or first


class Why(Enum):
    """The reason why a worker was picked, as stories and metrics name it."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    SESSION = "session"
    CACHED_PREFIX = "cached_prefix"
    LEAST_LOADED = "least_loaded"
    TURN = "turn"
    DRAWN = "drawn"
    SCORE = "score"
    """A policy that scores all workers picked it. Its author knows more."""
    LEADER = "leader"
    """The worker has the KV of the request's leader, which has the same prompt."""
    ALONE = "alone"
    """The request is suspected of ending its workers, and this worker serves no other request."""
    PROBE = "probe"
    """The router has to find out whether KV passes through this worker."""


def why(picked: Candidate, shortlist: Shortlist) -> Why:
    """Return the reason of a pick: the strongest reason that the shortlist and the picked worker have in common."""
    if shortlist.everyone:
        return Why.SCORE
    if shortlist.session and picked.session:
        return Why.SESSION
    if shortlist.holders and picked.cached_tokens:
        return Why.CACHED_PREFIX
    if shortlist.drawn:
        return Why.DRAWN
    return Why.LEAST_LOADED if shortlist.least_loaded else Why.TURN


# Draws -------------------------------------------------------------------------------------------------------------------

_MASK: Final = (1 << 64) - 1


def splitmix64(number: int) -> int:
    """Return the output of SplitMix64 for a state (Steele, Lea and Flood, 2014): 64 bits that look random."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def draw(seed: int, pick: int, link: int) -> float:
    """Return a number in [0, 1), a pure function of the core's seed, the number of the pick, and the worker."""
    return (splitmix64(splitmix64(splitmix64(seed) ^ pick) ^ link) >> 11) / (1 << 53)
