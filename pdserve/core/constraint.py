"""Constraints on a request's output, and what a sequence needs to know of one. Pure.

`pdserve.structured` compiles a constraint to a grammar. A sequence knows its place in the grammar by the protocol
`GrammarState` alone, so neither the scheduler nor the sampler depends on the library that compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from pdserve.core.errors import InvalidRequest

FIELD: Final = "structured_outputs"
"""The field of a request that holds its constraint. The name is vLLM's."""
MAX_GRAMMAR_BYTES: Final = 64 << 10
"""The most bytes of a constraint. The largest schema of the JSONSchemaBench data set that people wrote by hand has 50 KB."""
MAX_CHOICES: Final = 1024


class ConstraintKind(Enum):
    """The language in which a constraint is written. The values are the names of vLLM's `structured_outputs`."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json"
    REGEX = "regex"
    LARK = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on all of a request's output: if the output ends by itself, its text belongs to this language.

    `text` is the JSON schema, the regular expression or the Lark grammar. `choices` are the whole texts of which the output is
    one. `JSON_OBJECT` needs neither. Raises `InvalidRequest`, which names the field and the limit.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        field = f"{FIELD}.{self.kind.value}"
        if (self.kind is ConstraintKind.CHOICE) != bool(self.choices):
            raise InvalidRequest("a list of choices and nothing else belongs to `choice`", field=field)
        if (self.kind in (ConstraintKind.JSON_OBJECT, ConstraintKind.CHOICE)) == bool(self.text):
            raise InvalidRequest("must hold a text" if not self.text else "takes no text", field=field)
        if len(self.choices) > MAX_CHOICES:
            raise InvalidRequest(f"has {len(self.choices)} choices; at most {MAX_CHOICES} are allowed", field=field)
        if not all(self.choices):
            raise InvalidRequest("a choice must not be empty", field=field)
        try:
            size = sum(len(one.encode()) for one in (self.text, *self.choices))
        except UnicodeEncodeError as exc:
            raise InvalidRequest("is not valid Unicode: it has a lone surrogate", field=field) from exc
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", field=field)


class GrammarState(Protocol):
    """The place in a grammar that the output of one sequence has reached. It depends on the output tokens alone, so it is the
    same after a preemption, a handoff and a replay. One thread uses it at a time."""

    @property
    def ended(self) -> bool:
        """True when no token may follow the known output, except the end of the sequence."""

    @property
    def failure(self) -> str | None:
        """The reason, in words, why the grammar cannot go on. None: it can. A failure is final."""

    def catch_up(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Take the output tokens that are new. `tokens` is the prompt, then the output; earlier ones must not have changed."""

    def mask(self) -> bytes | None:
        """Return which tokens may come next. Bit i % 8 of byte i // 8 is set if token id i may. None: the grammar has failed.

        It is computed once for each place, in up to some milliseconds without the interpreter lock.
        """
