"""Speaks with a router by NVIDIA's `tritonclient`: a program that prints what it saw as one JSON object.

It is a process of its own, since the client brings the protocol's messages under the names that the router's own have, and one
process can hold only one of the two.

    python triton_speaker.py HTTP_ADDRESS GRPC_ADDRESS MODEL
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from tritonclient.utils import InferenceServerException

BOUND_S = 60
ASKED = ("finish_reason", "num_input_tokens", "num_output_tokens")
PROMPT = "Once there was"
SHORT = {"max_tokens": 3, "temperature": 0}
PARAMETERS = {"max_tokens": 12, "temperature": "0.9", "seed": 5, "ignore_eos": True}
LONG = "word " * 10_000  # 50 kB: over the bound up to which a request is parsed on the router's loop


def tensors(kind: Any, text: str, *, datatype: str = "BYTES", shape: tuple[int, ...] = (1,), **flags: bool) -> list[Any]:
    """The inputs of a request, made by the client of HTTP or of gRPC."""
    made = [kind.InferInput("text_input", list(shape), datatype)]
    value = np.array([text.encode()] * int(np.prod(shape)), np.object_) if datatype == "BYTES" else np.ones(shape, np.int32)
    made[0].set_data_from_numpy(value.reshape(shape))
    for name, given in flags.items():
        made.append(kind.InferInput(name, [1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([given]))
    return made


def sampling(kind: Any, **fields: Any) -> Any:
    """The tensor with the sampling parameters."""
    tensor = kind.InferInput("sampling_parameters", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps(fields).encode()], np.object_))
    return tensor


def seen(result: Any) -> dict[str, Any]:
    """The outputs of an answer, each with its one element."""
    told = {}
    answer = result.get_response()
    outputs = answer["outputs"] if isinstance(answer, dict) else answer.outputs
    for one in outputs:
        name = one["name"] if isinstance(one, dict) else one.name
        (value,) = result.as_numpy(name)
        told[name] = value if isinstance(value, str) else value.decode() if isinstance(value, bytes) else int(value)
    return told


def streamed(client: Any, model: str, requests: list[tuple[str, list[Any], dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The messages of the requests of one stream, by the requests' ids."""
    arrived: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    told: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in requests}
    errors: list[str] = []
    try:
        for name, inputs, parameters in requests:
            client.async_stream_infer(model, inputs, request_id=name, parameters=parameters, enable_empty_final_response=True)
        open_ones = len(requests)
        while open_ones:
            result, error = arrived.get(timeout=BOUND_S)
            if error is not None:
                errors.append(error.message())
                open_ones -= 1
                continue
            answer = result.get_response()
            final = answer.parameters["triton_final_response"].bool_param
            told[answer.id].append(seen(result) | {"final": final, "model": [answer.model_name, answer.model_version]})
            open_ones -= final
    finally:
        client.stop_stream()
    return {**told, "errors": [{"message": message} for message in errors]}


def refusal(call: Callable[[], Any]) -> list[str]:
    """The status and the message of a call that fails."""
    try:
        call()
    except InferenceServerException as exc:
        return [exc.status() or "", exc.message()]
    return ["", "it did not fail"]


def asked(kind: Any, client: Any, model: str) -> dict[str, Any]:
    """What one client gets for good requests."""
    infer = partial(client.infer, model)
    as_json = {} if kind is by_http else {"as_json": True}
    flags = {f"return_{name}": True for name in ASKED} | {"exclude_input_in_output": True}
    by_tensor = [*tensors(kind, PROMPT, exclude_input_in_output=True), sampling(kind, **PARAMETERS)]
    one_output = [kind.InferRequestedOutput("num_output_tokens")]
    return {
        "states": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model, "1")],
        "server": client.get_server_metadata(**as_json),
        "metadata": client.get_model_metadata(model, **as_json),
        "bare": seen(infer(tensors(kind, PROMPT), parameters=SHORT)),
        "asked": seen(infer(tensors(kind, PROMPT, **flags), parameters=PARAMETERS, request_id="mine")),
        "by tensor": seen(infer(by_tensor, "1")),
        "one output": seen(infer(tensors(kind, PROMPT), parameters=PARAMETERS, outputs=one_output)),
    }


