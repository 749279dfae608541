"""Single requests of drawn lengths: random tokens, or pieces of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count, islice
from math import gcd
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from random import Random
from statistics import fmean
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.lengths import draw
from pdserve_bench.workload.request import BenchRequest, Ids
from pdserve_bench.workload.source import Classes, Means
from pdserve_bench.workload.spec import RandomSource, TextSource
from pdserve_bench.workload.tokens import TokenMaker, WorkloadTokenizer

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

    def __init__(self, source: TextSource, classes: Classes, tokenizer: WorkloadTokenizer | None) -> None:
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
