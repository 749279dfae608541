"""The description of a workload, as a YAML file or a short form gives it. Unknown fields are refused by name. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import MOST_TOKENS, Arrivals, BenchRequest, Lengths, TokenMaker, Tokens, most

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
MOST_TURNS: Final = 256
"""The most turns of one conversation."""
Scale: TypeAlias = Annotated[float, Meta(gt=0, le=100)]


class _Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The part of a workload that says where prompts come from."""


class RandomSource(_Source, frozen=True, kw_only=True, tag="random"):
    """Random token ids. No two prompts begin alike, except for the common prefix of `prefix_tokens`."""

    prompt: Lengths = 1024
    output: Lengths = 128
    prefix_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    """The tokens that stand before each prompt, the same ones for all (vLLM's `--random-prefix-len`)."""


class TextSource(_Source, frozen=True, kw_only=True, tag="text"):
    """Pieces of real text, cut between tokens. No two of them begin at the same place until every place was used."""

    prompt: Lengths = 1024
    output: Lengths = 128
    file: str = ""
    """The UTF-8 file with the text. Empty: the language reference that comes with Python."""


class SessionSource(_Source, frozen=True, kw_only=True, tag="sessions"):
    """Conversations of random tokens. The prompt of each turn is the earlier prompt, its answer, and new tokens."""

    turns: Lengths = 3
    prompt: Lengths = 256
    """The new tokens of each turn."""
    output: Lengths = 64
    prefix_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    """The tokens with which every conversation begins, the same ones for all: a system prompt."""
    think_s: Seconds = 1.0
    """The mean time between an answer and the next turn."""
    think: Literal["fixed", "exponential"] = "exponential"
    think_cap_s: Seconds | None = None
    """A longer time to think is shortened to it."""
    fork_share: Share = 0.0
    """The share of the turns between the first and the last one that are two sub-conversations; the next turn joins them."""


class _FileSource(_Source, frozen=True, kw_only=True):
    """The fields of all sources that read requests from a file."""

    file: str
    length_scale: Scale = 1.0
    """All lengths that the file gives as numbers are multiplied by it."""
    max_prompt_tokens: Tokens | None = None
    """The limit of a prompt, after scaling."""
    max_output_tokens: Tokens | None = None
    """The limit of an answer, after scaling. A longer one is cut."""
    too_long: Literal["cut", "drop"] = "cut"
    """A prompt over `max_prompt_tokens` is cut at its end, or its request is left out. The report says how many.

    A prompt that repeats an earlier turn is never cut: it is left out, together with all that comes after it.
    """
    repeat: bool = False
    """The requests start over with other tokens when all were used. Prompts that are given as text or ids stay as they are."""


class MooncakeSource(_FileSource, frozen=True, kw_only=True, tag="mooncake"):
    """A trace of Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`."""


class AzureSource(_FileSource, frozen=True, kw_only=True, tag="azure"):
    """A trace of Azure: CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`. No two prompts begin alike."""


class JsonlSource(_FileSource, frozen=True, kw_only=True, tag="jsonl"):
    """A user's own requests as JSON lines. `pdserve_bench.workload.jsonl` documents the fields."""

    output: Lengths | None = None
    """The length of answers of lines without `max_tokens`."""
    think_cap_s: Seconds | None = None
    """A longer `think_s` of a line is shortened to it."""


GeneratedSource: TypeAlias = RandomSource | TextSource | SessionSource
FileSource: TypeAlias = MooncakeSource | AzureSource | JsonlSource
Source: TypeAlias = GeneratedSource | FileSource


