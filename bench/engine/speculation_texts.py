"""The requests of `bench.engine.speculation`: prose, chat, code, JSON, summaries that quote, edits and verbatim copies.

All texts are made from code and from what Python ships, so every machine has the same. Each kind has two halves: the choice of
drafts may be tuned on one, and figures are reported of the other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Final

from bench.engine.lookup import DATA, EDITS, QUESTIONS, functions, passages
from pdserve.core.structured.constraint import Constraint, ConstraintKind

HALVES: Final = ("tune", "report")
TEXTS: Final = 24
"""The texts of each kind, in both halves together."""
_SUBJECTS: Final = (
    "a lighthouse keeper", "a lost dog", "two sisters", "a broken clock", "an old teacher", "a winter journey",
    "a small bakery", "a forgotten letter", "a night train", "the last apple tree", "a fisherman", "a new neighbour",
    "a market in the rain", "a stubborn goat", "the first day of school", "a missing key", "a violin", "an empty house",
    "a long walk", "the river", "a doctor in a village", "a boy who counts stars", "a painter", "a ferry",
)  # fmt: skip
_PROGRAMS: Final = (
    "a Python class for a stack with push, pop and peek", "a Python function that sums a column of a CSV file",
    "a C function that reverses a linked list", "a JavaScript function that debounces another function",
    "a Python function that finds all primes below n", "a Java class for a bank account",
    "a Python class for a binary search tree with insert and search", "an SQL schema for a library with books and loans",
    "a Python function that merges two sorted lists", "a C program that counts the words of a file",
    "a Python class for a queue that two stacks make up", "a JavaScript class for a shopping cart",
    "a Python function that computes Fibonacci numbers with a cache", "a Go function that finds palindromes",
    "a Python script that renames all files of a folder", "a C struct for a matrix with functions to add and multiply",
    "a Python decorator that measures time", "an HTML page with a form for a name and an address",
    "a Python class for a bank account with tests", "a Java method that sorts an array with quicksort",
    "a Python function that converts Roman numerals", "a bash script that backs up a folder",
    "a Python class for a temperature with conversions", "a JavaScript function that fetches a list of users and shows it",
)  # fmt: skip


@dataclass(slots=True)
class Text:
    """One request: the user's message, and what the form of the answer must be (None: any)."""

    kind: str
    message: str
    constraint: Constraint | None = None
    prompt: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)
    """The greedy answer without speculation, as token ids, up to the place where it begins to repeat itself. That of a copy
    ends where it is no copy any more."""


def copied(answer: Sequence[int], message: str, decode: Callable[[Sequence[int]], str]) -> int:
    """Return how many first tokens of an answer are a piece of the message, word for word."""
    return bisect_left(range(1, len(answer) + 1), True, key=lambda count: decode(answer[:count]) not in message)


def of_kind(kind: str, half: str) -> list[Text]:
    """Return the texts of one kind and half. A kind of copies has more, since the model does not copy all of them."""
    return list(_KINDS[kind]())[HALVES.index(half) :: 2]


def _schema(topic: str) -> Constraint:
    """Return the form of a list of eight objects about a topic, such as `books with title and year`."""
    keys = re.split(r", | and ", topic.partition(" with ")[2])
    words = {"type": "string", "maxLength": 40}
    one = {"type": "object", "properties": dict.fromkeys(keys, words), "required": keys, "additionalProperties": False}
    schema = {"type": "array", "items": one, "minItems": 8, "maxItems": 8}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def _stories() -> Iterator[Text]:
    return (Text("prose", f"Write a long story about {subject}.") for subject in _SUBJECTS)


def _chats() -> Iterator[Text]:
    return (Text("chat", question) for question in QUESTIONS)


def _programs() -> Iterator[Text]:
    return (Text("code", f"Write {program}.") for program in _PROGRAMS)


def _edits() -> Iterator[Text]:
    for i, code in zip(range(TEXTS), functions(), strict=False):
        yield Text("edit", f"{EDITS[i // 2 % len(EDITS)]}\n\n```python\n{code}```")


def _summaries() -> Iterator[Text]:
    for _, text in zip(range(TEXTS), passages(1000, 1800), strict=False):
        yield Text("summary", f"Summarize the following text. Quote its most important sentences.\n\n{text}")


def _data(constrained: bool) -> Iterator[Text]:
    for number in range(TEXTS):
        topic = DATA[number % 2 * (len(DATA) // 2) + number // 2 % (len(DATA) // 2)]  # the halves have different topics
        count = ("eight", "the eight most famous")[2 * number // TEXTS]
        message = f"List {count} {topic}. Answer only with a JSON list of objects."
        yield Text("schema" if constrained else "json", message, constraint=_schema(topic) if constrained else None)


def _copies() -> Iterator[Text]:
    """Yield texts that a small model may copy: numbered lines, rows, code and prose."""
    names, code, prose = sorted(topics.topics), list(functions()), list(passages(1000, 1800))[TEXTS:]
    words = [[names[(7 * i + 5 * j) % len(names)] for j in range(24)] for i in range(TEXTS)]
    lines = ["\n".join(f"{j}. {word}: {len(word)} letters" for j, word in enumerate(some, 1)) for some in words]
    rows = ["\n".join(f"{word},{len(word)},{word[0]}" for word in some) for some in words]
    for asked, texts in (
        ("Repeat this list exactly, without any change.\n\n{}", lines),
        ("Repeat these rows exactly, without any change.\n\n{}", rows),
        ("Repeat this code exactly, without any change.\n\n```python\n{}```", code[:TEXTS]),
        ("Repeat the following text word for word.\n\n{}", [text[:1000] for text in prose[:TEXTS]]),
    ):
        yield from (Text("copy", asked.format(text)) for text in texts)


_KINDS: Final[dict[str, Callable[[], Iterator[Text]]]] = {
    "prose": _stories,
    "chat": _chats,
    "code": _programs,
    "edit": _edits,
    "json": lambda: _data(False),
    "schema": lambda: _data(True),
    "summary": _summaries,
    "copy": _copies,
}
KINDS: Final = tuple(_KINDS)
