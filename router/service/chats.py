"""Chats at the door: which calls a request may make, and how calls and reasoning are read from the text of its output.

Everything here depends on the request and on the output's text alone. So an answer is the same in two pools and in one, and
after a replay.
"""

from __future__ import annotations

import contextlib
import secrets
import string
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from pdserve.config import RouterConfig
from pdserve.core.errors import Cancelled, InvalidRequest
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.structured.grammar_text import OPTIONS_KEY, WHITESPACE, answer_rule
from pdserve.text.calls.events import CallArguments, CallBegin, Content, Event, EventParser, Reasoning
from pdserve.text.calls.forced import schema_of_arguments, schema_of_calls
from pdserve.text.calls.forms import RequiredCalls
from pdserve.text.calls.grammar import CallRules, grammar_beside_answer, grammar_of_text
from pdserve.text.calls.marks import MarkInserter
from pdserve.text.calls.output import NamedCall, OutputParser
from pdserve.text.calls.reasoning import OPEN, ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS, REASONING_MARKS, call_form, reasoning_form
from pdserve.text.tokenizer import Tokenizer
from router.api.answer import CallDelta, Delta, Generation
from router.api.request import ChatPrompt, GenerateInput, ToolMode, is_chat

TAIL: Final = 16  # tokens at the end of a prompt that may hold the tag that opens reasoning
_ID_LETTERS: Final = string.ascii_letters + string.digits


class Chats:
    """The forms of calls and of reasoning of the served model."""

    def __init__(self, tokenizer: Tokenizer, config: RouterConfig) -> None:
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
        if choice.forced:
            return replace(request, constraint=_constraint(request, prompt))
        if self._tokenizer.chat_template is not None:
            self._tokenizer.chat_template.check_tools()  # first: without it, no other advice helps
        if not self.call_form:
            raise InvalidRequest(
                "the router knows no form of calls for this model: set tool_choice to required or a function, or start the "
                "router with --tool-call-parser",
                field="tools",
            )
        if request.constraint is None and not (self._checks_arguments and any(tool.strict for tool in prompt.tools)):
            return request
        return replace(request, constraint=self._constraint_of_calls(request, prompt))

    def unenforced(self, request: GenerateInput) -> tuple[str, ...]:
        """Return the fields that ask for valid arguments where no grammar can hold the model to them."""
        choice, prompt = request.tool_choice, request.prompt
        if not isinstance(prompt, ChatPrompt) or choice.forced or choice.mode is ToolMode.NONE or self._checks_arguments:
            return ()
        return tuple(f"tools[{i}].function.strict" for i, tool in enumerate(prompt.tools) if tool.strict)

    @property
    def _checks_arguments(self) -> bool:
        """True if a grammar can hold calls to the schemas of their tools. Where calls need no mark at the beginning of the
        output, it cannot tell them from an answer behind reasoning."""
        form = CALL_FORMS.get(self.call_form)
        return form is not None and form.checks_arguments and not (form.opens and self.reasoning_form)

    def _constraint_of_calls(self, request: GenerateInput, prompt: ChatPrompt) -> Constraint:
        """Return the grammar of an output whose calls are valid and that is, if it has none, what the client asks for."""
        form = CALL_FORMS[self.call_form]
        answer = None if request.constraint is None else answer_rule(request.constraint)
        special = {spelling: index for index, spelling in self._marks.items()}
        parameters = {tool.name: tool.parameters if tool.strict else None for tool in prompt.tools}
        options = {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}}
        with tools_named(request):
            rules = CallRules(parameters, special, options, single=not request.tool_choice.parallel)
            block, mark = form.rules(rules), form.machine.mark
            if answer is None:
                text = grammar_of_text(rules, block, mark, form.opens)
            else:
                text = grammar_beside_answer(rules, block, mark, answer)
            return Constraint(ConstraintKind.LARK, text)

    def read(self, generation: Generation, request: GenerateInput, prompt_ids: Sequence[int]) -> Generation:
        """Return the generation with calls and reasoning taken out of its text. `request` is as the client wrote it."""
        chat, forced = is_chat(request.prompt), request.tool_choice.forced
        if not chat:
            return generation
        calls = self._calls(request)
        reasoning = None
        if self.reasoning_form and request.constraint is None and not forced:
            reasoning = ReasoningParser(opened=self._opened(prompt_ids))
        if calls is None and reasoning is None:
            return generation
        marks = None
        written = request.sampling.get("skip_special_tokens") is False  # the text has its marks already
        if self._marks and not forced and not written:
            marks = MarkInserter(self._marks, self._tokenizer.token_bytes, self._tokenizer.stream(prompt_ids))
        parser = OutputParser(reasoning, calls, max_calls=None if request.tool_choice.parallel else 1)
        return ParsedGeneration(generation, parser, self._id_maker(), marks)

    def _calls(self, request: GenerateInput) -> EventParser | None:
        prompt, choice = request.prompt, request.tool_choice
        if not isinstance(prompt, ChatPrompt) or not prompt.tools or choice.mode is ToolMode.NONE:
            return None
        names = [tool.name for tool in prompt.tools]
        if choice.function:
            return NamedCall(choice.function)
        if choice.forced:
            return RequiredCalls(names)
        parameters = {tool.name: tool.parameters for tool in prompt.tools}
        return CALL_FORMS[self.call_form].machine(names, parameters=parameters, unmixed=request.constraint is not None)

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
    """Name `tools` as the field at fault if their grammar fails. The router made this grammar from the tools, so the client
    does not know it."""
    try:
        yield
    except InvalidRequest as exc:
        if isinstance(request.prompt, ChatPrompt) and request.prompt.tools and exc.field.startswith(FIELD):
            raise InvalidRequest(exc.message.removeprefix(f"{exc.field}: "), field="tools") from exc
        raise


