"""A user's own requests, one JSON object a line. Unknown fields are refused, and every error names file, line and field.

| field | meaning |
|---|---|
| `prompt` | the new text of the prompt |
| `prompt_ids` | its token ids, in place of text |
| `prompt_tokens` | a number of random tokens, in place of text |
| `max_tokens` or `output_tokens` | the tokens of the answer; without them, `output` of the source is drawn |
| `timestamp_s` | the time of sending, never earlier than that of a line above; lines with `after` need none |
| `slo_class`, `session` | the class and the conversation |
| `id` | a name for lines below |
| `after` | the `id`, or a list of them, of lines above that must have ended |
| `think_s` | the time to wait after them |
| `history` | false: the prompt does not repeat the prompts and answers of the lines in `after` |

Exactly one of `prompt`, `prompt_ids` and `prompt_tokens` stands in a line. The fields `prompt` and `output_tokens` are those of
vLLM's custom data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from itertools import count as endless
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.workload.generated import ConversationTurn, history_after, prompt_tokens
from pdserve_bench.workload.request import AnswerOf, BenchRequest, Ids, PromptPart, TokenMaker, Tokens, draw
from pdserve_bench.workload.spec import (
    MOST_TURNS,
    AzureSource,
    Classes,
    FileSource,
    JsonlSource,
    Means,
    MooncakeSource,
    Seconds,
)
from pdserve_bench.workload.traces import BLOCK_TOKENS, Trace, TraceRow, file_digest, json_lines

Name = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class JsonlLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    prompt_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1)] | None = None
    prompt_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    timestamp_s: Annotated[float, Meta(ge=0)] | None = None
    slo_class: str = ""
    session: str = ""
    id: Name | None = None
    after: Name | tuple[Name, ...] = ()
    think_s: Seconds = 0.0
    history: bool = True

    def __post_init__(self) -> None:
        """Check that the line has one prompt and at most one length. Raises ValueError."""
        prompts = [self.prompt, self.prompt_ids, self.prompt_tokens]
        if sum(one is not None for one in prompts) != 1:
            raise ValueError("exactly one of prompt, prompt_ids and prompt_tokens must be given")
        if self.max_tokens is not None and self.output_tokens is not None:
            raise ValueError("max_tokens and output_tokens mean the same: give one of them")


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A line of the file with the places of the lines that it comes after."""

    number: int
    """The line of the file, from 1."""
    said: JsonlLine
    after: tuple[int, ...]
    """The places, from 0, of earlier lines in the list of lines."""


def read_lines(path: Path) -> list[JsonLine]:
    """Read the file. Raises `ConfigError` for a malformed line, and for a file without any."""
    decoder = msgspec.json.Decoder(JsonlLine)
    lines: list[JsonLine] = []
    places: dict[str, int] = {}
    last_s: float | None = None
    for number, text in json_lines(path):
        where = f"{path}, line {number}"
        try:
            said = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise ConfigError(f"{where}: {exc}") from exc
        lines.append(JsonLine(number, said, _after(where, said, places)))
        if said.id is not None and places.setdefault(said.id, len(lines) - 1) != len(lines) - 1:
            raise ConfigError(f"{where}: id {said.id!r} is already that of line {lines[places[said.id]].number}")
        if not lines[-1].after:
            last_s = _check_time(where, said, last_s, first=len(lines) == 1)
    if not lines:
        raise ConfigError(f"{path} holds no requests")
    return lines


def _after(where: str, said: JsonlLine, places: dict[str, int]) -> tuple[int, ...]:
    names = (said.after,) if isinstance(said.after, str) else said.after
    for name in names:
        if name not in places:
            raise ConfigError(f"{where}: after names {name!r}, which is the id of no line above")
    if said.think_s and not names:
        raise ConfigError(f"{where}: think_s has no meaning without after")
    return tuple(dict.fromkeys(places[name] for name in names))


def _check_time(where: str, said: JsonlLine, last_s: float | None, *, first: bool) -> float | None:
    """Check that all lines without `after` have times or none has, and that the times are in order."""
    if (said.timestamp_s is None) != (last_s is None) and not first:
        raise ConfigError(f"{where}: timestamp_s must stand in all lines without after, or in none")
    if said.timestamp_s is not None and last_s is not None and said.timestamp_s < last_s:
        raise ConfigError(f"{where}: timestamp_s {said.timestamp_s:g} is earlier than that of a line above, {last_s:g}")
    return said.timestamp_s


# The requests of a user's own file, with the conversations that its lines form.


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

    def __init__(self, source: JsonlSource, classes: Classes, tokenizer: Tokenizer | None, max_model_len: int | None) -> None:
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
        for turn in endless() if self._source.repeat else (0,):
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


# Requests of traces that give lengths, and Mooncake's blocks: equal blocks at the start of two prompts are equal tokens.


KEPT_BLOCKS: Final = 1 << 12
"""The blocks whose tokens are kept: 2 Mi tokens, 16 MiB of references."""


