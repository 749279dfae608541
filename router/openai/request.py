"""The body and headers of an OpenAI-style request become what the router runs.

Only shapes and types are checked here, and fields that the router never sees. The router checks ranges that depend on the model
or on sampling, so gRPC and HTTP clients meet the same limits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from pdserve.core.sampling import Placement
from router.api.choices import ONE, Choices
from router.api.identity import new_request_id
from router.api.request import SESSION_ID, GenerateInput, Prompt
from router.openai.body import NULL, ChatBody, ChoiceFields, CompletionBody, MessageCall, StreamOptions, ToolFields
from router.openai.choices import read_choices
from router.openai.echo import NOTHING_SHOWN, PromptShown
from router.openai.ignored import NOTHING, Ignored, decode_body, ignored_in, joined
from router.openai.json import refuse, show
from router.openai.names import Names, written_names
from router.openai.prompt import ANY_NUMBER, read_messages, read_prompts
from router.openai.sampling import read_options, read_sampling, read_shown
from router.openai.structured import SCHEMA, formats_left_out, read_constraint
from router.openai.tools import read_chat, read_tool_choice
from router.openai.unsupported import refuse_unsupported

MAX_ID_CHARS: Final = 128  # of a client's own id, which becomes a header of the answer and a field of log lines
_CORRELATION_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARS}}}")
_UNFIT: Final = re.compile(r"[^\x21-\x7e]")
_COMPLETION: Final = msgspec.json.Decoder(CompletionBody)
_CHAT: Final = msgspec.json.Decoder(ChatBody)


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `inputs[i]` becomes choices i * n to (i + 1) * n - 1 of the answer, where n is that of `choices`."""

    chat: bool
    request_id: str
    """The router's own unique id of the request."""
    inputs: tuple[GenerateInput, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    correlation_id: str = ""
    """The client's name for the request. It need not be unique."""
    return_token_ids: bool = False
    """The answer has the token ids of prompts and outputs."""
    choices: Choices = ONE
    """The choices of each of `inputs`."""
    ignored: Ignored = NOTHING
    """The fields of the body that were left out."""
    shown: PromptShown = NOTHING_SHOWN
    names: Names = ()
    listed: bool = False
    """The client wrote a list of prompts, so an error names the place of its prompt in the list."""

    def place_of(self, index: int) -> Names:
        """Return the name of the prompt of `inputs[index]` as the client wrote it."""
        return (("prompt", f"prompt[{index}]"),) if self.listed else ()

    def of_client(self, client: tuple[str, ...]) -> Call:
        """Return the call with the names of its client in each request."""
        return replace(self, inputs=tuple([replace(one, client=client) for one in self.inputs]))


@dataclass(frozen=True, slots=True)
class ClassHeaders:
    """The headers that stand for fields of the body. None: the request has no such header."""

    slo_class: str | None = None
    session_id: str | None = None


NO_HEADERS: Final = ClassHeaders()


def parse_completion(
    body: bytes, header_id: str | None, max_prompt_tokens: int = ANY_NUMBER, headers: ClassHeaders = NO_HEADERS
) -> Call:
    """Parse a body of `/v1/completions`. Raises `InvalidRequest` naming the field."""
    fields, ignored = decode_body(body, _COMPLETION)
    hints = refuse_unsupported(fields)
    call = _call(fields, header_id, headers, read_prompts(fields.prompt, max_prompt_tokens))
    listed = isinstance(fields.prompt, list) and not isinstance(fields.prompt[0], int)
    return replace(_with_ignored(call, [ignored, hints, _formats(call)]), listed=listed)


def parse_chat(body: bytes, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> Call:
    """Parse a body of `/v1/chat/completions`. Raises `InvalidRequest` naming the field."""
    fields, ignored = decode_body(body, _CHAT)
    call = chat_call(fields, header_id, headers)
    return _with_ignored(call, [ignored, *_ignored_in_tools(fields), _formats(call)])


def _formats(call: Call) -> Ignored:
    """Return the formats of the schemas that nobody enforces, by the names that the client wrote."""
    return formats_left_out(call.inputs[0], dict(call.names).get(SCHEMA, SCHEMA), "tools[].function.parameters")


def _with_ignored(call: Call, parts: list[Ignored]) -> Call:
    """Return the call, to whose ignored fields those of further parts of its body are added."""
    return replace(call, ignored=joined([call.ignored, *parts])) if any(one.count for one in parts) else call


def _ignored_in_tools(fields: ChatBody) -> Iterator[Ignored]:
    """Yield what was left out of tools, of the choice among them and of calls, which are not decoded with the body."""
    if fields.tools:
        yield ignored_in(msgspec.json.encode(fields.tools), ToolFields, "tools")
    if isinstance(fields.tool_choice, dict):
        yield ignored_in(msgspec.json.encode(fields.tool_choice), ChoiceFields, "tool_choice")
    for message in fields.messages or ():
        if message.tool_calls is not NULL and bytes(message.tool_calls).startswith(b"["):
            yield ignored_in(bytes(message.tool_calls), MessageCall, "messages[].tool_calls")


def chat_call(fields: ChatBody, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> Call:
    """Return the call of a chat. Raises `InvalidRequest` naming the field."""
    hints = refuse_unsupported(fields)
    call = _call(fields, header_id, headers, (read_chat(fields, lambda: read_messages(fields.messages)),))
    inputs = tuple(replace(one, tool_choice=read_tool_choice(fields)) for one in call.inputs)
    return _with_ignored(replace(call, inputs=inputs), [hints])


def _call(body: CompletionBody | ChatBody, header_id: str | None, headers: ClassHeaders, prompts: tuple[Prompt, ...]) -> Call:
    stream = body.stream or False
    include_usage, continuous_usage, hints = _stream_options(body.stream_options, stream)
    request_id = new_request_id()
    correlation_id = _correlation_id(body.request_id, header_id)
    common = GenerateInput(
        prompt=prompts[0],
        sampling=read_sampling(body),
        model=body.model,
        request_id=request_id,
        correlation_id=correlation_id,
        deadline_s=body.deadline_s,
        placement=_placement(body.placement),
        slo_class=(headers.slo_class if body.slo_class is None else body.slo_class) or "",
        session_id=_session_id(body, headers),
        options=read_options(body),
        add_special_tokens=not (isinstance(body, CompletionBody) and body.add_special_tokens is False),
        constraint=read_constraint(body),
    )
    chat = isinstance(body, ChatBody)
    choices = read_choices(body, len(prompts), common)
    inputs = _inputs(common, prompts, choices.best_of)
    return Call(
        chat,
        request_id,
        inputs,
        stream,
        include_usage,
        continuous_usage,
        correlation_id,
        return_token_ids=body.return_token_ids or False,
        choices=choices,
        shown=read_shown(body),
        names=written_names(body),
        ignored=hints,
    )


def _inputs(common: GenerateInput, prompts: tuple[Prompt, ...], candidates: int) -> tuple[GenerateInput, ...]:
    """Return one request for each prompt, with the id of its first candidate. If the call has several candidates, the index of
    each is added to its id."""
    if len(prompts) * candidates == 1:
        return (common,)
    return tuple(
        replace(common, prompt=prompt, request_id=f"{common.request_id}-{i * candidates}") for i, prompt in enumerate(prompts)
    )


def candidate_ids(call: Call, index: int) -> tuple[str, ...]:
    """Return the request ids of the candidates of `inputs[index]`."""
    candidates = call.choices.best_of
    if len(call.inputs) * candidates == 1:
        return (call.request_id,)
    return tuple(f"{call.request_id}-{index * candidates + i}" for i in range(candidates))


def _stream_options(options: StreamOptions | None, stream: bool) -> tuple[bool, bool, Ignored]:
    if options is None:
        return False, False, NOTHING
    hints = refuse_unsupported(options, "stream_options")
    if not stream:
        raise refuse("stream_options", "is only allowed with stream: true")
    return options.include_usage or False, options.continuous_usage_stats or False, hints


def _placement(value: str | None) -> Placement | None:
    if value is None:
        return None
    if value not in [placement.value for placement in Placement]:
        raise refuse("placement", f"must be one of {', '.join(p.value for p in Placement)}, got {show(value)}")
    return Placement(value)


def _session_id(body: CompletionBody | ChatBody, headers: ClassHeaders) -> str:
    """Return the body's `session_id`, or else its `prompt_cache_key`, or else the X-Session-Id header, or else nothing. The
    last two are hints that a proxy or a library may have set, so a digest stands for one that is too long."""
    if body.session_id is not None:
        SESSION_ID.check("session_id", body.session_id)
        return body.session_id
    hint = (headers.session_id if body.prompt_cache_key is None else body.prompt_cache_key) or ""
    whole = hint.encode(errors="replace")
    return hint if len(whole) <= SESSION_ID.count else hashlib.sha256(whole).hexdigest()


def kept_id(header_id: str | None) -> str:
    """Return what of an X-Request-Id header fits a header and a line of the log. No request fails for one that a proxy has set
    ("a, b" where two of them did); the answer's header says what was kept."""
    return _UNFIT.sub("", header_id or "")[:MAX_ID_CHARS]


def _correlation_id(body_id: str | None, header_id: str | None) -> str:
    """Return the body's `request_id`, or else what is kept of the X-Request-Id header."""
    if body_id is None:
        return kept_id(header_id)
    if not _CORRELATION_ID.fullmatch(body_id):
        told = f"must be 1 to {MAX_ID_CHARS} printable ASCII characters without spaces, got {show(body_id)}"
        raise refuse("request_id", told)
    return body_id
