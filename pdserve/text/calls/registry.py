"""The parsers by name, and the choice of the parser that a chat template asks for. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.text.calls import grammar
from pdserve.text.calls.forms import DeepseekV3, Granite, Hermes, Llama3Json, Mistral
from pdserve.text.calls.grammar import CallBlock, CallRules
from pdserve.text.calls.machine import CallMachine
from pdserve.text.calls.pythonic import Pythonic
from pdserve.text.calls.qwen3_coder import Qwen3Coder
from pdserve.text.calls.reasoning import CLOSE, OPEN

AUTO: Final = "auto"
NONE: Final = "none"
REASONING_MARKS: Final = (OPEN, CLOSE)


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form of calls. A template of this form has one of the `signs`, and `marks` are all marks of the form."""

    machine: type[CallMachine]
    signs: tuple[str, ...]
    marks: tuple[str, ...]
    rules: Callable[[CallRules], CallBlock]
    """The grammar of the form."""
    opens: str = ""
    """The character by which calls begin where the output begins, without a mark. Empty: they never do."""
    checks_arguments: bool = True
    """The grammar holds arguments to the schemas of their tools."""
    id_chars: int = 0
    """Ids of calls have so many letters and digits, because the family's template takes no others. 0: ids are of any form."""


CALL_FORMS: Final[dict[str, CallForm]] = {
    "qwen3_coder": CallForm(
        Qwen3Coder, ("<function=",), ("<tool_call>", "</tool_call>"), grammar.qwen3_coder, checks_arguments=False
    ),
    "hermes": CallForm(Hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>"), grammar.hermes),
    "mistral": CallForm(Mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), grammar.mistral, id_chars=9),
    "deepseek_v3": CallForm(
        DeepseekV3,
        ("<｜tool▁calls▁begin｜>",),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        grammar.deepseek_v3,
    ),
    "granite": CallForm(Granite, ("<|tool_call|>",), ("<|tool_call|>",), grammar.granite),
    "pythonic": CallForm(
        Pythonic,
        ("<|python_start|>",),
        ("<|python_start|>", "<|python_end|>"),
        grammar.pythonic,
        opens="[",
        checks_arguments=False,
    ),
    "llama3_json": CallForm(
        Llama3Json,
        ("<|python_tag|>", 'Respond in the format {"name": function name, "parameters":'),  # the first one is not in Llama 3.2
        ("<|python_tag|>",),
        grammar.llama3_json,
        opens="{",
    ),
}
"""A template gets the first form of which it has a sign: templates of Qwen3-Coder have that of Hermes as well."""

REASONING_SIGNS: Final = {"qwen3": "enable_thinking", "deepseek_r1": OPEN}
"""Parsers of reasoning. A template that has the tags gets the first one whose sign it has too. Both read the same form: the
prompt says whether the output begins inside the tags."""


def call_form(name: str, template: str | None) -> str:
    """Return the name of the form for the setting `name`; empty: none. Raises `ConfigError` for a name that is unknown."""
    if name == NONE:
        return ""
    if name != AUTO:
        return _checked("router.tool_call_parser", name, CALL_FORMS)
    return next((found for found, form in CALL_FORMS.items() if any(sign in (template or "") for sign in form.signs)), "")


def reasoning_form(name: str, template: str | None) -> str:
    """Return the name of the parser of reasoning for the setting `name`; empty: none. Raises `ConfigError`."""
    if name == NONE:
        return ""
    if name != AUTO:
        return _checked("router.reasoning_parser", name, REASONING_SIGNS)
    if template is None or OPEN not in template:
        return ""
    return next(found for found, sign in REASONING_SIGNS.items() if sign in template)


def _checked(setting: str, name: str, known: dict[str, CallForm] | dict[str, str]) -> str:
    if name not in known:
        raise ConfigError(f"{setting} {name!r:.60} is none of {', '.join([AUTO, NONE, *known])}")
    return name