class ClassMix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The share of one SLO class in the workload, and its own lengths. None: those of the source."""

    weight: Annotated[float, Meta(gt=0)]
    prompt: Lengths | None = None
    output: Lengths | None = None


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload: where its requests come from, when they are sent, and to which classes they belong."""

    source: Source
    arrivals: Arrivals = Arrivals()
    classes: dict[str, Annotated[float, Meta(gt=0)] | ClassMix] = {}
    """A weight for each SLO class, or a weight with lengths. Empty: all requests belong to the default class."""
    max_model_len: Tokens | None = None
    """The most tokens of a prompt together with its answer. None: it is not checked."""
    vocab_size: Annotated[int, Meta(ge=16, le=MOST_TOKENS)] | None = None
    """Random tokens are below it. None: the tokenizer says which ids there are."""

    def __post_init__(self) -> None:
        """Check what concerns several fields. Raises `ConfigError`."""
        mixes = self.mixes
        # The prompts alone of very long conversations would fill the memory.
        if isinstance(self.source, SessionSource) and (turns := most(self.source.turns)) > MOST_TURNS:
            raise ConfigError(f"workload.source.turns may be {turns}, more than {MOST_TURNS}: choose fewer")
        if not all(math.isfinite(mix.weight) for mix in mixes.values()):
            raise ConfigError("workload.classes: weights must be finite")
        for name, mix in mixes.items():
            if isinstance(self.source, FileSource) and (mix.prompt is not None or mix.output is not None):
                raise ConfigError(f"workload.classes.{name}: the file gives the lengths; leave prompt and output out")
            self._check_length(f"workload.classes.{name}", mix)
        if not mixes:
            self._check_length("workload.source", ClassMix(weight=1.0))

    @property
    def mixes(self) -> dict[str, ClassMix]:
        """The classes, each with its weight and its lengths."""
        return {name: mix if isinstance(mix, ClassMix) else ClassMix(weight=mix) for name, mix in self.classes.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the workload as plain data. `parse_spec` reads it back to an equal one."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def _check_length(self, where: str, mix: ClassMix) -> None:
        """Refuse lengths that may exceed `max_model_len`. Files are checked when they are read."""
        source = self.source
        if self.max_model_len is None or isinstance(source, FileSource):
            return
        prompt, output = most(mix.prompt or source.prompt), most(mix.output or source.output)
        prefix = 0 if isinstance(source, TextSource) else source.prefix_tokens
        branches = 1 + bool(isinstance(source, SessionSource) and source.fork_share)
        turns = branches * most(source.turns) if isinstance(source, SessionSource) else 1
        if (tokens := prefix + turns * (prompt + output)) > self.max_model_len:
            raise ConfigError(
                f"{where}: prompt and output may take {tokens} tokens, more than max_model_len {self.max_model_len}: "
                "choose shorter lengths or fewer turns"
            )


def parse_spec(data: object) -> WorkloadSpec:
    """Check plain data, such as a YAML file gives, and return the workload. Raises `ConfigError` that names the field."""
    try:
        return msgspec.convert(data, WorkloadSpec)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"workload: {exc}") from exc


# The value of `--workload`: a YAML file, or a short form such as `random:1024/128,prefix_tokens=256`.


GENERATED: Final = ("random", "text", "sessions")
FROM_FILES: Final = ("mooncake", "azure", "jsonl")
MOST_YAML_BYTES: Final = 1 << 20
_EXPONENT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e-05, which YAML 1.1 takes for text."""


def read_spec(text: str, overrides: Sequence[str] = (), max_model_len: int | None = None) -> WorkloadSpec:
    """Read `--workload`, and apply overrides `NAME=VALUE` with dotted names. Raises `ConfigError`.

    `max_model_len` bounds a workload that names no bound of its own. The short forms are `random:PROMPT/OUTPUT`,
    `text:PROMPT/OUTPUT`, `sessions:NAME=VALUE`, `mooncake:FILE`, `azure:FILE` and `jsonl:FILE`; fields of the source follow as
    `,NAME=VALUE`. Recorded times are kept if the file is a public trace.
    """
    kind, colon, rest = text.partition(":")
    if text.endswith(".jsonl") and kind not in FROM_FILES:
        raise ConfigError(f"--workload {text}: a file of requests is given as jsonl:{text}")
    data = _short(kind, rest) if colon and kind in GENERATED + FROM_FILES else _yaml_file(text)
    for item in overrides:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"a field of the workload is given as NAME=VALUE, got {item!r}")
        _assign(data, name, _value(name, value))
    if max_model_len is not None:
        data.setdefault("max_model_len", max_model_len)
    return parse_spec(data)


def _short(kind: str, rest: str) -> dict[str, Any]:
    """Read a short form. A file's name may hold commas: the fields begin at the first one with a name and `=` behind it."""
    head, *fields = rest.split(",")
    while fields and not fields[0].partition("=")[0].replace("_", "a").replace(".", "a").isalpha():
        head = f"{head},{fields.pop(0)}"
    source: dict[str, Any] = {"kind": kind}
    if kind in FROM_FILES:
        source["file"] = head
    elif kind == "sessions":
        fields = [head, *fields] if head else fields
    elif head:
        source |= _lengths(f"{kind}:{rest}", head)
    data: dict[str, Any] = {"source": source}
    if kind in ("mooncake", "azure"):
        data["arrivals"] = {"kind": "trace"}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or not name:
            raise ConfigError(f"--workload {kind}: a field is given as NAME=VALUE, got {field!r}")
        _assign(source, name, _value(name, value))
    return data