def refused(kind: Any, client: Any, model: str) -> dict[str, list[str]]:
    """What one client gets for bad requests."""
    infer = partial(client.infer, model)
    output = kind.InferRequestedOutput
    return {
        "unknown model": refusal(lambda: client.get_model_metadata("other")),
        "unknown version": refusal(lambda: client.is_model_ready(model, "2") or client.get_model_metadata(model, "2")),
        "model of a request": refusal(lambda: client.infer("other", tensors(kind, "Once"))),
        "batch": refusal(lambda: infer(tensors(kind, "Once", shape=(2,)))),
        "rank": refusal(lambda: infer(tensors(kind, "Once", shape=(1, 1)))),
        "datatype": refusal(lambda: infer(tensors(kind, "Once", datatype="INT32"))),
        "no prompt": refusal(lambda: infer([sampling(kind, max_tokens=3)])),
        "empty prompt": refusal(lambda: infer(tensors(kind, ""))),
        "twice": refusal(lambda: infer(tensors(kind, "Once") * 2)),
        "unknown input": refusal(lambda: infer([*tensors(kind, "Once"), *tensors(kind, "", image=True)[1:]])),
        "unknown output": refusal(lambda: infer(tensors(kind, "Once"), outputs=[output("logprobs")])),
        "unknown parameter": refusal(lambda: infer(tensors(kind, "Once"), parameters={"lora_name": "a"})),
        "parameter twice": refusal(lambda: infer([*tensors(kind, "Once"), sampling(kind, seed=1)], parameters={"seed": 1})),
        "parameter out of range": refusal(lambda: infer(tensors(kind, "Once"), parameters={"max_tokens": 0})),
        "parameter of a wrong type": refusal(lambda: infer(tensors(kind, "Once"), parameters={"seed": "one"})),
        "no JSON": refusal(lambda: infer([*tensors(kind, "Once"), broken(kind)])),
        "stream": refusal(lambda: infer(tensors(kind, "Once", stream=True))),
        "sequence": refusal(lambda: infer(tensors(kind, "Once"), sequence_id=7)),
        "classes": refusal(lambda: infer(tensors(kind, "Once"), outputs=[output("text_output", class_count=1)])),
        "longer than the context": refusal(lambda: infer(tensors(kind, LONG))),
        "id": refusal(lambda: infer(tensors(kind, "Once"), request_id="two words")),
        "timeout": refusal(lambda: infer(tensors(kind, "Once"), timeout=-5)),
    }


def main(http: str, grpc: str, model: str) -> dict[str, Any]:
    """Speak with both ports."""
    told: dict[str, Any] = {}
    with by_http.InferenceServerClient(http, network_timeout=BOUND_S, connection_timeout=BOUND_S) as client:
        told["http"] = {**asked(by_http, client, model), "refused": refused(by_http, client, model)}
        plain = tensors(by_http, PROMPT)
        plain[0].set_data_from_numpy(np.array([PROMPT], np.object_), binary_data=False)
        outputs = [by_http.InferRequestedOutput("text_output", binary_data=False)]
        told["json alone"] = seen(client.infer(model, plain, outputs=outputs, parameters=SHORT))
    with by_grpc.InferenceServerClient(grpc) as client:
        told["grpc"] = {**asked(by_grpc, client, model), "refused": refused(by_grpc, client, model)}
        told["config"] = refusal(lambda: client.get_model_config(model))
        flags = {"stream": True} | {f"return_{name}": True for name in ASKED}
        told["streamed"] = streamed(
            client,
            model,
            [
                ("steps", tensors(by_grpc, PROMPT, **flags), PARAMETERS),
                ("whole", tensors(by_grpc, PROMPT), PARAMETERS),
                ("bad", tensors(by_grpc, PROMPT, stream=True), {"temperature": 7}),
                ("large", tensors(by_grpc, LONG, stream=True), PARAMETERS),
                ("shown", tensors(by_grpc, PROMPT, stream=True, exclude_input_in_output=False), PARAMETERS),
            ],
        )
    return told


def broken(kind: Any) -> Any:
    """Sampling parameters that are no JSON."""
    tensor = kind.InferInput("sampling_parameters", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"{max_tokens"], np.object_))
    return tensor


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
