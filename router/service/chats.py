"""Chats at the door: which calls a request may make, and who reads calls and reasoning from its output.

Everything here depends on the request and on the output's text alone. So an answer is the same in two pools and in one, and
after a replay.
"""

from __future__ import annotations

import contextlib
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.settings.chats import ChatConfig
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.structured.grammar_text import OPTIONS_KEY, WHITESPACE
from pdserve.text.calls.events import EventParser
from pdserve.text.calls.forced import grammar_of_calls, schema_of_arguments, schema_of_calls
from pdserve.text.calls.forms import RequiredCalls
from pdserve.text.calls.marks import MarkInserter
from pdserve.text.calls.output import NamedCall, OutputParser
from pdserve.text.calls.reasoning import OPEN, ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS, REASONING_MARKS, call_form, reasoning_form
from pdserve.text.tokenizer import Tokenizer
from router.api.answer import Generation
from router.api.request import ChatPrompt, GenerateInput, ToolMode, is_chat
from router.service.parsed_generation import ParsedGeneration

TAIL: Final = 16  # tokens at the end of a prompt that may hold the tag that opens reasoning
_ID_LETTERS: Final = string.ascii_letters + string.digits


class Chats:
    """The forms of calls and of reasoning of the served model."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig) -> None:
        """Raises `ConfigError` for a parser that does not exist."""
        template = tokenizer.chat_template
        text = None if template is None else template.text
        self.call_form = call_form(config.tool_call_parser, text)
        """The name of the form of calls. Empty: none is known."""
        self.reasoning_form = reasoning_form(config.reasoning_parser, text)
        """The name of the form of reasoning. Empty: the model has none."""
        self._tokenizer = tokenizer
        forms: list[tuple[str, ...]] = [REASONING_MARKS] if self.reasoning_form else []
        if self.call_form:
            forms.append(CALL_FORMS[self.call_form].marks)
        marks = {mark for form in forms for mark in form}
        self._marks = {index: spelling for index, spelling in tokenizer.special_tokens.items() if spelling in marks}
        """The marks that workers leave out of the text, because they are special tokens."""

    def prepare(self, request: GenerateInput) -> GenerateInput:
        """Return the request with what its tools ask of the template, of the grammar and of the worker. Raises
        `InvalidRequest` naming the field."""
        choice, prompt = request.tool_choice, request.prompt
        if not isinstance(prompt, ChatPrompt) or not prompt.tools:
            if choice.forced:
                raise InvalidRequest("is only allowed with tools", field="tool_choice")
            return request
        if choice.mode is ToolMode.NONE:
            return replace(request, prompt=replace(prompt, tools=()))
        if request.constraint is not None:
            raise InvalidRequest(f"are not allowed beside response_format or {FIELD}, which forbid calls", field="tools")
        if self._tokenizer.chat_template is not None:
            self._tokenizer.chat_template.check_tools()  # first: without it, no other advice helps
        if choice.forced:
            return replace(request, constraint=_constraint(request, prompt))
        if not self.call_form:
            raise InvalidRequest(
                "the router knows no form of calls for this model: set tool_choice to required or a function, or start the "
                "router with --tool-call-parser",
                field="tools",
            )
        strict = next((index for index, tool in enumerate(prompt.tools) if tool.strict), None)
        return request if strict is None else replace(request, constraint=self._strict(request, prompt, strict))

    def _strict(self, request: GenerateInput, prompt: ChatPrompt, index: int) -> Constraint:
        """Return the grammar of an output whose calls are valid. Tool `index` is the first one that asks for it."""
        pair = CALL_FORMS[self.call_form].pair
        if pair is None or not set(pair).isdisjoint(self._marks.values()):
            raise InvalidRequest(
                f"is not enforced for calls of the form {self.call_form}, unless tool_choice is required or a function",
                field=f"tools[{index}].function.strict",
            )
        most = None if request.tool_choice.parallel else 1
        parameters = {tool.name: tool.parameters if tool.strict else None for tool in prompt.tools}
        options = {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}}
        with tools_named(request):
            return Constraint(ConstraintKind.LARK, grammar_of_calls(parameters, pair, most, options))

    def read(self, generation: Generation, request: GenerateInput, prompt_ids: Sequence[int]) -> Generation:
        """Return the generation with calls and reasoning taken out of its text. `request` is prepared."""
        if not is_chat(request.prompt):
            return generation
        calls = self._calls(request)
        reasoning = None
        free = request.constraint is None or (calls is not None and not request.tool_choice.forced)
        if self.reasoning_form and free:
            reasoning = ReasoningParser(opened=self._opened(prompt_ids))
        if calls is None and reasoning is None:
            return generation
        marks = None
        written = request.sampling.get("skip_special_tokens") is False  # the text has its marks already
        if self._marks and free and not written:
            marks = MarkInserter(self._marks, self._tokenizer.token_bytes, self._tokenizer.stream(prompt_ids))
        parser = OutputParser(reasoning, calls, max_calls=None if request.tool_choice.parallel else 1)
        return ParsedGeneration(generation, parser, self._id_maker(), marks)

    def _calls(self, request: GenerateInput) -> EventParser | None:
        prompt, choice = request.prompt, request.tool_choice
        if not isinstance(prompt, ChatPrompt) or not prompt.tools:
            return None
        names = [tool.name for tool in prompt.tools]
        if choice.function:
            return NamedCall(choice.function)
        if choice.forced:
            return RequiredCalls(names)
        return CALL_FORMS[self.call_form].machine(names)

    def _opened(self, prompt_ids: Sequence[int]) -> bool:
        tail = b"".join(map(self._tokenizer.written_bytes, prompt_ids[-TAIL:]))
        return tail.rstrip().endswith(OPEN.encode())

    def _id_maker(self) -> Callable[[], str]:
        chars = CALL_FORMS[self.call_form].id_chars if self.call_form else 0
        if chars:
            return lambda: "".join(secrets.choice(_ID_LETTERS) for _ in range(chars))
        return lambda: f"call_{secrets.token_hex(12)}"


@contextlib.contextmanager
def tools_named(request: GenerateInput) -> Iterator[None]:
    """Let errors of the grammar that tools were made to name the tools, because the client wrote no grammar."""
    try:
        yield
    except InvalidRequest as exc:
        if isinstance(request.prompt, ChatPrompt) and request.prompt.tools and exc.field.startswith(FIELD):
            raise InvalidRequest(exc.message.removeprefix(f"{exc.field}: "), field="tools") from exc
        raise


def _constraint(request: GenerateInput, prompt: ChatPrompt) -> Constraint:
    """Return the grammar of an output that must be calls."""
    choice = request.tool_choice
    parameters = {tool.name: tool.parameters for tool in prompt.tools}
    if choice.function and choice.function not in parameters:
        raise InvalidRequest(f"{choice.function!r:.80} is none of the tools", field="tool_choice")
    with tools_named(request):
        if choice.function:
            return Constraint(ConstraintKind.JSON_SCHEMA, schema_of_arguments(parameters[choice.function]))
        return Constraint(ConstraintKind.JSON_SCHEMA, schema_of_calls(parameters, None if choice.parallel else 1))
