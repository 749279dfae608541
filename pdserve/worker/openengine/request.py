"""A message of Generate becomes a request. Each field is served or refused by its published name; what is left out is listed.

The two phases of a request are asked of two workers. On the one that lends, `stopping.max_tokens` bounds nothing, because that
phase returns no token: control planes send 1 there.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve.core.errors import ContextOverflow, InvalidRequest, UnknownModel
from pdserve.core.limits import IntRange, MaxBytes, MaxCount, limit_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams, check_prompt_logprobs
from pdserve.core.structured.constraint import FIELD, MAX_CHOICES, Constraint, ConstraintKind
from pdserve.rpc.v1 import openengine_pb2

MAX_ID_BYTES: Final = 256  # of the caller's own id of a request, which is kept and logged
MAX_LISTED: Final = 16
MAX_NAME_CHARS: Final = 64
MAX_CHARS_PER_TOKEN: Final = 256
"""A text longer than this times the model's length is refused unread, as by the router."""
MOST_OUTPUT: Final = 1 << 31
"""The most tokens that a request may ask for. A phase that returns none asks for as many."""
OWN_BACKEND: Final = "llguidance"
PREFIX: Final = "openengine-"
PRIORITY: Final = "openengine-priority"
RANK: Final = "openengine-target-dp-rank"
ROUTING_KEY: Final = "openengine-routing-key"
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,10}")
_KINDS: Final = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choice": ConstraintKind.CHOICE,
    "json_object": ConstraintKind.JSON_OBJECT,
}
_REFUSED: Final = {
    "media": "is not supported: prompts are text",
    "lora_name": "is not supported: adapters are not served",
}
_REFUSED_GUIDES: Final = {
    "ebnf_grammar": "is not supported: write the form of the output as json_schema, regex or choice",
    "structural_tag": "is not supported: write the form of the output as json_schema, regex or choice",
}
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed",
)  # fmt: skip
_STOPPING: Final = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "include_stop_in_output": "include_stop_str_in_output",
}
_WRITTEN: Final = {
    **{name: f"sampling.{name}" for name in _SAMPLING},
    **{own: f"stopping.{name}" for name, own in _STOPPING.items()},
    "stop": "stopping.conditions",
    "stop_token_ids": "stopping.conditions",
    "logprobs": "response.output_candidates.top_n",
    "prompt_logprobs": "response.prompt_candidates.top_n",
    "cache_salt": "kv.cache_salt",
    "priority": PRIORITY,
    FIELD: "guided",
}
"""The published name of each of our fields that an error may name."""


@contextlib.contextmanager
def as_published() -> Iterator[None]:
    """Give errors the published name of their field."""
    try:
        yield
    except InvalidRequest as exc:
        raise published(exc) from exc


