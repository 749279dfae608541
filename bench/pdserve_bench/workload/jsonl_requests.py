"""The requests of a user's own file, with the conversations that its lines form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.conversation import ConversationTurn, history_after, prompt_tokens
from pdserve_bench.workload.jsonl import JsonLine, read_lines
from pdserve_bench.workload.lengths import draw
from pdserve_bench.workload.recorded import limit_notes
from pdserve_bench.workload.request import AnswerOf, BenchRequest, Ids, PromptPart
from pdserve_bench.workload.source import Classes, Means
from pdserve_bench.workload.spec import MOST_TURNS, JsonlSource
from pdserve_bench.workload.tokens import TokenMaker, WorkloadTokenizer
from pdserve_bench.workload.traces import file_digest


@dataclass(frozen=True, slots=True)
class _Planned:
    """One line that is sent. The numbers of its turn count within one pass through the file."""

    line: JsonLine
    turn: ConversationTurn
    part: str | Ids | int
    """The new part of the prompt; a number stands for so many random tokens."""
    prompt_tokens: int


class JsonlRequests:
    """The requests of one file, scaled and cut as the source says."""

    def __init__(
        self, source: JsonlSource, classes: Classes, tokenizer: WorkloadTokenizer | None, max_model_len: int | None
    ) -> None:
        """Read the file and plan every request. Raises `ConfigError` that names line and field."""
        self._source, self._classes, self._tokenizer = source, classes, tokenizer
        self._outputs = Random("output lengths")
        self._cut_prompts = self._left_out = self._cut_outputs = self._orphans = 0
        path = Path(source.file)
        lines = read_lines(path)
        self.digest = file_digest(path)
        self._plans: list[_Planned] = []
        self._plan(lines, max_model_len)
        if not self._plans:
            raise ConfigError(f"{path}: every prompt is over max_prompt_tokens {source.max_prompt_tokens}; raise it")
        self.notes = tuple(self._notes(len(lines)))
        times_s = self._times_s()
        span_s = times_s[-1] - times_s[0] if times_s else 0.0
        starts = sum(not plan.turn.after for plan in self._plans)
        rate_per_s = (starts - 1) / span_s * len(self._plans) / starts if span_s > 0 else None
        self.means = Means(
            fmean(plan.prompt_tokens for plan in self._plans),
            fmean(plan.turn.max_tokens for plan in self._plans),
            starts / len(self._plans),
            rate_per_s,
        )

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests, once or without end. `send_at_s` is the recorded time."""
        classes, times_s = self._classes.draws(seed), self._times_s()
        period_s = len(self._plans) / (self.means.recorded_rate_per_s or float("inf"))
        for turn in count() if self._source.repeat else (0,):
            for plan in self._plans:
                time_s = plan.line.said.timestamp_s
                name, said = next(classes)[0], plan.line.said
                yield BenchRequest(
                    turn * len(self._plans) + plan.turn.number,
                    tuple(self._parts(plan, turn * len(self._plans), tokens)),
                    plan.turn.max_tokens,
                    send_at_s=None if plan.turn.after or time_s is None else time_s - times_s[0] + turn * period_s,
                    after=tuple([one + turn * len(self._plans) for one in plan.turn.after]),
                    think_s=min(said.think_s, said.think_s if (cap_s := self._source.think_cap_s) is None else cap_s),
                    slo_class=said.slo_class or name,
                    session=f"{said.session}-{turn}" if said.session and turn else said.session,
                    prompt_tokens=plan.prompt_tokens,
                )

    def _parts(self, plan: _Planned, first: int, tokens: TokenMaker) -> Iterator[PromptPart]:
        for piece in plan.turn.pieces:
            if isinstance(piece, AnswerOf):
                yield AnswerOf(piece.number + first)
            else:
                part = self._plans[piece].part
                yield tokens.ids(first + piece, part) if isinstance(part, int) else part

    def _times_s(self) -> list[float]:
        starts = [plan.line.said.timestamp_s for plan in self._plans if not plan.turn.after]
        return [time_s for time_s in starts if time_s is not None]

    def _plan(self, lines: list[JsonLine], max_model_len: int | None) -> None:
        """Plan the lines. What is left out takes with it all that comes after it."""
        numbers: dict[int, int] = {}  # the numbers of sent requests, by the place of their line
        turns: dict[int, ConversationTurn] = {}
        for place, line in enumerate(lines):
            if any(one not in numbers for one in line.after):
                self._orphans += 1
                continue
            parents = [turns[numbers[one]] for one in line.after]
            one = self._planned(line, parents, turns)
            if one is None:
                continue
            self._check(one, max_model_len)
            numbers[place] = one.turn.number
            turns[one.turn.number] = one.turn
            self._plans.append(one)

    def _planned(self, line: JsonLine, parents: list[ConversationTurn], turns: dict[int, ConversationTurn]) -> _Planned | None:
        """Plan one line. None: it is left out, because its prompt is too long."""
        part, length = self._own(line)
        history = history_after(parents) if line.said.history else ()
        if len(history) > 2 * MOST_TURNS:
            raise ConfigError(
                f"{self._source.file}, line {line.number}: the conversation has more than {MOST_TURNS} turns; split it, or set "
                "history to false"
            )
        after = tuple([one.number for one in parents])
        turn = ConversationTurn(len(self._plans), length, asked := self._max_tokens(line), after, history)
        total, most = prompt_tokens(turn, turns), self._source.max_prompt_tokens
        if most is not None and total > most:
            if history or self._source.too_long == "drop":
                self._left_out += 1
                return None
            self._cut_prompts += 1
            part, length = self._cut(part, most)
            turn, total = replace(turn, new_tokens=length), length
        if (limit := self._source.max_output_tokens) is not None and asked > limit:
            self._cut_outputs += 1
            turn = replace(turn, max_tokens=limit)
        return _Planned(line, turn, part, total)

    def _own(self, line: JsonLine) -> tuple[str | Ids | int, int]:
        """Return the new part of a line, and its tokens."""
        said = line.said
        if said.prompt_ids is not None:
            return said.prompt_ids, len(said.prompt_ids)
        if said.prompt_tokens is not None:
            scaled = max(1, round(said.prompt_tokens * self._source.length_scale))
            return scaled, scaled
        if self._tokenizer is None:
            raise ConfigError(f"{self._source.file}, line {line.number}: prompt is text, which needs the model's tokenizer")
        text = said.prompt or ""
        return text, len(self._tokenizer.encode(text, add_special_tokens=not line.after))

    def _cut(self, part: str | Ids | int, most: int) -> tuple[str | Ids | int, int]:
        """Cut the end of a prompt. A text is cut between tokens, and may then have a token less."""
        if isinstance(part, int):
            return most, most
        if not isinstance(part, str):
            return part[:most], most
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(part)
        for kept in range(most, 0, -1):
            text = self._tokenizer.decode(tuple(ids[:kept]))
            if text and (length := len(self._tokenizer.encode(text))) <= most:
                return text, length
        raise ConfigError(f"{self._source.file}: max_prompt_tokens {most} leaves nothing of a text; raise it")

    def _max_tokens(self, line: JsonLine) -> int:
        given = line.said.max_tokens or line.said.output_tokens
        if given is None and self._source.output is None:
            raise ConfigError(
                f"{self._source.file}, line {line.number}: max_tokens must be given, or output of the source for all lines"
            )
        if given is not None:
            return max(1, round(given * self._source.length_scale))
        assert self._source.output is not None
        return draw(self._source.output, self._outputs)

    def _check(self, one: _Planned, max_model_len: int | None) -> None:
        where = f"{self._source.file}, line {one.line.number}"
        if max_model_len is not None and one.prompt_tokens + one.turn.max_tokens > max_model_len:
            raise ConfigError(
                f"{where}: {one.prompt_tokens} prompt and {one.turn.max_tokens} answer tokens are over max_model_len "
                f"{max_model_len}: set max_prompt_tokens and max_output_tokens"
            )
        earlier = [self._plans[piece].part for piece in one.turn.history if not isinstance(piece, AnswerOf)]
        if any(isinstance(part, str) != isinstance(one.part, str) for part in earlier):
            raise ConfigError(
                f"{where}: prompt is text where an earlier turn has token ids, or the other way round; use one form"
            )

    def _notes(self, total: int) -> Iterator[str]:
        yield from limit_notes(self._source, self._cut_prompts, self._left_out, self._cut_outputs, total)
        if self._orphans:
            yield f"{self._orphans} of {total} requests come after one that is left out, and are left out too."
