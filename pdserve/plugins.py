"""Plugins: a setting names a built-in part, or a part of the operator's own as `module:function`.

The module is imported, so whoever writes the setting runs code in this process. Only the operator's configuration and command
line may set it, never a request.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pdserve.core.errors import ConfigError

_NAME: Final = r"[^\W\d]\w*"
_PATH: Final = re.compile(rf"{_NAME}(?:\.{_NAME})*:{_NAME}")


def is_path(name: str) -> bool:
    """Tell whether a name has the form `module:function`. Nothing is imported."""
    return _PATH.fullmatch(name) is not None


def check_name(name: str, builtins: Collection[str], setting: str) -> None:
    """Raise `ConfigError` for a name that is neither built in nor of the form `module:function`. Nothing is imported."""
    if name not in builtins and not is_path(name):
        known = ", ".join(builtins)
        raise ConfigError(f"{setting} must be one of {known}, or module:function of your own, got {name!r}")


def resolve(name: str, builtins: Mapping[str, str], setting: str) -> Callable[..., Any]:
    """Return the function that a setting names. `name` is a key of `builtins` or `module:function`.

    `builtins` has the `module:function` of each known name, which is imported only when it is asked for. Raises `ConfigError`
    that names the setting: for an unknown name, a module that cannot be imported, and a function that does not exist.
    """
    check_name(name, builtins, setting)
    module_name, _, function_name = builtins.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
    except (Exception, SystemExit) as exc:  # a module may raise anything while it is imported, and a script ends
        reason = f"{type(exc).__name__}: {exc}"
        raise ConfigError(
            f"{setting} is {name!r}, and module {module_name} cannot be imported (install it, or add its folder to "
            f"PYTHONPATH): {reason}"
        ) from exc
    if not callable(function):
        raise ConfigError(f"{setting} is {name!r}, and module {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return]  # callable() does not narrow Any
