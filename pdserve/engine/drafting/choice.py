"""The choice of the drafts that are worth a place in the next step: one budget over all sequences. Pure.

A step that verifies drafts takes longer, and gives more tokens. Each draft has a probability to survive (`odds.py`), and each
step an expected time (`costs.py`), so the drafts are taken in the order of these probabilities, up to the number that gives the
most accepted tokens a second, which may be none. Nothing else decides: at few sequences a step waits for weights, and unlikely
drafts pay; at many it computes, and nearly none do. So speculation fades out under load by itself.

A drafter without a model proposes first, since its drafts cost nothing. A proposal that is not verified still teaches how good
its kind is at the first place. A drafter with a model proposes only where its own time pays as well; if it has not for a while,
one sequence tries it, less and less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Final, NamedTuple, Protocol

from pdserve.core.ids import SeqId
from pdserve.core.step_plan import NO_DRAFTS, Drafts
from pdserve.engine.drafting.api import NO_DRAFT, Draft, Drafter, DraftView, ModelDrafter
from pdserve.engine.drafting.costs import StepCosts, StepSize
from pdserve.engine.drafting.odds import Odds
from pdserve.engine.schedule.collect import StepOutcome

LOOK_S: Final = 1e-4
LOOK_EACH_S: Final = 1e-5
"""To look for drafts, and to choose, plan and collect some, takes so long, and so much longer for each sequence. It is measured
between steps of the default model on a CPU, whose caches it has emptied: 1.5 % of a step of one sequence, 2.5 % of 16."""
MOST_LOOK: Final = 0.04
"""A look counts as at most this share. Only the tiny models of tests have steps so short, and their drafts are to be tested."""
LEAST_GAIN: Final = 1.02
"""Drafts must raise the tokens a second by so much, and by the share of a look: a step's expected time is a few percent off."""
MODEL_GAIN: Final = 1.08
"""A model's drafts must raise them by so much: they cost most of what they give, so a small error of their time decides."""
LEAST_SHARE: Final = 0.02
"""A draft that survives with less probability is left out. The cheapest row costs about as much."""
MOST_SHARE: Final = 0.95
"""Nobody proposes where even drafts that survive with this probability would not pay. Only those of a verbatim copy are
better."""
SAMPLED_STEPS: Final = 4
"""One of so many steps teaches the odds of drafts that were not verified, and the time of steps."""
WORTH: Final = 3.0
"""Every step looks for drafts while they are expected to give so many times the share of a look more tokens a second, on
average. Below, one step in `SAMPLED_STEPS` looks, and one in `RARE_STEPS` where they give less than half of it."""
RARE_STEPS: Final = 16
WORTH_WINDOW: Final = 16
"""The average forgets steps that looked by e in so many. One step of a copy, which gains more than `WORTH` times this, ends the
pause."""
MOST_WORTH: Final = 0.16
"""The average goes no higher, so that some 10 steps in vain end the looks of every step."""
KNOWN_CONTEXT: Final = 64
"""The mean context of the sequences is told in multiples of so many tokens, so that what depends on it is seldom computed."""
FIRST_PAUSE: Final = 64
"""A drafter with a model that does not pay is tried again after so many steps: a try takes half a step, so 1 % at most."""
LAST_PAUSE: Final = 1024
START_PAUSE: Final = 4
"""The first tries of a model follow soon, so that it drafts within the first request where it pays."""


class DraftSource(Protocol):
    """The scheduler, as the choice sees it between two steps."""

    @property
    def next_rows(self) -> tuple[int, int, int]:
        """The number of decoding sequences, of the prompt tokens that the next step will compute beside them, about, and of the
        drafts for which it has room."""

    def draft_views(self, most: int) -> list[DraftView]:
        """Return the decoding sequences that may have drafts, at most `most` each."""

    def with_blocks(self, view: DraftView) -> DraftView | None:
        """Return the view with blocks for its drafts, perhaps for fewer of them. None: there are no blocks for any."""