def published(error: InvalidRequest) -> InvalidRequest:
    """Return the error with the published name of its field."""
    written = _WRITTEN.get(error.field.partition(".")[0])
    if written is None:
        return error
    return InvalidRequest(error.message.removeprefix(f"{error.field}: ").removeprefix(f"{FIELD}: "), field=written)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as a caller wrote it. Its text is not yet encoded."""

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: dict[str, Any]
    """The fields of `SamplingParams` that are set."""
    options: dict[str, Any]
    """Further fields of `RequestSpec`."""
    session: openengine_pb2.KvSessionRef | None
    ignored: tuple[str, ...]
    """The names of what was left out, which may be shortened."""

    def spec(self, prompt_ids: Sequence[int], max_model_len: int, *, lends: bool) -> RequestSpec:
        """Return the request with its prompt's ids. `lends` tells that this worker computes the prompt for another one.

        Raises `InvalidRequest` naming the field.
        """
        given, room = self.sampling, max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextOverflow.of_prompt(f"{len(prompt_ids)} tokens", max_model_len, field="prompt")
        with as_published():
            if "max_tokens" in given:
                limit_of(SamplingParams, "max_tokens", IntRange).check("max_tokens", given["max_tokens"])
                if given["max_tokens"] > room and not lends:
                    raise ContextOverflow.of_output(given["max_tokens"], len(prompt_ids), max_model_len, prompt="prompt")
            most: dict[str, Any] = {"max_tokens": MOST_OUTPUT} if lends else {}
            params = SamplingParams(**{"max_tokens": room, "seed": secrets.randbits(64)} | given | most)
            check_prompt_logprobs(len(prompt_ids), params.prompt_logprobs)
            return RequestSpec(tuple(prompt_ids), params, **self.options)


def read_generate(
    request: openengine_pb2.GenerateRequest,
    metadata: Sequence[tuple[str, str | bytes]],
    *,
    model: str,
    max_model_len: int,
    lends: bool,
) -> Asked:
    """Return the request of a message. `lends` tells that this worker computes prompts for others. Raises `InvalidRequest`
    naming the field."""
    _refuse(request, _REFUSED, "")
    if request.model:
        check_model(request.model, model)
    MaxBytes(MAX_ID_BYTES).check("request_id", request.request_id)
    options: dict[str, Any] = {}
    ignored = _read_metadata(metadata, options)
    with as_published():
        sampling = {**_sampling(request.sampling), **_stopping(request.stopping), **_response(request.response)}
        if request.HasField("guided") and (constraint := _constraint(request.guided)) is not None:
            options["constraint"] = constraint
        if request.kv.HasField("cache_salt"):
            limit_of(RequestSpec, "cache_salt", MaxBytes).check("cache_salt", request.kv.cache_salt)
            options["cache_salt"] = request.kv.cache_salt
    if request.kv.bypass_prefix_cache:
        raise InvalidRequest("is not supported: send a kv.cache_salt that no other request has", field="kv.bypass_prefix_cache")
    session = request.kv.session if request.kv.HasField("session") else None
    if session is not None and lends:
        raise InvalidRequest("this is a prefill worker: sessions go to decode workers", field="kv.session")
    if session is not None and sampling.get("prompt_logprobs") is not None:
        raise InvalidRequest("is only allowed where the prompt is computed", field="response.return_prompt_logprobs")
    return Asked(
        request_id=request.request_id or secrets.token_hex(16),
        prompt=_prompt(request, max_model_len),
        sampling=sampling,
        options=options,
        session=session,
        ignored=tuple(islice(chain(ignored, _left_out(request)), MAX_LISTED)),
    )


def check_model(asked: str, model: str) -> None:
    """Raise `UnknownModel` unless this is the model of the worker."""
    if asked != model:
        raise UnknownModel(f"{asked!r:.100} is not served here; {model!r} is", field="model")


def _refuse(message: Message, refused: dict[str, str], place: str) -> None:
    """Raise `InvalidRequest` for the first field of a message that asks for what does not exist here."""
    for descriptor, _ in message.ListFields():
        if (why := refused.get(descriptor.name)) is not None:
            raise InvalidRequest(why, field=f"{place}{descriptor.name}")


def _read_metadata(metadata: Sequence[tuple[str, str | bytes]], options: dict[str, Any]) -> list[str]:
    """Put what the protocol's metadata ask for into `options`, and return the names of those that nobody knows here."""
    given: dict[str, str] = {}
    for name, value in metadata:
        if name.startswith(PREFIX):
            if name in given:
                raise InvalidRequest("must be given once", field=name)
            given[name] = value if isinstance(value, str) else value.decode(errors="replace")
    if (rank := _number(given, RANK, 0, (1 << 32) - 1)) is not None and rank:
        raise InvalidRequest(f"must be 0, the only rank, got {rank}", field=RANK)
    if (priority := _number(given, PRIORITY, -(1 << 31), (1 << 31) - 1)) is not None:
        with as_published():
            limit_of(RequestSpec, "priority", IntRange).check("priority", priority)
        options["priority"] = priority
    if ROUTING_KEY in given and not given[ROUTING_KEY]:
        raise InvalidRequest("must not be empty", field=ROUTING_KEY)
    return [_printable(name) for name in given.keys() - {RANK, PRIORITY, ROUTING_KEY}]


def _number(given: dict[str, str], name: str, low: int, high: int) -> int | None:
    """Return the number of a metadata entry. None: it is not there."""
    if (text := given.get(name)) is None:
        return None
    if _WHOLE.fullmatch(text) is None or not low <= int(text) <= high:
        raise InvalidRequest(f"must be a whole number from {low} to {high}, got {text!r:.40}", field=name)
    return int(text)


def _sampling(params: openengine_pb2.SamplingParams) -> dict[str, Any]:
    values = {name: getattr(params, name) for name in _SAMPLING if params.HasField(name)}
    if values.get("top_k") == -1:  # in vLLM and SGLang it means all tokens
        values["top_k"] = 0
    if params.HasField("num_sequences") and params.num_sequences != 1:
        raise InvalidRequest(f"must be 1, got {params.num_sequences}", field="sampling.num_sequences")
    return values


