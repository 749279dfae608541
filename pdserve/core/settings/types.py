"""The types that settings have, the check of a section against them, and the test for hosts that only this machine reaches.

msgspec converts and compares. `_accepted` says in words what a type takes, so that an error needs nothing from msgspec.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import typing
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, inspect

from pdserve.core.errors import ConfigError

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Bytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"})]  # a text such as 256MiB is accepted as well
NonNegativeBytes = Annotated[int, Meta(ge=0, extra={"unit": "bytes"})]  # the same, or 0

MAX_PATH: Final = 500
"""The names of all settings have fewer than 100 characters."""
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_WORDS: Final = {
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.DictType: "a section",
    inspect.DataclassType: "a section",
}


def parse_bytes(text: str) -> int:
    """Return the bytes that `256MiB`, `1.5 GB` or `1048576` stands for. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`, which is an IP address or a name.

    The only name that counts as loopback is `localhost`.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_types(config: Any, prefix: str = "") -> None:
    """Convert every setting to its type, or raise `ConfigError` that names the setting with `prefix` before it."""
    for setting in dataclasses.fields(config):
        value = _convert(setting.type, getattr(config, setting.name), f"{prefix}{setting.name}")
        object.__setattr__(config, setting.name, value)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as the type `hint`: an int becomes a float, a size such as 256MiB becomes bytes."""
    if hint is Any:
        return _plain(value, path)
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        for name in value:
            if type(name) not in (str, int):  # YAML reads `no` and `~` as False and None
                raise ConfigError(f"{path}: the name {name!r} is not text; write it in quotes")
        return {str(name): _convert(typing.get_args(hint)[1], item, f"{path}.{name}") for name, item in value.items()}
    try:
        if hint in (Bytes, Bytes | None, NonNegativeBytes, NonNegativeBytes | None) and isinstance(value, str):
            value = parse_bytes(value)
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path} must be {_accepted(inspect.type_info(hint))}, got {value!r}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _plain(value: Any, path: str) -> Any:
    """Return a value of a section without declared types, such as a policy's section. Raises `ConfigError` for a value that a
    file of settings cannot hold, for NaN, which passes every check of a limit, and for a value that is nested too deeply."""
    if len(path) > MAX_PATH:  # YAML lets a list hold itself
        raise ConfigError(f"{path[:MAX_PATH]}... is nested too deeply: the name of a setting has at most {MAX_PATH} characters")
    if isinstance(value, dict):
        return _convert(dict[str, Any], value, path)
    if isinstance(value, list):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if value is None or (type(value) in (bool, int, float, str) and value == value):  # NaN alone differs from itself
        return value
    raise ConfigError(f"{path} must be text, a number, true, false, null, a list or a section, got {value!r}")


def check_not_under(config: object, name: str, than: str, *, times: int = 1) -> None:
    """Check that a setting is at least `times` another. Both names have the section before them. Raises `ConfigError`."""
    value, least = (getattr(config, each.rpartition(".")[2]) for each in (name, than))
    if not value >= times * least:
        factor = f"{times} times " if times > 1 else ""
        raise ConfigError(f"{name} must be at least {times * least:g}, {factor}{than} ({least:g}), got {value}")


def check_token(token: str, host: str, setting: str) -> None:
    """Check that a token is set where other machines reach the address. `setting` names it. Raises `ConfigError`."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"cluster_token is empty and {setting} is {host!r}: whoever reaches that address could join as a worker. "
            f"Set cluster_token to a secret that router and workers share, or {setting} to 127.0.0.1"
        )


def _accepted(kind: inspect.Type) -> str:
    """Say in words which values a setting of this type takes."""
    match kind:
        case inspect.UnionType(types=kinds):
            return " or ".join(map(_accepted, kinds))
        case inspect.VarTupleType(item_type=item):
            return f"a list of {_accepted(item)}"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.Metadata(type=size):  # `Bytes`
            return f"a size such as 256MiB or {_accepted(size)} of bytes"
        case inspect.IntType() | inspect.FloatType():
            limits = (("over", kind.gt), ("at least", kind.ge), ("at most", kind.le), ("under", kind.lt))
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{noun} ({' and '.join(f'{word} {limit}' for word, limit in limits if limit is not None)})"
        case _:
            return _WORDS[type(kind)]