class _Proposal(NamedTuple):
    """A draft of a sequence, with the probability that each place survives."""

    view: DraftView
    draft: Draft
    survival: list[float]


class Base(NamedTuple):
    """The next step without drafts: its sequences, each of which gets a token, its size, and its room for drafts."""

    sequences: int
    size: StepSize
    room: int

    def rate(self, costs: StepCosts, tokens: float, drafts: int, reread: int, extra_s: float = 0.0) -> float:
        """Return the tokens a second of the step with so many drafts, of which `tokens` survive on average. reread: the
        positions that the drafts attend to. extra_s: the time to draft them, in seconds."""
        size = StepSize(self.size.rows + drafts, self.size.read, self.size.reread + reread)
        return (self.sequences + tokens) / (costs.step_s(size) + extra_s)


def look_share(base: Base, costs: StepCosts) -> float:
    """Return the time to look for drafts, as a share of the step without drafts."""
    return min((LOOK_S + LOOK_EACH_S * base.sequences) / costs.step_s(base.size), MOST_LOOK)


def choose(base: Base, costs: StepCosts, survivals: Sequence[Sequence[float]], contexts: Sequence[int]) -> list[int]:
    """Return how many drafts of each sequence the step should verify: those that give the most accepted tokens a second.

    survivals: for each sequence, the probability that each of its drafts survives, which never rises with the place. contexts:
    the positions that a draft of each sequence attends to.
    """
    counts = [0] * len(survivals)
    ordered = [(share, i) for i, own in enumerate(survivals) for share in own if share > LEAST_SHARE]
    ordered.sort(reverse=True)
    rows, tokens, taken = base.size.rows, float(base.sequences), 0
    step_s, reread_s, rows_s = costs.step_s(base.size) - costs.rows_s(rows), costs.reread_s, costs.rows_s
    best = (LEAST_GAIN + look_share(base, costs)) * base.sequences / costs.step_s(base.size)
    for number, (share, i) in enumerate(ordered[: base.room], 1):
        tokens += share
        step_s += contexts[i] * reread_s
        if tokens > best * (step_s + rows_s(rows + number)):
            best, taken = tokens / (step_s + rows_s(rows + number)), number
    for _, i in ordered[:taken]:
        counts[i] += 1
    return counts


