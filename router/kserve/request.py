"""Requests of the Open Inference Protocol become what the router runs.

A request comes as tensors, in JSON, in binary or in protobuf, or as one flat object (Triton's generate extension). Each of them
becomes the same flat object, whose names are those of input tensors and of parameters. So there is one way to read it, and an
error has the same words on all wires. Parameters are the fields of a completion with the same names and limits.

A name that the signature does not have is refused, and so is one that is given in two places. Of two equal names in one JSON
object the last counts, as everywhere in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from router.api.request import GenerateInput
from router.kserve.signature import INPUTS, OUTPUTS, SHAPE, TensorSpec
from router.openai.body import CompletionBody, Scalars, json_null
from router.openai.json import decode, refuse, show
from router.openai.request import (
    NO_HEADERS,
    SCHEMA,
    ClassHeaders,
    Names,
    as_written,
    completion_call,
    formats_left_out,
)


class GenerateBody(Scalars, kw_only=True):
    """The body of `/v2/models/{model}/generate`, and what all requests become."""

    text_input: str | None = None
    stream: bool | None = None
    sampling_parameters: str | None = None
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None

    parameters: dict[str, Raw] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Raw] | None = None
    structured_outputs: dict[str, Raw] | None = None
    deadline_s: float | None = None
    timeout: int | None = None
    placement: str | None = None
    slo_class: str | None = None
    session_id: str | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None


class InputTensor(Struct, kw_only=True, forbid_unknown_fields=True):
    """An input tensor. Its data follow the JSON if it has the parameter `binary_data_size`."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Raw] | None = None
    data: Raw = msgspec.field(default_factory=json_null)


class RequestedOutput(Struct, kw_only=True, forbid_unknown_fields=True):
    """An output tensor that the client asks for."""

    name: str
    parameters: dict[str, Raw] | None = None


class InferBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v2/models/{model}/infer`."""

    inputs: list[InputTensor] | None = None
    outputs: list[RequestedOutput] | None = None
    id: str | None = None
    parameters: dict[str, Raw] | None = None


@dataclass(frozen=True, slots=True)
class InferCall:
    """One request. The front end checks `model` and `version`; over HTTP they stand in the path, and are empty here."""

    input: GenerateInput
    stream: bool
    prefix: str
    """The text of the answer begins with this: the prompt, unless it is excluded."""
    outputs: tuple[TensorSpec, ...]
    """The tensors of the answer, in their order."""
    binary: frozenset[str] = frozenset()
    """The names of those that follow the JSON of the answer."""
    id: str = ""
    """The client's name for the request, which each answer repeats. Empty: it has none."""
    names: Names = ()
    """The fields that the client wrote under another name than the router's."""
    model: str = ""
    version: str = ""

    def of_client(self, client: tuple[str, ...]) -> InferCall:
        """Return the request with the names of its client."""
        return replace(self, input=replace(self.input, client=client))


Fields = Mapping[str, Raw]

MAX_TIMEOUT_US: Final = 1 << 53  # JSON keeps integers up to this exactly; the router's own limit of deadlines is far below
_TENSORS: Final = {one.name: one for one in INPUTS}
_OUTPUTS: Final = {one.name: one for one in OUTPUTS}
_FLAGS: Final = frozenset(one.name for one in INPUTS if one.datatype == "BOOL")
PARAMETERS: Final = frozenset(GenerateBody.__struct_fields__) - {*_TENSORS, "parameters"}
"""The names of parameters: all fields of the flat object that are no tensor."""
_SHARED: Final = PARAMETERS - {"timeout"}  # a completion has these fields, too
_NUMBERS: Final = frozenset(
    name for name, kind in get_type_hints(GenerateBody).items() if name in PARAMETERS and {*get_args(kind)} & {bool, int, float}
)
_QUOTED: Final = re.compile(rb'"\s*(true|false|[-+.0-9eE]{1,40})\s*"')
_BODY: Final = msgspec.json.Decoder(GenerateBody)
_INFER: Final = msgspec.json.Decoder(InferBody)
_MEMBERS: Final[msgspec.json.Decoder[Fields]] = msgspec.json.Decoder(dict[str, Raw])
_PARAMETERS: Final = msgspec.json.Decoder(dict[str, Raw] | None)
_TEXT: Final = msgspec.json.Decoder(str)
_ELEMENTS: Final = msgspec.json.Decoder(list[Raw])
_NUMBER: Final = msgspec.json.Decoder(bool | int | float)
_TRUTH: Final = msgspec.json.Decoder(bool)
_SIZE: Final = msgspec.json.Decoder(int)
_LENGTH_BYTES: Final = 4  # the length of a BYTES element stands before it, in little-endian order

# One flat object ------------------------------------------------------------------------------------------------------


def parse_generate(body: bytes, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> InferCall:
    """Parse a body of `/v2/models/{model}/generate`. Raises `InvalidRequest` naming the field."""
    fields = decode(body, _MEMBERS)
    parameters = decode(bytes(fields["parameters"]), _PARAMETERS, "parameters") if "parameters" in fields else None
    flat = {name: value for name, value in fields.items() if name != "parameters"}
    _known(flat, {*_TENSORS, *PARAMETERS}, "a field or a parameter")
    return read_call([("the body", flat), ("parameters", parameters or {})], header_id=header_id, headers=headers)


def read_call(
    places: Sequence[tuple[str, Fields]],
    *,
    wanted: Iterable[str] | None = None,
    header_id: str | None = None,
    headers: ClassHeaders = NO_HEADERS,
    name: str | None = None,
) -> InferCall:
    """Return the request whose fields stand in `places`, each with the words by which an error names it. The first place has
    the tensors, the others have parameters. `wanted`: the outputs that the client listed. `name`: its name for the request.
    Raises `InvalidRequest` naming the field."""
    merged: dict[str, Raw] = {}
    where: dict[str, str] = {}
    first, *rest = places
    sampling = first[1].get("sampling_parameters")
    if sampling is not None and bytes(sampling) != b"null":
        text = decode(bytes(sampling), _TEXT, "sampling_parameters")
        rest.append(("sampling_parameters", decode(text.encode(errors="replace"), _MEMBERS, "sampling_parameters")))
    for place, fields in rest:
        _known(fields, PARAMETERS | (_FLAGS if place == "parameters" else frozenset()), "a parameter")
    for place, fields in (first, *rest):
        for field, value in fields.items():
            if field in merged:
                raise refuse(field, f"is given twice, in {where[field]} and in {place}")
            where[field] = place
            merged[field] = _unquoted(field, value) if field in _NUMBERS else value
    return _call(decode(msgspec.json.encode(merged), _BODY), wanted, header_id, headers, name)


def _known(fields: Collection[str], known: Collection[str], what: str) -> None:
    for name in sorted(fields):  # protobuf's maps have no order
        if name not in known:
            raise refuse(show(name)[1:-1], f"is not {what} of this model; those are {', '.join(sorted(known))}")


def _unquoted(name: str, value: Raw) -> Raw:
    """Return a number or a truth value that was written as a string, as Triton's own sample client writes them."""
    quoted = _QUOTED.fullmatch(bytes(value))
    if quoted is None:
        return value
    decode(quoted[1], _NUMBER, name)
    return Raw(quoted[1])


def _call(
    body: GenerateBody, wanted: Iterable[str] | None, header_id: str | None, headers: ClassHeaders, name: str | None
) -> InferCall:
    if body.text_input is None:
        raise refuse("text_input", "is missing")
    deadline_s, names = _deadline_s(body)
    fields = {one: getattr(body, one) for one in _SHARED} | {"deadline_s": deadline_s}
    with as_written((("request_id", "id"),)):
        call = completion_call(CompletionBody(prompt=body.text_input, request_id=name or None, **fields), header_id, headers)
    (request,) = call.inputs
    if (unenforced := formats_left_out(request, SCHEMA, "")).count:
        raise refuse(SCHEMA, f"the formats of {unenforced.header.decode()} cannot be enforced; leave them out")
    stream = body.stream or False
    if stream and body.exclude_input_in_output is False:
        raise refuse("exclude_input_in_output", "must be true or left out with stream: true")
    shows_input = not stream and not body.exclude_input_in_output
    outputs = {OUTPUTS[0].name} if wanted is None else {*wanted}
    outputs |= {one.name for one in OUTPUTS[1:] if getattr(body, f"return_{one.name}")}
    return InferCall(
        request,
        stream,
        body.text_input if shows_input else "",
        tuple(one for one in OUTPUTS if one.name in outputs),
        id=name or "",
        names=(("prompt", "text_input"), *names),
    )


def _deadline_s(body: GenerateBody) -> tuple[float | None, Names]:
    """Return the deadline, and the name that the client gave it. `timeout` is Triton's and counts microseconds."""
    if body.timeout is None:
        return body.deadline_s, ()
    if body.deadline_s is not None:
        raise refuse("timeout", "is not allowed beside deadline_s")
    if not 0 < body.timeout <= MAX_TIMEOUT_US:
        raise refuse("timeout", f"must be from 1 to {MAX_TIMEOUT_US} microseconds, got {show(body.timeout)}")
    return body.timeout / 1e6, (("deadline_s", "timeout"),)


# Tensors --------------------------------------------------------------------------------------------------------------


def check_tensor(name: str, datatype: str, shape: Sequence[int], seen: Collection[str]) -> TensorSpec:
    """Return the input that a tensor is. `seen` are the names of the tensors before it. Raises `InvalidRequest`."""
    found = _TENSORS.get(name)
    if found is None:
        raise refuse("inputs", f"{show(name)} is not an input of this model; those are {', '.join(_TENSORS)}")
    if name in seen:
        raise refuse(name, "is given twice in inputs")
    if datatype != found.datatype:
        raise refuse(name, f"datatype must be {found.datatype}, got {show(datatype)}")
    if tuple(shape) != SHAPE:
        raise refuse(name, f"shape must be {show([*SHAPE])}, got {show([*shape[:8]])}: one request has one prompt")
    return found


def check_outputs(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the outputs that a client lists; None: it lists none. Raises `InvalidRequest`."""
    for i, name in enumerate(names):
        if name not in _OUTPUTS:
            raise refuse("outputs", f"{show(name)} is not an output of this model; those are {', '.join(_OUTPUTS)}")
        if name in names[:i]:
            raise refuse("outputs", f"{show(name)} is given twice")
    return tuple(names) or None


def element(tensor: TensorSpec, raw: bytes) -> Raw:
    """Return the one element of a binary tensor as JSON. Raises `InvalidRequest` naming the tensor."""
    if tensor.datatype == "BOOL":
        if raw not in (b"\x00", b"\x01"):
            raise refuse(tensor.name, f"must be one byte, 0 or 1, got {len(raw)} bytes: {show(raw[:8].hex())}")
        return Raw(b"true" if raw == b"\x01" else b"false")
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if len(raw) != _LENGTH_BYTES + length:
        raise refuse(tensor.name, f"must be a length of {_LENGTH_BYTES} bytes and as many bytes, got {len(raw)} bytes")
    return text_element(tensor.name, raw[_LENGTH_BYTES:])


def text_element(name: str, text: bytes) -> Raw:
    """Return a BYTES element as JSON. Raises `InvalidRequest` naming the tensor."""
    try:
        return Raw(msgspec.json.encode(text.decode()))
    except UnicodeDecodeError as exc:
        raise refuse(name, f"must be UTF-8: {exc.reason} at byte {exc.start}") from exc


def parse_infer(body: bytes, json_bytes: int | None, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> InferCall:
    """Parse a body of `/v2/models/{model}/infer`. Its JSON has `json_bytes` bytes, and the binary tensors follow it; None: all
    of it is JSON. Raises `InvalidRequest` naming the field."""
    length = len(body) if json_bytes is None else json_bytes
    if length > len(body):
        raise refuse("inference-header-content-length", f"is {length}, but the body has {len(body)} bytes")
    fields = decode(body[:length], _INFER)
    if not fields.inputs:
        raise refuse("inputs", "is missing: text_input must be there")
    if len(fields.inputs) > len(INPUTS):
        raise refuse("inputs", f"holds {len(fields.inputs)} tensors; at most {len(INPUTS)} are allowed")
    tensors: dict[str, Raw] = {}
    place = length
    for one in fields.inputs:
        spec = check_tensor(one.name, one.datatype, one.shape, tensors)
        size = _binary_size(one)
        tensors[one.name] = _json_element(one) if size is None else element(spec, body[place : place + size])
        place += size or 0
    if place != len(body):
        raise refuse("inputs", f"have {place - length} bytes of binary data, and the body has {len(body) - length}")
    parameters = dict(fields.parameters or {})
    all_binary = decode(bytes(parameters.pop("binary_data_output", Raw(b"false"))), _TRUTH, "binary_data_output")
    wanted = check_outputs([one.name for one in fields.outputs or ()])
    asked = {one.name: _is_binary(one, all_binary) for one in fields.outputs or ()}
    places = [("inputs", tensors), ("the parameters", parameters)]
    call = read_call(places, wanted=wanted, header_id=header_id, headers=headers, name=fields.id)
    return replace(call, binary=frozenset(one.name for one in call.outputs if asked.get(one.name, all_binary)))


def _json_element(tensor: InputTensor) -> Raw:
    data = bytes(tensor.data)
    if data == b"null":
        raise refuse(tensor.name, "data is missing")
    elements = decode(data, _ELEMENTS, tensor.name)
    if len(elements) != 1:
        raise refuse(tensor.name, f"data must hold one element, got {len(elements)}")
    return elements[0]


def _binary_size(tensor: InputTensor) -> int | None:
    """Return the bytes of a tensor behind the JSON. None: its data stand in the JSON."""
    parameters = tensor.parameters or {}
    for name in parameters:
        if name != "binary_data_size":
            raise refuse(f"{tensor.name}.parameters.{show(name)[1:-1]}", "is not supported; only binary_data_size is")
    if not parameters:
        return None
    field = f"{tensor.name}.parameters.binary_data_size"
    if bytes(tensor.data) != b"null":
        raise refuse(field, "is not allowed beside data")
    size = decode(bytes(parameters["binary_data_size"]), _SIZE, field)
    if size < 0:
        raise refuse(field, f"must be at least 0, got {show(size)}")
    return size


def _is_binary(output: RequestedOutput, all_binary: bool) -> bool:
    parameters = output.parameters or {}
    for name in parameters:
        if name != "binary_data":
            raise refuse(f"{output.name}.parameters.{show(name)[1:-1]}", "is not supported; only binary_data is")
    if not parameters:
        return all_binary
    return decode(bytes(parameters["binary_data"]), _TRUTH, f"{output.name}.parameters.binary_data")