class TraceRequests:
    """The requests of one trace, scaled and cut as the source says."""

    def __init__(
        self, source: MooncakeSource | AzureSource, trace: Trace, classes: Classes, max_model_len: int | None, head_tokens: int
    ) -> None:
        """Scale all lengths. Raises `ConfigError` if a request is over `max_model_len`, or if none is left.

        `head_tokens` are the first tokens by which blocks differ: no block may be shorter.
        """
        self._source, self._classes, self.digest = source, classes, trace.digest
        self._block_tokens = max(1, round(BLOCK_TOKENS * source.length_scale))
        if self._block_tokens < head_tokens and trace.rows[0].blocks:
            raise ConfigError(
                f"workload.source.length_scale must be at least {head_tokens / BLOCK_TOKENS:.4f}: blocks of "
                f"{self._block_tokens} tokens cannot be told apart, {head_tokens} are needed"
            )
        rows = [self._scaled(row) for row in trace.rows]
        self.notes = tuple(_notes(source, rows, trace.empty))
        most = math.inf if source.too_long == "cut" else source.max_prompt_tokens or math.inf
        self._rows = [self._cut(row) for row in rows if row.prompt_tokens <= most]
        if not self._rows:
            raise ConfigError(f"{source.file}: every prompt is over max_prompt_tokens {source.max_prompt_tokens}; raise it")
        self._check(max_model_len)
        span_s, steps = self._rows[-1].arrived_s - self._rows[0].arrived_s, len(self._rows) - 1
        self.means = Means(
            fmean(row.prompt_tokens for row in self._rows),
            fmean(row.output_tokens for row in self._rows),
            recorded_rate_per_s=steps / span_s if span_s > 0 else None,
        )
        self._most_block = max((max(row.blocks) for row in self._rows if row.blocks), default=0) + 1

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests, once or without end. `send_at_s` is the recorded time."""
        block = lru_cache(KEPT_BLOCKS)(lambda number: tokens.ids(number, self._block_tokens, "block"))
        classes, first_s = self._classes.draws(seed), self._rows[0].arrived_s
        period_s = len(self._rows) / (self.means.recorded_rate_per_s or float("inf"))
        for turn in endless() if self._source.repeat else (0,):
            for place, row in enumerate(self._rows):
                number = turn * len(self._rows) + place
                yield BenchRequest(
                    number,
                    (self._prompt(row, number, turn * self._most_block, tokens, block),),
                    row.output_tokens,
                    send_at_s=row.arrived_s - first_s + turn * period_s,
                    slo_class=next(classes)[0],
                    prompt_tokens=row.prompt_tokens,
                )

    def _prompt(self, row: TraceRow, number: int, first_block: int, tokens: TokenMaker, block: Callable[[int], Ids]) -> Ids:
        if not row.blocks:
            return tokens.ids(number, row.prompt_tokens)
        return tuple(chain.from_iterable([block(first_block + one) for one in row.blocks]))[: row.prompt_tokens]

    def _scaled(self, row: TraceRow) -> TraceRow:
        """Scale a request. All blocks are scaled alike, so that prompts still share as many of them."""
        scale, output = self._source.length_scale, max(1, round(row.output_tokens * self._source.length_scale))
        prompt = max(1, round(row.prompt_tokens * scale))
        if row.blocks:
            rest = row.prompt_tokens - BLOCK_TOKENS * (len(row.blocks) - 1)
            last = min(self._block_tokens, max(1, round(rest * scale)))
            prompt = self._block_tokens * (len(row.blocks) - 1) + last
        return replace(row, prompt_tokens=prompt, output_tokens=output)

    def _cut(self, row: TraceRow) -> TraceRow:
        prompt = min(row.prompt_tokens, self._source.max_prompt_tokens or row.prompt_tokens)
        output = min(row.output_tokens, self._source.max_output_tokens or row.output_tokens)
        blocks = row.blocks[: -(-prompt // self._block_tokens)]
        return replace(row, prompt_tokens=prompt, output_tokens=output, blocks=blocks)

    def _check(self, max_model_len: int | None) -> None:
        for row in self._rows:
            if max_model_len is not None and row.prompt_tokens + row.output_tokens > max_model_len:
                raise ConfigError(
                    f"{self._source.file}, line {row.line}: {row.prompt_tokens} prompt and {row.output_tokens} answer tokens "
                    f"are over max_model_len {max_model_len}: set length_scale, max_prompt_tokens and max_output_tokens"
                )


def limit_notes(source: FileSource, cut: int, left_out: int, cut_outputs: int, total: int) -> Iterator[str]:
    """Yield what a report says about prompts and answers over the limits of the source."""
    if source.length_scale != 1:
        yield f"All lengths of {source.file} are multiplied by {source.length_scale:g}."
    for count, what in ((cut, "cut to that"), (left_out, "left out")):
        if count:
            yield f"{count} of {total} prompts are over {source.max_prompt_tokens} tokens and are {what}."
    if cut_outputs:
        yield f"{cut_outputs} of {total} answers are cut to {source.max_output_tokens} tokens."


def _notes(source: MooncakeSource | AzureSource, rows: Sequence[TraceRow], empty: int) -> Iterator[str]:
    if empty:
        yield f"{empty} lines of {source.file} have no prompt or no answer tokens and are left out."
    prompts, outputs = source.max_prompt_tokens, source.max_output_tokens
    kept = [row for row in rows if source.too_long == "cut" or prompts is None or row.prompt_tokens <= prompts]
    long_prompts = sum(prompts is not None and row.prompt_tokens > prompts for row in rows)
    long_outputs = sum(outputs is not None and row.output_tokens > outputs for row in kept)
    cut = source.too_long == "cut"
    yield from limit_notes(source, long_prompts * cut, long_prompts * (not cut), long_outputs, len(rows))
