"""The body and headers of an OpenAI-style request become what the router runs.

Only shapes and types are checked here, and fields that the router never sees. The router checks ranges that depend on the model
or on sampling, so gRPC and HTTP clients meet the same limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, MaxCount, limit_of
from pdserve.core.request_spec import OPTIONS, RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.core.structured.schemas import simplify
from router.api.identity import new_request_id
from router.api.request import (
    BEAM_WIDTHS,
    LENGTH_PENALTIES,
    ONE,
    SESSION_ID,
    ChatPrompt,
    Choices,
    GenerateInput,
    Prompt,
    check_beams,
    check_number,
    draft_options,
    sampled,
)
from router.openai.body import (
    NULL,
    Body,
    ChatBody,
    ChoiceFields,
    CompletionBody,
    MessageCall,
    ResponseFormat,
    Scalars,
    StreamOptions,
    ToolFields,
)
from router.openai.echo import NOTHING_SHOWN, PromptShown
from router.openai.json import (
    NOTHING,
    Ignored,
    decode,
    decode_body,
    ignored_in,
    joined,
    left_out,
    refuse,
    refuse_unsupported,
    renamed,
    show,
)
from router.openai.prompt import ANY_NUMBER, EFFORT, read_chat, read_prompts, read_tool_choice, token_ids

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
    call = completion_call(fields, header_id, headers, max_prompt_tokens)
    return _with_ignored(call, [ignored, _formats_of(call)])


def parse_chat(body: bytes, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> Call:
    """Parse a body of `/v1/chat/completions`. Raises `InvalidRequest` naming the field."""
    fields, ignored = decode_body(body, _CHAT)
    call = chat_call(fields, header_id, headers)
    return _with_ignored(call, [ignored, *_ignored_in_tools(fields), _formats_of(call)])


def _formats_of(call: Call) -> Ignored:
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


def completion_call(
    fields: CompletionBody, header_id: str | None, headers: ClassHeaders = NO_HEADERS, max_prompt_tokens: int = ANY_NUMBER
) -> Call:
    """Return the call of a completion. Raises `InvalidRequest` naming the field."""
    hints = refuse_unsupported(fields)
    call = _call(fields, header_id, headers, read_prompts(fields.prompt, max_prompt_tokens))
    listed = isinstance(fields.prompt, list) and not isinstance(fields.prompt[0], int)
    return replace(_with_ignored(call, [hints]), listed=listed)


def chat_call(fields: ChatBody, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> Call:
    """Return the call of a chat. Raises `InvalidRequest` naming the field."""
    hints = refuse_unsupported(fields)
    call = _call(fields, header_id, headers, (read_chat(fields),))
    inputs = tuple(replace(one, tool_choice=read_tool_choice(fields)) for one in call.inputs)
    return _with_ignored(replace(call, inputs=inputs), [hints])


def _call(body: CompletionBody | ChatBody, header_id: str | None, headers: ClassHeaders, prompts: tuple[Prompt, ...]) -> Call:
    stream = body.stream or False
    include_usage, continuous_usage, hints = _stream_options(body.stream_options, stream)
    request_id = new_request_id()
    correlation_id = _correlation_id(body.request_id, header_id)
    shown = read_shown(body)
    common = GenerateInput(
        prompt=prompts[0],
        sampling=read_sampling(body, shown),
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
        shown=shown,
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


# Sampling and options ----------------------------------------------------------------------------------------------

COMPLETION_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions only; a chat answer may use the whole context
_MAX_TOKENS: Final = limit_of(SamplingParams, "max_tokens", IntRange)
_LOGPROBS: Final = limit_of(SamplingParams, "logprobs", IntRange)
_PRIORITY: Final = limit_of(RequestSpec, "priority", IntRange)
_SEED: Final = IntRange(-(1 << 63), limit_of(SamplingParams, "seed", IntRange).high)
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
_PLAIN: Final = tuple(name for name in Scalars.__struct_fields__ if name not in OPTIONS)
_BIAS: Final = msgspec.json.Decoder(float)


def read_sampling(body: CompletionBody | ChatBody, shown: PromptShown) -> dict[str, Any]:
    """Return the fields that the client set, under the router's names. `shown`: the parts of the prompt that it asks
    for. Raises `InvalidRequest` naming the field.

    A field is read here only if its name or its form differs from the router's.
    """
    chat = isinstance(body, ChatBody)
    values: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None} | {
        "max_tokens": 1 if shown.hides_output else _max_tokens(body) or (None if chat else COMPLETION_DEFAULT_MAX_TOKENS),
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's clients write -1 for off, the router 0
        "seed": _seed(body),
        "stop": _stop(body.stop),
        "stop_token_ids": _stop_token_ids(body.stop_token_ids),
        "logit_bias": _logit_bias(body.logit_bias),
        "logprobs": _chat_logprobs(body) if isinstance(body, ChatBody) else _completion_logprobs(body),
        "prompt_logprobs": max((n for n in (shown.logprobs, shown.prompt_logprobs) if n is not None), default=None),
    }
    return {name: value for name, value in values.items() if value is not None}


def read_shown(body: CompletionBody | ChatBody) -> PromptShown:
    """Return the parts of the prompt that the answer shows. Raises `InvalidRequest` naming the field."""
    listed = _in_range("prompt_logprobs", body.prompt_logprobs, _LOGPROBS)
    if listed is not None and body.stream:
        raise refuse("prompt_logprobs", "is not allowed with stream: true (nor is it in vLLM)")
    if isinstance(body, ChatBody) or not body.echo:
        return PromptShown(prompt_logprobs=listed)
    if body.use_beam_search:
        raise refuse("echo", "is not allowed with use_beam_search: true")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return PromptShown(True, _completion_logprobs(body), listed, hides_output=asked == 0)


def read_options(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the fields of `RequestSpec` that the client set, beside prompt and sampling. Raises `InvalidRequest`."""
    options = {name: value for name in OPTIONS if (value := getattr(body, name)) is not None}
    if (priority := _in_range("priority", body.priority, _PRIORITY)) is not None:
        options["priority"] = -priority  # vLLM's clients write a lower number for what goes first, the router a higher one
    if body.speculation is None and body.num_speculative_tokens is None:
        return options
    return options | draft_options(body.speculation, body.num_speculative_tokens)