def _lengths(text: str, head: str) -> dict[str, int]:
    prompt, slash, output = head.partition("/")
    if not (slash and prompt.isascii() and prompt.isdecimal() and output.isascii() and output.isdecimal()):
        raise ConfigError(
            f"--workload {text}: the lengths are given as PROMPT/OUTPUT in tokens, such as 1024/128, got {head!r}"
        )
    if max(len(prompt), len(output)) > 9:
        raise ConfigError(f"--workload {text}: a length has at most 9 digits")
    return {"prompt": int(prompt), "output": int(output)}


def _yaml_file(text: str) -> dict[str, Any]:
    path = Path(text)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_YAML_BYTES + 1)
    except (OSError, ValueError) as exc:
        forms = ", ".join(f"{kind}:" for kind in GENERATED + FROM_FILES)
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(
            f"--workload {text}: cannot read this YAML file ({reason}), and it begins with none of {forms}"
        ) from exc
    if len(content) > MOST_YAML_BYTES:
        raise ConfigError(
            f"--workload {text}: a description of a workload has at most {MOST_YAML_BYTES} bytes; a trace is mooncake:FILE"
        )
    data = _value(text, content)
    if not isinstance(data, dict):
        raise ConfigError(f"--workload {text}: the file must hold a mapping with the key source")
    return data


def _value(where: str, text: str | bytes) -> Any:
    if isinstance(text, str) and _EXPONENT.fullmatch(text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except Exception as exc:  # PyYAML's conversions raise errors of any type
        raise ConfigError(f"workload: {where} is not valid YAML: {' '.join(str(exc).split())[:300]}") from exc


def _assign(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name."""
    *parents, leaf = name.split(".")
    for parent in parents:
        section = data.get(parent)
        if not isinstance(section, dict | None):
            raise ConfigError(f"workload.{name}: {parent} is not a section")
        data[parent] = dict(section or {})
        data = data[parent]
    data[leaf] = value


# The interface of a source of requests to the workload. Pure.


@dataclass(frozen=True, slots=True)
class Means:
    """The means over the requests of a source."""

    prompt_tokens: float
    output_tokens: float
    start_share: float = 1.0
    """The share of the requests that wait for no other one."""
    recorded_rate_per_s: float | None = None
    """The mean rate of a recorded source. None: it has no times."""


class RequestSource(Protocol):
    """A source that was read and checked."""

    notes: tuple[str, ...]
    """Sentences that say what was cut or left out."""
    digest: str
    """The SHA-256 of the source's file. Empty: it has none."""
    means: Means

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests. `send_at_s` is the recorded time, or None."""


class Classes:
    """The SLO classes of a workload. The class of a request is drawn by a stream of its own."""

    def __init__(self, mixes: dict[str, ClassMix]) -> None:
        """Take the classes; without any, all requests belong to the default class."""
        self._names = [*mixes] or [""]
        self._mixes = [*mixes.values()] or [ClassMix(weight=1.0)]
        self._weights = [mix.weight for mix in self._mixes]

    def draws(self, seed: int) -> Iterator[tuple[str, ClassMix]]:
        """Yield endless classes with their lengths."""
        random, indices = Random(f"{seed}:classes"), range(len(self._names))
        while True:
            index = random.choices(indices, self._weights)[0]
            yield self._names[index], self._mixes[index]
