"""Single requests of drawn lengths: random tokens, or pieces of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import gcd
from pathlib import Path
from pydoc_data import topics
from random import Random
from statistics import fmean
from typing import Final, TypeAlias

from pdserve.core.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.workload.request import AnswerOf, BenchRequest, Ids, PromptPart, TokenMaker, draw
from pdserve_bench.workload.spec import Classes, ClassMix, Means, RandomSource, SessionSource, TextSource

SAMPLE: Final = 2000
"""The requests of which means are taken: within 3 % for lengths whose standard deviation is as large as their mean."""
Lengths = tuple[str, int, int]
"""The class of a request, the tokens of its prompt without a common prefix, and those of its answer."""


class _Drawn:
    """The lengths and classes of single requests."""

    notes: tuple[str, ...] = ()
    digest = ""

    def __init__(self, source: RandomSource | TextSource, classes: Classes, prefix_tokens: int) -> None:
        self._source, self._classes = source, classes
        sample = list(islice(self._lengths(0), SAMPLE))
        prompt = prefix_tokens + fmean(one[1] for one in sample)
        self.means = Means(prompt, fmean(one[2] for one in sample))

    def _lengths(self, seed: int) -> Iterator[Lengths]:
        prompts, outputs = Random(f"{seed}:prompt lengths"), Random(f"{seed}:output lengths")
        for name, mix in self._classes.draws(seed):
            prompt, output = mix.prompt or self._source.prompt, mix.output or self._source.output
            yield name, draw(prompt, prompts), draw(output, outputs)


class RandomRequests(_Drawn):
    """Requests of random tokens."""

    def __init__(self, source: RandomSource, classes: Classes) -> None:
        """Take the lengths of the source."""
        super().__init__(source, classes, source.prefix_tokens)
        self._prefix_tokens = source.prefix_tokens

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield endless requests."""
        prefix = tokens.ids(0, self._prefix_tokens, "prefix")
        for number, (name, prompt, output) in enumerate(self._lengths(seed)):
            ids = prefix + tokens.ids(number, prompt)
            yield BenchRequest(number, (ids,), output, slo_class=name, prompt_tokens=len(ids))


class TextRequests(_Drawn):
    """Requests whose prompts are pieces of a text. The text starts over at its end."""

    def __init__(self, source: TextSource, classes: Classes, tokenizer: Tokenizer | None) -> None:
        """Read the text. Raises `ConfigError` without a tokenizer, and for a file that cannot be read or is too short."""
        super().__init__(source, classes, 0)
        if tokenizer is None:
            raise ConfigError("workload.source.kind text needs the model's tokenizer: give its directory")
        text = read_text(source.file)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        if len(self._ids) < 2:
            raise ConfigError(f"workload.source.file: {source.file} has {len(self._ids)} tokens; at least 2 are needed")

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield endless requests. Each begins at another token of the text until all were used."""
        for place, (number, (name, prompt, output)) in zip(self._places(tokens), enumerate(self._lengths(seed)), strict=False):
            ids = self._piece(place, prompt)
            yield BenchRequest(number, (ids,), output, slo_class=name, prompt_tokens=len(ids))

    def _places(self, tokens: TokenMaker) -> Iterator[int]:
        """Yield places that are far from each other: steps of a golden section of the text meet every place once."""
        size = len(self._ids)
        step = next(one for one in count(max(1, round(size * 0.618))) if gcd(one, size) == 1)
        first = tokens.number("text", size)
        return ((first + number * step) % size for number in count())

    def _piece(self, place: int, length: int) -> Ids:
        piece: list[int] = []
        while len(piece) < length:
            piece += self._ids[place : place + length - len(piece)]
            place = 0
        return tuple(piece)


def read_text(file: str) -> str:
    """Read a text file, or return the language reference of Python for an empty name. Raises `ConfigError`."""
    if not file:
        return "\n\n".join(topics.topics.values())
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"workload.source.file: cannot read {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"workload.source.file: {file} is not UTF-8 text: {exc}") from exc


# Conversations as data: which earlier parts and answers the prompt of a turn repeats. Pure.


Piece: TypeAlias = int | AnswerOf
"""The new part of the request with this number, or an answer."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One request of a conversation, before its tokens are made."""

    number: int
    new_tokens: int
    """The tokens that the turn adds to what was said before."""
    max_tokens: int
    after: tuple[int, ...] = ()
    history: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole prompt."""
        return (*self.history, self.number)


def history_after(parents: Sequence[ConversationTurn]) -> tuple[Piece, ...]:
    """Return what a turn after all of these turns repeats.

    What all prompts begin with is repeated once. Then follows for each turn the rest of its prompt and its answer, in order.
    A turn whose answer stands in the prompt of another one adds nothing.
    """
    last = [one for one in parents if not any(AnswerOf(one.number) in other.history for other in parents)]
    common = 0
    while last and all(len(one.pieces) > common and one.pieces[common] == last[0].pieces[common] for one in last):
        common += 1
    pieces = last[0].pieces[:common] if last else ()
    for one in last:
        pieces = (*pieces, *one.pieces[common:], AnswerOf(one.number))
    return pieces


def prompt_tokens(turn: ConversationTurn, turns: Mapping[int, ConversationTurn]) -> int:
    """Return the tokens of a whole prompt. Each answer counts its `max_tokens`."""
    earlier = (turns[one.number].max_tokens if isinstance(one, AnswerOf) else turns[one].new_tokens for one in turn.history)
    return turn.new_tokens + sum(earlier)


def prompt_of(turn: ConversationTurn, part: Callable[[int], PromptPart]) -> tuple[PromptPart, ...]:
    """Return the whole prompt. `part` gives the new part of a request."""
    return tuple([one if isinstance(one, AnswerOf) else part(one) for one in turn.pieces])


# Drawn conversations of several turns, with forks and joins.


SESSIONS_SAMPLE: Final = 400
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
        plans = [plan for _, plan in islice(self._plans(0), SESSIONS_SAMPLE)]
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
