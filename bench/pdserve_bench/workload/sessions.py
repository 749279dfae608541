"""Drawn conversations of several turns, with forks and joins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from statistics import fmean
from typing import Final

from pdserve_bench.workload.conversation import ConversationTurn, history_after, prompt_of, prompt_tokens
from pdserve_bench.workload.lengths import draw
from pdserve_bench.workload.request import BenchRequest, Ids
from pdserve_bench.workload.source import Classes, Means
from pdserve_bench.workload.spec import ClassMix, SessionSource
from pdserve_bench.workload.tokens import TokenMaker

SAMPLE: Final = 400
"""The conversations of which the means are taken."""


class _Streams:
    """The random streams of the conversations. One that is used more does not move the others."""

    def __init__(self, seed: int) -> None:
        self.turns = Random(f"{seed}:turns")
        self.forks = Random(f"{seed}:forks")
        self.prompts = Random(f"{seed}:prompt lengths")
        self.outputs = Random(f"{seed}:output lengths")
        self.think = Random(f"{seed}:think")


class SessionRequests:
    """Requests of conversations. Those of one conversation follow each other."""

    notes: tuple[str, ...] = ()
    digest = ""

    def __init__(self, source: SessionSource, classes: Classes) -> None:
        """Take the source, and find its means."""
        self._source, self._classes = source, classes
        plans = [plan for _, plan in islice(self._plans(0), SAMPLE)]
        lengths = [prompt_tokens(turn, plan) for plan in plans for turn in plan.values()]
        outputs = [turn.max_tokens for plan in plans for turn in plan.values()]
        starts = [not turn.after for plan in plans for turn in plan.values()]
        self.means = Means(fmean(lengths), fmean(outputs), fmean(starts))

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests of endless conversations."""
        think = _Streams(seed).think
        prefix = tokens.ids(0, self._source.prefix_tokens, "prefix")
        for session, (name, plan) in enumerate(self._plans(seed)):
            parts = {number: self._part(turn, tokens, prefix) for number, turn in plan.items()}
            for turn in plan.values():
                yield BenchRequest(
                    turn.number,
                    prompt_of(turn, parts.__getitem__),
                    turn.max_tokens,
                    after=turn.after,
                    think_s=self._think_s(think) if turn.after else 0.0,
                    slo_class=name,
                    session=f"session-{session}",
                    prompt_tokens=prompt_tokens(turn, plan),
                )

    def _part(self, turn: ConversationTurn, tokens: TokenMaker, prefix: Ids) -> Ids:
        """Return the new tokens of a turn. The first turn begins with the common prefix."""
        if turn.after:
            return tokens.ids(turn.number, turn.new_tokens)
        return prefix + tokens.ids(turn.number, turn.new_tokens - len(prefix))

    def _think_s(self, random: Random) -> float:
        mean_s, cap_s = self._source.think_s, self._source.think_cap_s
        drawn_s = mean_s * random.expovariate(1.0) if self._source.think == "exponential" else mean_s
        return drawn_s if cap_s is None else min(drawn_s, cap_s)

    def _plans(self, seed: int) -> Iterator[tuple[str, dict[int, ConversationTurn]]]:
        """Yield the class of each conversation, and its turns by number."""
        streams, used = _Streams(seed), 0
        for name, mix in self._classes.draws(seed):
            plan = self._plan(used, mix, streams)
            used += len(plan)
            yield name, plan

    def _plan(self, number: int, mix: ClassMix, streams: _Streams) -> dict[int, ConversationTurn]:
        """Draw one conversation whose first request has this number."""
        plan: dict[int, ConversationTurn] = {}
        parents: list[ConversationTurn] = []
        count = draw(self._source.turns, streams.turns)
        for place in range(count):
            fork = 0 < place < count - 1 and streams.forks.random() < self._source.fork_share
            branches = [self._turn(number + branch, parents, mix, streams) for branch in range(1 + fork)]
            plan |= {turn.number: turn for turn in branches}
            parents, number = branches, number + len(branches)
        return plan

    def _turn(self, number: int, parents: list[ConversationTurn], mix: ClassMix, streams: _Streams) -> ConversationTurn:
        new_tokens = draw(mix.prompt or self._source.prompt, streams.prompts)
        return ConversationTurn(
            number,
            new_tokens + (0 if parents else self._source.prefix_tokens),
            draw(mix.output or self._source.output, streams.outputs),
            after=tuple([one.number for one in parents]),
            history=history_after(parents),
        )
