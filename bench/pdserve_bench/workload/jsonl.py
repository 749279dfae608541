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

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.lengths import Tokens
from pdserve_bench.workload.spec import Seconds
from pdserve_bench.workload.traces import json_lines

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