def _in_range(field: str, value: int | None, limit: IntRange) -> int | None:
    if value is not None and not limit.low <= value <= limit.high:
        raise refuse(field, f"must be from {limit.low} to {limit.high}, got {show(value)}")
    return value


def _max_tokens(body: Body) -> int | None:
    """Return the limit of output tokens. If both names are given, the newer one counts. The range is checked here so that the
    error has the name that was used."""
    older = _in_range("max_tokens", body.max_tokens, _MAX_TOKENS)
    newer = _in_range("max_completion_tokens", body.max_completion_tokens, _MAX_TOKENS)
    return older if newer is None else newer


def _seed(body: Body) -> int | None:
    """Return the seed. OpenAI's seed is a signed 64-bit number, the router's is unsigned: a negative one wraps, so distinct
    seeds stay distinct."""
    seed = _in_range("seed", body.seed, _SEED)
    return None if seed is None else seed % (1 << 64)


def _stop(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    if isinstance(stop, str):
        return (stop,)
    _check_count("stop", stop)
    return tuple(stop)


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...] | None:
    if ids is None:
        return None
    _check_count("stop_token_ids", ids)
    return token_ids(tuple(ids), "stop_token_ids")


def _logit_bias(biases: dict[str, msgspec.Raw] | None) -> dict[int, float] | None:
    """Return biases by token id. JSON has {"token id": bias}, since its keys are strings. The router checks the vocabulary and
    the range of biases."""
    if biases is None:
        return None
    _check_count("logit_bias", biases)
    return {_token_id(key): decode(bytes(bias), _BIAS, f"logit_bias.{key}") for key, bias in biases.items()}


