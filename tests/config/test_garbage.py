"""Garbage for every setting: `load` refuses it and names the setting, or accepts it, and then `dump` can write it."""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.config import ClusterConfig, EngineConfig, RouterProcessConfig, WorkerConfig, dump, load
from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import Bytes, NonNegativeBytes

NEEDED: Final = {WorkerConfig: {"worker_id": "w", "router_address": "127.0.0.1:1"}, RouterProcessConfig: {}, ClusterConfig: {}}
HUGE: Final = "0x" + "f" * 4000  # more decimal digits than Python prints
PIECES_OF_YAML: Final = (
    *("!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!set ", "2024-13-45", "59:", "9", "1.5", "0x", "-", "{", "}"),
    *("[", "]", "&a ", "*a", "<<: ", ", ", "x", "'", "\n", "#", "\0", "model: "),
)


def settings_of(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of each setting and of each section."""
    for setting in dataclasses.fields(cls):
        name = f"{prefix}{setting.name}"
        if dataclasses.is_dataclass(setting.type):
            yield name, dict | None
            yield from settings_of(setting.type, f"{name}.")
        else:
            yield name, setting.type
        if name == "prefill.engine":
            yield from settings_of(EngineConfig, f"{name}.")


SETTINGS: Final = [(cls, name, hint) for cls in NEEDED for name, hint in settings_of(cls)]

one_of_each_type: Final = (
    *(None, False, True, 0, 1, -1, 1 << 70, 10**400, 0.5, 8.0, -1.0, math.nan, math.inf, 1j),
    *("", "x", "1", "true", "256MiB", "0", "9" * 400, "a\nb", b"x", datetime.date(2024, 1, 1)),
    *([], [1], {}, {"x": 1}, {1: "a"}, {"model": {}}, {"threads": None}, {"a b": "c d"}),
)
keys = st.sampled_from(["model", "block_size", "replicas", "http_port", "engine", "max_restarts"]) | st.text(max_size=4)
garbage = st.recursive(
    st.sampled_from(one_of_each_type) | st.integers() | st.floats() | st.text(max_size=8),
    lambda part: st.lists(part, max_size=2) | st.dictionaries(keys, part, max_size=2),
    max_leaves=4,
)
texts = st.text(max_size=8) | st.lists(st.sampled_from(PIECES_OF_YAML), max_size=8).map("".join)


def kinds(hint: Any) -> set[type]:
    """Return the types of the values that a setting of type `hint` may take."""
    match typing.get_origin(hint), typing.get_args(hint):
        case (typing.Annotated, (of, *_)):
            return kinds(of) | ({str} if hint in (Bytes, NonNegativeBytes) else set())
        case (typing.Literal, _):
            return {str}
        case (typing.Union | types.UnionType, parts):
            return set().union(*map(kinds, parts))
        case (builtins.tuple, _):  # files of settings have lists
            return {list}
        case (origin, _):
            return {float, int} if hint is float else {origin or hint}


def refusal(
    cls: Any, values: dict[str, Any], overrides: Sequence[str] = (), file: Path | None = None, hint: Any = Any
) -> str | None:
    """Return the message of the `ConfigError`. None means that the values were accepted, and then they can be dumped."""
    try:
        config = load(cls, file, overrides, {**NEEDED[cls], **values})
    except ConfigError as exc:
        return exc.message
    assert hint is Any or {type(each) for each in values.values()} <= kinds(hint)
    assert load(cls, None, settings=yaml.safe_load(dump(config))) == config
    return None


@pytest.mark.quick("True", "-1", "0.5", "nan", "'x'", "b'x'", "datetime*", "[[]]", "{}", "{1:*")
@pytest.mark.parametrize("value", one_of_each_type, ids=lambda value: repr(value)[:20])
def test_every_setting_refuses_what_is_not_of_its_type(value: Any) -> None:
    for cls, name, hint in SETTINGS:
        message = refusal(cls, {name: value}, hint=hint)
        assert message is None or (name in message and "()" not in message)


@settings(deadline=None)
@given(setting=st.sampled_from(SETTINGS), value=garbage)
@example(setting=(ClusterConfig, "autoscaling.planner", dict[str, Any]), value={"model": 1j})
@example(setting=(ClusterConfig, "autoscaling.planner", dict[str, Any]), value={"model": [math.nan]})
@example(setting=(ClusterConfig, "engine.vllm.command", tuple[str, ...]), value=[""])
@example(setting=(ClusterConfig, "engine.vllm.url", str), value="http://127.0.0.1:1")
def test_garbage_is_accepted_or_refused_by_name(setting: tuple[Any, str, Any], value: Any) -> None:
    cls, name, hint = setting
    assert name in (refusal(cls, {name: value}, hint=hint) or name)


@settings(deadline=None)
@given(name=st.sampled_from([name for cls, name, _ in SETTINGS if cls is ClusterConfig]), text=texts)
@example(name="log_dir", text="2024-13-45")
@example(name="log_dir", text="!!bool x")
@example(name="log_dir", text="!!timestamp x")
@example(name="engine.threads", text="9" * 5000)
@example(name="engine.threads", text=f"-{HUGE}")
@example(name="engine", text="[" * 1000)
@example(name="engine.step_timeout_s", text="9:" + "59:" * 300 + "1.5")
@example(name="prefill.engine", text="&a {model: *a}")
@example(name="router", text=f"{{max_body_bytes: {HUGE}}}")
def test_any_text_after_set_is_accepted_or_refused_by_name(name: str, text: str) -> None:
    assert name in (refusal(ClusterConfig, {}, [f"{name}={text}"]) or name)


@settings(deadline=None)
@given(name=st.text(max_size=8) | st.lists(keys, max_size=3).map(".".join), value=garbage)
def test_any_name_is_accepted_or_refused_by_itself(name: str, value: Any) -> None:
    section = name.partition(".")[0]
    assert section in (refusal(ClusterConfig, {name: value}) or section)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage") / "c.yaml"


@settings(deadline=None)
@given(content=texts.map(str.encode) | st.binary(max_size=16))
@example(content=b"log_dir: 2024-13-45")
@example(content=f"{HUGE}: 1".encode())
def test_any_file_is_accepted_or_refused_by_its_name(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert str(file) in (refusal(ClusterConfig, {}, file=file) or str(file))
