"""A model that calls tools reliably, which no small model does: it reads the chat and answers its request.

The router is real, and so are its parsers, its grammars and its wire formats. Workers of tests stand for the model.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.clients.client import Server
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, RouterConfig, RouterProcessConfig
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.core.worker import CONSTRAINT_LINK_VERSION
from pdserve.rpc.codec import constraint_from_wire
from pdserve.rpc.v1 import common_pb2, decode_pb2, prefill_pb2
from router.service.model import ServedModel
from testkit.fake_worker import DECODE, PREFILL, FakeWorker, _Sequence
from testkit.processes import Process

MODEL: Final = "default"
TEXT: Final = "It is sunny."
PERSON: Final = '{"name": "Bob", "mood": "happy"}'
FINAL: Final = "final_answer"
"""The tool by which some agents take their answer."""
PIECE_CHARS: Final = 5
_TEMPLATE: Final = '{# tool_calls #}{{ {"messages": messages, "tools": tools} | tojson }}'
"""The whole chat as JSON, so that the workers can read it back from the prompt."""
_ANSWER: Final = re.compile(r"^answer: %json (.*)$", re.MULTILINE)


def answer(prompt: str, constraint: Constraint | None) -> str:
    """Return the model's output for a prompt: calls of all tools at first, and the answer once a result is there."""
    try:
        chat = json.loads(prompt)
    except ValueError:
        return TEXT
    last = chat["messages"][-1]
    done = last["role"] == "tool" or "Observation:" in (last["content"] or "")
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in chat["tools"] or ()}
    wanted = {name: schema for name, schema in tools.items() if (name == FINAL) == done} or tools
    kind = None if constraint is None else constraint.kind
    if constraint is not None and kind is ConstraintKind.JSON_SCHEMA:
        schema = json.loads(constraint.text)
        return json.dumps(calls(wanted, "parameters") if schema["type"] == "array" else example_of(schema, schema))
    if tools and not done:
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls(wanted, "arguments"))
    if constraint is not None and kind is ConstraintKind.LARK:
        found = _ANSWER.search(constraint.text)
        if found is not None:
            schema = json.loads(found[1])
            return json.dumps(example_of(schema, schema))
    return PERSON if kind is ConstraintKind.JSON_OBJECT else TEXT


def calls(tools: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return one call of each tool."""
    return [{"name": name, key: example_of({"type": "object", **schema}, schema)} for name, schema in tools.items()]


def example_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return a small value that a schema of a client takes."""
    if (target := schema.get("$ref")) is not None:
        found: Any = root
        for part in target.removeprefix("#/").split("/"):
            found = found[part]
        return example_of(found, root)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return example_of(schema[key][0], root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return {name: example_of(inner, root) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [example_of(schema.get("items", {}), root)]
    return {"string": "Oslo", "integer": 1, "number": 1.5, "boolean": True, "null": None}[kind]


class Speaker(FakeWorker):
    """A worker whose outputs are the outputs of `answer`."""

    def __init__(self, model: ServedModel, role: common_pb2.Role, link: str, token: str) -> None:
        super().__init__(
            role,
            link,
            cluster_token=token,
            model_fingerprint=model.card.fingerprint,
            max_model_len=model.max_model_len,
            link_version=CONSTRAINT_LINK_VERSION,
        )
        self._tokenizer = model.tokenizer
        self._said: dict[int, str] = {}

    def _bind(self, bind: decode_pb2.Bind) -> None:
        self._listen(bind)
        super()._bind(bind)

    def _prefill(self, prefill: prefill_pb2.Prefill) -> None:
        self._listen(prefill)
        super()._prefill(prefill)

    def _listen(self, command: decode_pb2.Bind | prefill_pb2.Prefill) -> None:
        spec = command.spec
        constraint = constraint_from_wire(spec.constraint) if spec.HasField("constraint") else None
        prompt = self._tokenizer.decode(_Sequence.of(command, runs=True).prompt_ids, skip_special_tokens=False)
        self._said[command.handle] = answer(prompt, constraint)

    def _draw(self, sequence: _Sequence, index: int) -> tuple[int, str, common_pb2.FinishReason]:
        said = self._said[sequence.handle]
        self.script = [said[at : at + PIECE_CHARS] for at in range(0, len(said), PIECE_CHARS)]
        token_id, text, finish = super()._draw(sequence, index)
        if finish == common_pb2.FINISH_REASON_UNSPECIFIED and index + 1 >= sequence.sampling.max_tokens:
            finish = common_pb2.FINISH_REASON_LENGTH
        return token_id, text, finish


@contextmanager
def speaking_server() -> Iterator[Server]:
    """A real router, and one worker of each pool that speaks. All end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        template, token = Path(folder) / "chat.jinja", secrets.token_hex(16)
        template.write_text(_TEMPLATE)
        router = RouterConfig(
            http_port=0,
            grpc_port=0,
            link_port=0,
            admin_port=0,
            metrics_port=0,
            probe_workers=False,
            chat_template=str(template),
            tool_call_parser="hermes",
        )
        engine = EngineConfig(model=MODEL, served_model_name="model")
        process = Process("router", RouterProcessConfig(router, engine, token), Path(folder), "router")
        joined, ends = threading.Event(), threading.Event()
        try:
            process.wait_ready()
            told = process.ready
            speaking = partial(_speak, ServedModel.load(engine), told["link"], token, joined, ends)
            thread = threading.Thread(target=lambda: asyncio.run(speaking()))
            thread.start()
            try:
                if not joined.wait(60.0):
                    raise RuntimeError(f"the workers did not join: {process.log()[-3000:]}")
                yield Server(f"http://{told['http']}", told["grpc"], "model", resolve(MODEL))
            finally:
                ends.set()
                thread.join()
        finally:
            process.stop()


async def _speak(model: ServedModel, link: str, token: str, joined: threading.Event, ends: threading.Event) -> None:
    async with AsyncExitStack() as stack:
        for role in (PREFILL, DECODE):
            await stack.enter_async_context(Speaker(model, role, link, token))
        joined.set()
        await asyncio.to_thread(ends.wait)