def _check_count(field: str, values: Collection[Any]) -> None:
    limit_of(SamplingParams, field, MaxCount).check(field, values)


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise refuse("logit_bias", f"{show(key)} is not a token id")
    return int(key)


def _completion_logprobs(body: CompletionBody) -> int | None:
    """Return the number of likeliest tokens. 0 asks for the drawn tokens alone; None, which some clients write as false, asks
    for nothing."""
    if body.logprobs is True:
        raise refuse("logprobs", "must be an integer or false, got true")
    return None if body.logprobs is False else _in_range("logprobs", body.logprobs, _LOGPROBS)


def _chat_logprobs(body: ChatBody) -> int | None:
    top = _in_range("top_logprobs", body.top_logprobs, _LOGPROBS)
    if body.logprobs:
        return top or 0
    if top:
        raise refuse("top_logprobs", "is only allowed with logprobs: true")
    return None


# Choices: OpenAI's `n` and `best_of`, and vLLM's `use_beam_search` and `length_penalty` ------------------------------

_BEAMS = "use_beam_search"


def read_choices(body: CompletionBody | ChatBody, prompts: int, common: GenerateInput) -> Choices:
    """Return the choices of each of the `prompts` prompts, of which `common` has the other fields. Raises `InvalidRequest`
    naming the field."""
    n = 1 if body.n is None else body.n
    best_of = None if isinstance(body, ChatBody) else body.best_of
    if body.use_beam_search:
        choices = _beams(body, n, best_of, common)
    else:
        if body.length_penalty not in (None, 1.0):
            raise refuse("length_penalty", f"is only allowed with {_BEAMS}: true, got {show(body.length_penalty)}")
        choices = sampled(n, best_of)
        if choices.ranked and body.stream:
            raise refuse("best_of", "must be n with stream: true, since the choices are not known before the end")
    check_number(choices, prompts, "best_of" if choices.ranked else "n")
    return choices


def _beams(body: CompletionBody | ChatBody, n: int, best_of: int | None, common: GenerateInput) -> Choices:
    """Read a beam search: `n` is its width, as in vLLM."""
    if not BEAM_WIDTHS.low <= n <= BEAM_WIDTHS.high:
        raise refuse("n", f"must be from {BEAM_WIDTHS.low} to {BEAM_WIDTHS.high} with {_BEAMS}: true, got {show(n)}")
    if body.stream:
        raise refuse("stream", f"is not allowed with {_BEAMS}: true, since the beams are not known before the end")
    if best_of not in (None, n):
        raise refuse("best_of", f"is not allowed with {_BEAMS}: true, where n is the number of beams")
    if body.response_format is not None and common.constraint is not None and body.structured_outputs is None:
        raise refuse("response_format", f"is not allowed with {_BEAMS}: true")
    check_beams(common)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    LENGTH_PENALTIES.check("length_penalty", penalty)
    return Choices(n, beam_width=n, length_penalty=penalty)


# The names of fields as the client wrote them, for errors of the router, which has one name for each value -----------

Names = tuple[tuple[str, str], ...]
"""Pairs of the router's name of a field and the client's. The name of a field inside it begins with its name and a dot."""

_FORMAT: Final = "response_format"


def written_names(body: Body) -> Names:
    """Return the names of the fields of a body that are not those of the router."""
    names: list[tuple[str, str]] = []
    if body.max_completion_tokens is not None:
        names.append(("max_tokens", "max_completion_tokens"))
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        names.append((f"chat_template_kwargs.{EFFORT}", EFFORT))
    if body.response_format is not None:
        names.append((SCHEMA, f"{_FORMAT}.json_schema.schema"))
        names.append((FIELD, _FORMAT))
    if isinstance(body, CompletionBody) and body.echo and body.prompt_logprobs is None:
        names.append(("prompt_logprobs", "logprobs"))
    return tuple(names)


