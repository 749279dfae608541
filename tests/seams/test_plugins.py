"""A setting names a built-in part or `module:function`, and every other text is refused by name."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.plugins import resolve

BUILTINS = {"join": "os.path:join", "never": "a_module_that_does_not_exist:f"}


def test_a_builtin_name_and_a_path_give_the_function() -> None:
    import os.path

    assert resolve("join", BUILTINS, "a.b") is os.path.join
    assert resolve("os.path:split", BUILTINS, "a.b") is os.path.split


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"a\.b must be one of join, never, or module:function of your own, got 'jion'"):
        resolve("jion", BUILTINS, "a.b")


def test_a_builtin_is_imported_only_when_it_is_asked_for() -> None:
    resolve("join", BUILTINS, "a.b")  # "never" could not be imported
    with pytest.raises(ConfigError, match="a_module_that_does_not_exist cannot be imported"):
        resolve("never", BUILTINS, "a.b")


@pytest.mark.parametrize(
    "body", ["1 / 0", "syntax error here", "raise SystemError('broken')", "raise SystemExit(0)", "def __getattr__(name): 1 / 0"]
)
def test_a_module_that_fails_while_it_is_imported_is_named(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.b is 'broken_plugin:f', and module broken_plugin cannot be imported"):
        resolve("broken_plugin:f", BUILTINS, "a.b")
    sys.modules.pop("broken_plugin", None)


@pytest.mark.parametrize("name", ["os.path:nothing", "os.path:sep"])
def test_a_missing_function_and_a_value_that_is_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"module os\.path has no function (nothing|sep)"):
        resolve(name, BUILTINS, "a.b")


@given(st.text(max_size=20))
def test_every_other_text_is_refused_as_a_configuration_error(text: str) -> None:
    if text not in BUILTINS:
        with pytest.raises(ConfigError, match=r"^a\.b "):
            resolve(text, BUILTINS, "a.b")