@contextlib.asynccontextmanager
async def constraint_named(request: GenerateInput, check: Callable[[Constraint], Awaitable[None]]) -> AsyncIterator[None]:
    """Let errors of the grammar of a request name what the client wrote: its constraint if that fails its own `check`, or else
    the tools."""
    try:
        with tools_named(request):
            yield
    except InvalidRequest as exc:
        if exc.field == "tools" and request.constraint is not None:
            await check(request.constraint)
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


class ParsedGeneration:
    """Implements `router.api.answer.Generation` over another generation. Each delta keeps its ids and log-probabilities; its
    text becomes content, reasoning and pieces of calls."""

    def __init__(
        self, inner: Generation, parser: EventParser, new_id: Callable[[], str], marks: MarkInserter | None = None
    ) -> None:
        """`new_id` returns the id of the next call. `marks` puts special tokens into the text. None: the text has all marks."""
        self.request_id = inner.request_id
        self.prompt_len = inner.prompt_len
        self.prompt_ids = inner.prompt_ids
        self._inner = inner
        self._deltas = aiter(inner)
        self._parser = parser
        self._marks = marks
        self._new_id = new_id
        self._calls = 0
        self._parts: deque[Delta] = deque()

    @property
    def dropped(self) -> Cancelled | None:
        """Implements `Generation.dropped`."""
        return self._inner.dropped

    @property
    def report(self) -> Report:
        """Implements `Generation.report`."""
        return self._inner.report

    def on_stalled(self, callback: Callable[[], object]) -> None:
        """Implements `Generation.on_stalled`."""
        self._inner.on_stalled(callback)

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """Implements `Generation.take_by`: the task gets all deltas, since none may be read twice."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._parts:
            self._parts.extend(self._parsed(await anext(self._deltas)))
        return self._parts.popleft()

    def close(self) -> None:
        """Implements `Generation.close`."""
        self._inner.close()

    def _parsed(self, delta: Delta) -> list[Delta]:
        """Return what a delta becomes: one delta, or several if content follows a call, so that a reader who takes reasoning,
        content and calls of a delta in this order has the order of the output. The finish reason behind calls has a delta
        of its own, as at OpenAI, whose client looks for the end of calls before it looks at those of the same chunk."""
        text = delta.text if self._marks is None else self._marks.push(delta.ids, delta.text)
        events = self._parser.push(text)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            events += self._parser.flush()
        parts = [self._part(events) for events in _parts(events)]
        if finish_reason is not None and parts[-1]["calls"]:
            parts.append(self._part([]))
        if finish_reason is FinishReason.STOP and self._calls:
            finish_reason = FinishReason.TOOL_CALLS
        first = msgspec.structs.replace(delta, finish_reason=None, **parts[0])
        rest = [Delta(delta.index + len(delta.ids), (), finish_reason=None, **part) for part in parts[1:]]
        *early, last = first, *rest
        return [*early, msgspec.structs.replace(last, finish_reason=finish_reason, stop_reason=delta.stop_reason)]

    def _part(self, events: list[Event]) -> dict[str, Any]:
        """Return the fields of a delta that the events are."""
        content = "".join([event.text for event in events if isinstance(event, Content)])
        reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
        return {"text": content, "reasoning": reasoning, "calls": self._pieces(events)}

    def _pieces(self, events: list[Event]) -> tuple[CallDelta, ...]:
        """Return the pieces of calls among the events. Pieces of the same call are joined."""
        pieces: list[CallDelta] = []
        for event in events:
            if isinstance(event, CallBegin):
                pieces.append(CallDelta(self._calls, self._new_id(), event.name))
                self._calls += 1
            elif isinstance(event, CallArguments):
                index = self._calls - 1
                begun = pieces.pop() if pieces and pieces[-1].index == index else CallDelta(index)
                pieces.append(CallDelta(index, begun.id, begun.name, begun.arguments + event.text))
        return tuple(pieces)


def _parts(events: list[Event]) -> list[list[Event]]:
    """Cut the events before each content that follows a call. There is one part at least."""
    parts: list[list[Event]] = [[]]
    called = False
    for event in events:
        if isinstance(event, Content) and called:
            parts.append([])
        called = not isinstance(event, Content | Reasoning)
        parts[-1].append(event)
    return parts