@contextlib.contextmanager
def as_written(names: Names) -> Iterator[None]:
    """Give errors the name that the client wrote."""
    try:
        yield
    except InvalidRequest as exc:
        for own, written in names:
            if exc.field == own or exc.field.startswith(f"{own}."):
                raise renamed(exc, written) from exc
        raise


# The constraint: `response_format` as OpenAI names it, `structured_outputs` as vLLM does -----------------------------

Fields = Mapping[str, msgspec.Raw]

_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(tuple[str, ...])
_TRUTH: Final = msgspec.json.Decoder(bool)
_KINDS: Final = {kind.value: kind for kind in ConstraintKind}
SCHEMA: Final = f"{FIELD}.{ConstraintKind.JSON_SCHEMA.value}"
"""The router's name of a schema."""
_NOTHING: Final = (b"null", b"false")


def read_constraint(body: Body) -> Constraint | None:
    """Return what the text of the output must be; None: any text. Raises `InvalidRequest` naming the field."""
    asked = None if body.structured_outputs is None else _structured(body.structured_outputs)
    formatted = None if body.response_format is None else _formatted(body.response_format)
    if asked is not None and formatted is not None:
        raise refuse(_FORMAT, f"is not allowed beside {FIELD}")
    return asked or formatted


def formats_left_out(request: GenerateInput, schema: str, parameters: str) -> Ignored:
    """Return the formats that nobody enforces of the schemas that are enforced. The client calls that of the output `schema`,
    and those of tools `parameters`."""
    parts = []
    if request.constraint is not None and request.constraint.kind is ConstraintKind.JSON_SCHEMA:
        parts.append(left_out(f"{schema}.format", _formats(request.constraint.text)))
    if isinstance(request.prompt, ChatPrompt):
        forced = request.tool_choice.forced
        enforced = [tool.parameters for tool in request.prompt.tools if tool.parameters and (tool.strict or forced)]
        parts += [left_out(f"{parameters}.format", _formats(text)) for text in enforced]
    return joined(parts) if parts else NOTHING


def _formats(schema: str) -> list[str]:
    try:
        return simplify(msgspec.json.decode(schema))
    except (msgspec.DecodeError, RecursionError):  # the router refuses it
        return []


def _structured(fields: Fields) -> Constraint:
    """Read vLLM's field. Its options that are off ask for nothing, and options that are on are refused."""
    given = {name: bytes(raw) for name, raw in fields.items() if bytes(raw) not in _NOTHING}
    for name in given:
        if name not in _KINDS:
            raise refuse(f"{FIELD}.{show(name)[1:-1]}", "is not supported")
    if len(given) != 1:
        raise refuse(FIELD, f"must hold exactly one of {', '.join(_KINDS)}")
    ((name, text),) = given.items()
    field, kind = f"{FIELD}.{name}", _KINDS[name]
    match kind:
        case ConstraintKind.JSON_OBJECT:
            decode(text, _TRUTH, field)
            return Constraint(kind)
        case ConstraintKind.CHOICE:
            return Constraint(kind, choices=decode(text, _TEXTS, field))
        case ConstraintKind.JSON_SCHEMA:
            return Constraint(kind, decode(text, _TEXT, field) if text.startswith(b'"') else text.decode())
        case ConstraintKind.REGEX | ConstraintKind.LARK:
            return Constraint(kind, decode(text, _TEXT, field))


def _formatted(fields: ResponseFormat) -> Constraint | None:
    """Read OpenAI's field. A schema is enforced whether it is strict or not."""
    kind = fields.type
    if kind is None:
        raise refuse(_FORMAT, "must name a type: text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if kind != "json_schema":
        raise refuse(f"{_FORMAT}.type", f"must be text, json_object or json_schema, got {show(kind)}")
    place = f"{_FORMAT}.json_schema"
    if fields.json_schema is None:
        raise refuse(place, "is missing")
    schema = bytes(fields.json_schema.schema)
    if schema == b"null":
        raise refuse(f"{place}.schema", "is missing")
    return Constraint(ConstraintKind.JSON_SCHEMA, schema.decode())
