"""The value of `--workload`: a YAML file, or a short form such as `random:1024/128,prefix_tokens=256`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.spec import WorkloadSpec, parse_spec

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