def _stopping(stopping: openengine_pb2.StoppingOptions) -> dict[str, Any]:
    values = {own: getattr(stopping, name) for name, own in _STOPPING.items() if stopping.HasField(name)}
    stops, ids = [], []
    most = limit_of(SamplingParams, "stop", MaxCount).count + limit_of(SamplingParams, "stop_token_ids", MaxCount).count
    MaxCount(most, "conditions").check("stop", stopping.conditions)
    for one in stopping.conditions:
        match one.WhichOneof("condition"):
            case "stop_text":
                stops.append(one.stop_text)
            case "stop_token_id":
                ids.append(one.stop_token_id)
            case _:
                raise InvalidRequest("has an entry without a condition", field="stopping.conditions")
    return values | {"stop": tuple(stops), "stop_token_ids": tuple(ids)}


def _response(response: openengine_pb2.ResponseOptions) -> dict[str, Any]:
    if response.prompt_logprob_start:
        raise InvalidRequest("must be 0: all tokens of the prompt are listed", field="response.prompt_logprob_start")
    values = {}
    for kind, own in (("output", "logprobs"), ("prompt", "prompt_logprobs")):
        wanted = getattr(response, f"return_{kind}_logprobs")
        field = f"response.{kind}_candidates"
        if response.HasField(f"{kind}_candidates"):
            candidates = getattr(response, f"{kind}_candidates")
            selection = candidates.WhichOneof("selection")
            if selection not in (None, "top_n"):
                raise InvalidRequest("is not supported: set top_n", field=f"{field}.{selection}")
            if not wanted:
                raise InvalidRequest(f"is only allowed with return_{kind}_logprobs", field=field)
            values[own] = candidates.top_n
        elif wanted:
            values[own] = 0
    return values


def _constraint(guided: openengine_pb2.GuidedDecoding) -> Constraint | None:
    if guided.backend not in ("", OWN_BACKEND):
        raise InvalidRequest(f"must be {OWN_BACKEND} or empty, got {guided.backend!r:.100}", field="guided.backend")
    _refuse(guided, _REFUSED_GUIDES, "guided.")
    guide = guided.WhichOneof("guide")
    if guide is None:
        return None
    kind = _KINDS[guide]
    try:
        if kind is ConstraintKind.CHOICE:
            MaxCount(MAX_CHOICES, "choices").check(FIELD, guided.choice.choices)
            return Constraint(kind, choices=tuple(guided.choice.choices))
        return Constraint(kind, "" if kind is ConstraintKind.JSON_OBJECT else getattr(guided, guide))
    except InvalidRequest as exc:
        raise InvalidRequest(exc.message.removeprefix(f"{exc.field}: "), field=f"guided.{guide}") from exc


def _prompt(request: openengine_pb2.GenerateRequest, max_model_len: int) -> str | tuple[int, ...]:
    """Return the prompt. A message has room for millions of ids, so their count is checked before they are copied."""
    kind = request.WhichOneof("input")
    if kind == "prompt":
        if not request.prompt:
            raise InvalidRequest("is empty", field="prompt")
        if len(request.prompt) > max_model_len * MAX_CHARS_PER_TOKEN:
            raise ContextOverflow.of_prompt(f"{len(request.prompt)} characters", max_model_len, field="prompt")
        return request.prompt
    if kind is None:
        raise InvalidRequest("is missing: set prompt or token_ids", field="input")
    if not (count := len(request.token_ids.ids)):
        raise InvalidRequest("is empty", field="token_ids")
    if count >= max_model_len:
        raise ContextOverflow.of_prompt(f"{count} tokens", max_model_len, field="token_ids")
    return tuple(request.token_ids.ids)


def _left_out(request: openengine_pb2.GenerateRequest) -> Iterator[str]:
    """Yield the keys of `extra`, and the numbers of fields that a newer release of the protocol has."""
    for key in request.extra.fields:
        yield _printable(f"extra.{key}")
    parts = [name for name in ("sampling", "stopping", "response", "kv", "guided") if request.HasField(name)]
    places: list[tuple[str, Message]] = [("", request), *((f"{name}.", getattr(request, name)) for name in parts)]
    for place, part in places:
        unknown = UnknownFieldSet(part)
        yield from dict.fromkeys(f"{place}{unknown[i].field_number}" for i in range(len(unknown)))


def _printable(name: str) -> str:
    """Return a name that metadata can carry."""
    return re.sub(r"[^!-+\--~]", "?", name[:MAX_NAME_CHARS])