class DraftChoice:
    """Chooses the drafts of each step of one engine. The engine thread owns it."""

    def __init__(self, drafters: Sequence[Drafter], costs: StepCosts, *, most: int, model: ModelDrafter | None = None) -> None:
        """drafters: those without a model; of two drafts of a sequence, the one with more expected tokens counts, and then the
        first. costs: the times of the engine's steps. most: the most drafts of a sequence."""
        self._drafters = drafters
        self._model = model
        self._most = most
        self.costs = costs
        self._odds = Odds()
        self._proposed: list[_Proposal] = []
        self._kinds: dict[SeqId, str] = {}  # of the drafts of the step under way
        self._ended: list[SeqId] = []  # since the drafts of the step under way were chosen
        self._size = StepSize(0)  # of the step under way; without rows if nobody knows what it reads
        self._least: tuple[tuple[int, Base], float] = (0, Base(0, StepSize(0), 0)), 0.0
        self._spent_s = 0.0  # the time that a model took for the drafts of the step under way
        self._steps = 0  # for which drafts were looked for
        self._worth = MOST_WORTH  # what drafts are expected to give, as a share of the tokens a second; an average
        self._context = 0  # the mean context of the sequences, at most `RARE_STEPS` steps ago
        self._drafting_s = 0.0  # the expected time of the model's drafts of the step under way
        self._drafted = 0  # the step for which the model has last drafted
        self._pause = START_PAUSE

    def drafts(self, source: DraftSource) -> Drafts:
        """Return the drafts that the next step should verify."""
        self._proposed, self._kinds, self._ended, self._drafting_s, self._spent_s = [], {}, [], 0.0, 0.0
        self._size = StepSize(0)
        sequences, prompt_tokens, room = source.next_rows
        if not sequences or room <= 0:
            return NO_DRAFTS
        if not self._steps % RARE_STEPS:
            known = [len(view.tokens) for view in source.draft_views(1)]
            self._context = sum(known) // max(len(known), 1) // KNOWN_CONTEXT * KNOWN_CONTEXT
        self._steps += 1
        base = Base(sequences, StepSize(sequences + prompt_tokens, sequences * self._context), room)
        worth = self._worth / (WORTH * look_share(base, self.costs))
        pause = 1 if worth > 1.0 else SAMPLED_STEPS if worth > 0.5 else RARE_STEPS
        if self._steps % pause or self._least_share(base) > MOST_SHARE:
            return NO_DRAFTS
        views = source.draft_views(self._most)
        if not views:
            return NO_DRAFTS
        read = sum([len(view.tokens) for view in views]) * sequences // len(views)
        base = Base(sequences, StepSize(sequences + prompt_tokens, read), room)
        self._proposed = found = self._propose(views)
        if self._model is not None:
            found = self._with_model(self._model, source, base, found)
        contexts = [len(one.view.tokens) for one in found]
        counts = choose(base, self.costs, [one.survival for one in found], contexts)
        chosen: dict[SeqId, tuple[int, ...]] = {}
        for (view, draft, _), count in zip(found, counts, strict=True):
            if count:
                chosen[view.seq_id] = draft.token_ids[:count]
                self._kinds[view.seq_id] = draft.kind
        gain, size = 0.0, base.size
        if chosen:
            reread = sum(map(mul, contexts, counts))
            tokens = sum([sum(one.survival[:count]) for one, count in zip(found, counts, strict=True)])
            size = StepSize(base.size.rows + sum(counts), read, reread)
            step_s = self.costs.step_s(size) + self._drafting_s
            gain = (sequences + tokens) / sequences * self.costs.step_s(base.size) / step_s - 1.0
        if len(views) == sequences:
            self._size = size
        self._worth = min(self._worth + (gain - self._worth) / WORTH_WINDOW, MOST_WORTH)
        return chosen

    def learn(self, outcome: StepOutcome) -> None:
        """Learn from the step whose drafts were chosen last. Sequences that it has ended are forgotten by now, and stay so."""
        for seq_id, drafted, accepted in outcome.verified:
            self._odds.learn(seq_id, self._kinds.get(seq_id, ""), drafted, accepted)
        if self._proposed and not self._steps % SAMPLED_STEPS:
            self._learn_unverified(outcome)
        for seq_id in self._ended:
            self._odds.forget(seq_id)

    def _learn_unverified(self, outcome: StepOutcome) -> None:
        """Learn how good the first places of the drafts are that were not verified."""
        known = {one.seq_id for one in outcome.verified}
        left = {view.seq_id: draft for view, draft, _ in self._proposed if draft.token_ids and view.seq_id not in known}
        if left:
            for token in outcome.tokens:
                if (draft := left.get(token.seq_id)) is not None:
                    self._odds.learn(token.seq_id, draft.kind, 1, int(token.token_id == draft.token_ids[0]))

    def took(self, rows: int, step_s: float) -> None:
        """Learn the time of the last step, with that of its drafts. rows: the number of its tokens. A step that is not the
        expected one, because it had fewer blocks or more tokens of prompts, teaches nothing."""
        if rows and rows == self._size.rows and not self._steps % SAMPLED_STEPS:
            self.costs.learn(self._size, step_s - self._spent_s)

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Forget a sequence, which has ended with these tokens."""
        self._odds.forget(seq_id)
        self._ended.append(seq_id)
        for drafter in (*self._drafters, *([self._model] if self._model is not None else [])):
            drafter.forget(seq_id, tokens, group)

    def _least_share(self, base: Base) -> float:
        """Return the least mean probability to survive with which some number of drafts pays."""
        costs, key = self.costs, (self.costs.version, base)
        if self._least[0] != key:
            rows, read, _ = base.size
            alone_s, most = costs.step_s(base.size), min(base.room, base.sequences * self._most)
            sizes = (StepSize(rows + drafts, read, drafts * self._context) for drafts in range(1, most + 1))
            dearer = (costs.step_s(size) / alone_s - 1.0 for size in sizes)
            self._least = key, min(more * base.sequences / drafts for drafts, more in enumerate(dearer, 1))
        return self._least[1]

    def _propose(self, views: Sequence[DraftView]) -> list[_Proposal]:
        """Return the best draft of each sequence by a drafter without a model; one without tokens where nobody proposes."""
        best = [_Proposal(view, NO_DRAFT, []) for view in views]
        for drafter in self._drafters:
            for i, draft in enumerate(drafter.propose(views)):
                if not draft.token_ids:
                    continue
                survival = self._odds.survival(views[i].seq_id, draft.kind, len(draft.token_ids))
                if sum(survival) > sum(best[i].survival):
                    best[i] = _Proposal(views[i], draft, survival)
        return best

    def _with_model(self, model: ModelDrafter, source: DraftSource, base: Base, found: list[_Proposal]) -> list[_Proposal]:
        """Let the model draft where its time pays, and return the candidates with its drafts in place of worse ones."""
        places, chosen = self._places(model, base, found)
        if not places:
            if self._steps - self._drafted < self._pause:
                return found
            self._pause = min(2 * self._pause, LAST_PAUSE)
            places, chosen = 1, [0]
        else:
            self._pause = FIRST_PAUSE
        self._drafted = self._steps
        asked: dict[int, DraftView] = {}
        for i in chosen:
            view = found[i].view._replace(most=min(places, found[i].view.most))
            ready = source.with_blocks(view) if model.needs_blocks else view
            if ready is not None:
                asked[i] = ready
        drafts = dict[int, Draft]()
        if asked:
            drafts = dict(zip(asked, model.propose(list(asked.values())), strict=True))
            self._drafting_s = places * model.place_s(len(asked), sum([len(view.tokens) for view in asked.values()]))
            self._spent_s = model.spent_s
        return [self._better(one, drafts.get(i, NO_DRAFT)) for i, one in enumerate(found)]

    def _better(self, one: _Proposal, draft: Draft) -> _Proposal:
        if not draft.token_ids:
            return one
        survival = self._odds.survival(one.view.seq_id, draft.kind, len(draft.token_ids))
        return _Proposal(one.view, draft, survival)

    def _places(self, model: ModelDrafter, base: Base, found: list[_Proposal]) -> tuple[int, list[int]]:
        """Return the number of places that the model should draft, and of which candidates. 0 places: it does not pay."""
        own = [self._odds.survival(one.view.seq_id, model.kind, one.view.most) for one in found]
        free = [sum(one.survival) for one in found]
        contexts = [len(one.view.tokens) for one in found]
        counts = choose(base, self.costs, [one.survival for one in found], contexts)
        alone = sum(sum(one.survival[:count]) for one, count in zip(found, counts, strict=True))
        reread = sum(context * count for context, count in zip(contexts, counts, strict=True))
        best = base.rate(self.costs, alone, sum(counts), reread) * MODEL_GAIN
        answer: tuple[int, list[int]] = 0, []
        for places in range(1, min(model.most, max((one.view.most for one in found), default=0)) + 1):
            sums = [sum(survival[:places]) for survival in own]
            chosen = [i for i, tokens in enumerate(sums) if tokens > free[i]]
            drafts = [len(own[i][:places]) if sums[i] > free[i] else len(one.survival) for i, one in enumerate(found)]
            if not chosen or sum(drafts) > base.room:
                break
            tokens = sum(max(pair) for pair in zip(sums, free, strict=True))
            reread = sum(context * count for context, count in zip(contexts, drafts, strict=True))
            read = sum([contexts[i] for i in chosen])
            rate = base.rate(self.costs, tokens, sum(drafts), reread, places * model.place_s(len(chosen), read))
            if rate > best:
                best, answer = rate, (places, chosen)
        return answer
