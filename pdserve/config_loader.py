"""Settings from YAML: `load` reads a file, applies flags and overrides, and makes the dataclass; `dump` writes it back.

This file knows no setting. The dataclasses are in `pdserve.config`; the type of each setting states which values it takes.
"""

import dataclasses
import os
import types
import typing
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from pdserve.core.errors import ConfigError

_SUCCESSORS: Final = {"max_restarts": "max_restarts_per_hour (it was a total over the worker's life)"}
"""Each removed setting, and the setting that replaces it."""

NONE_GONE: Final[typing.Mapping[str, str]] = types.MappingProxyType({})

Config = TypeVar("Config")


def load(
    cls: type[Config],
    path: str | os.PathLike[str] | None,
    overrides: typing.Sequence[str] = (),
    settings: typing.Mapping[str, Any] = types.MappingProxyType({}),
) -> Config:
    """Read the YAML file `path` (None: no file), apply `settings` by dotted name, then each override `a.b=c`.

    Raises `ConfigError` that names the file and the setting.
    """
    data = {} if path is None else _read(path)
    for name, value in settings.items():
        _assign(data, name, value)
    for item in overrides:
        name, sep, text = item.partition("=")
        if not sep or not name:
            raise ConfigError(f"--set takes NAME=VALUE, got {item!r}")
        _assign(data, name, _parse_yaml(text, f"--set {name}: {text!r}"))
    try:
        return build(cls, data, "", getattr(cls, "GONE", NONE_GONE))
    except ConfigError as exc:
        if path is None:
            raise
        raise ConfigError(f"{path}: {exc.message}") from exc


def dump(config: Any) -> str:
    """Return YAML that `load` reads back to an equal configuration, without what no file sets."""
    plain = dataclasses.asdict(config)
    for name in getattr(config, "GONE", NONE_GONE):
        section, _, leaf = name.partition(".")
        plain[section].pop(leaf, None)
    return yaml.safe_dump(plain, sort_keys=False)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    data = _parse_yaml(content, str(path))
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping")
    return data or {}


def _parse_yaml(content: str | bytes, where: str) -> Any:
    try:
        data = yaml.safe_load(content)
        repr(data)  # refuses an integer with so many digits that no message could print it
    except Exception as exc:  # PyYAML's conversions raise errors of any type, such as KeyError for `!!bool x`
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(exc).split())}") from exc
    return data


def _assign(data: dict[str, Any], name: str, value: Any) -> None:
    """Set the dotted `name`. A section that is empty in the file (None) becomes a section."""
    *parents, leaf = name.split(".")
    for parent in parents:
        section = {} if data.get(parent) is None else data[parent]
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: {parent} is not a section")
        data[parent] = dict(section)  # a copy, because an alias in YAML makes two sections the same object
        data = data[parent]
    data[leaf] = value


def build(cls: type[Config], data: Any, path: str, gone: typing.Mapping[str, str] = NONE_GONE) -> Config:
    """Make the section `path` (empty: the whole file) from a mapping. `gone` maps each full name that no file may set any more
    to the reason why nothing need be done. Raises `ConfigError` that names the setting."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a section, got {data!r}")
    known = {setting.name: setting for setting in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values, prefix = dict(data), f"{path}." if path else ""
    for name, value in data.items():
        if f"{prefix}{name}" in gone:
            raise ConfigError(f"{prefix}{name} is gone, and need not be replaced: {gone[f'{prefix}{name}']}; remove it")
        if name not in known and name in _SUCCESSORS:
            raise ConfigError(f"{prefix}{name} is gone; its successor is {_SUCCESSORS[name]}")
        if name not in known:
            settable = sorted(each for each in known if f"{prefix}{each}" not in gone)
            raise ConfigError(f"unknown setting {prefix}{name}; known here: {', '.join(settable)}")
        section = known[name].type
        if not isinstance(section, type) or not dataclasses.is_dataclass(section):
            continue
        if not isinstance(value, section):  # a pool inherits the sections of the common engine as they are
            values[name] = build(section, {} if value is None else value, f"{prefix}{name}", gone)  # None: left empty
    for name, setting in known.items():
        if name not in data and setting.default is setting.default_factory:  # both are missing
            raise ConfigError(f"{prefix}{name} must be set")
    try:
        return cls(**values)
    except ConfigError as exc:  # sections that stand in several places name their settings without the path to them
        named = exc.message.startswith((prefix, f"unknown setting {prefix}"))
        raise ConfigError(exc.message if named else f"{prefix}{exc.message}") from exc
