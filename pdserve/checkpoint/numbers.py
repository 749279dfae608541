"""Numbers of a published configuration. Each error names the setting and what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from pdserve.core.errors import ConfigError

MOST: Final = 2**31 - 1
"""The largest size. Every size of a published model fits into int32."""


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer. A setting that is missing, null or 0 takes the default if there is one.

    Raises `ConfigError` for anything else, and KeyError for a missing setting without a default.
    """
    value = config[name] if default is None else config.get(name)
    return default if default is not None and (value is None or value == 0) else _integer(name, value)


def integers(config: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Return a list of `count` positive integers. Raises `ConfigError`, and KeyError for a missing setting."""
    values = config[name]
    if not isinstance(values, list):
        raise ConfigError(f"{name} must be a list of integers, got {values!r:.100}")
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} numbers for {count} layers")
    return [_integer(f"{name}[{index}]", value) for index, value in enumerate(values)]


def real(config: Mapping[str, Any], name: str, *, or_zero: bool = False) -> float:
    """Return a finite number above 0, or 0 if `or_zero` allows it. Raises `ConfigError`, and KeyError for a missing setting."""
    value = config[name]
    if _is_number(value) and 0 <= value <= MOST**2 and math.isfinite(value) and (value > 0 or or_zero):
        return float(value)
    raise ConfigError(f"{name} must be a finite number {'of at least' if or_zero else 'above'} 0, got {value!r:.100}")


def token_id(name: str, value: object) -> int:
    """Return a token id. Raises `ConfigError`."""
    return _integer(name, value, low=0)


def _integer(name: str, value: object, low: int = 1) -> int:
    if _is_number(value) and low <= value <= MOST and value == int(value):
        return int(value)
    raise ConfigError(f"{name} must be an integer from {low} to {MOST}, got {value!r:.100}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
