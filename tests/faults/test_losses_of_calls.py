"""Workers die under calls of every kind of both APIs: each answer is that of an undisturbed cluster, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fault_service import APART, BOUND_S, ROUTER, WORKER, prompt, tiny
from grpc import insecure_channel

from pdserve import Client, Retries, SamplingParams
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.faults import Fault, strike
from testkit.processes import ProcessCluster, State

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COPIES = 4
TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "tools.jinja"
WORDS = {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "minItems": 30, "maxItems": 40}
SCHEMA = {"type": "object", "properties": {"words": WORDS}, "required": ["words"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}]


def totals(usage: Any) -> tuple[int, int]:
    """Return the counts that depend on nothing but the tokens."""
    return usage.prompt_tokens, usage.completion_tokens


class Calls:
    """The calls of one client of each API. Call number i has its own seed and prompt, and returns what its user sees."""

    def __init__(self, cluster: ProcessCluster, http: openai.OpenAI, grpc: Client) -> None:
        self._cluster, self._http, self._grpc = cluster, http, grpc

    def _chat(self, i: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{i} " + "word " * 60}]
        return {"model": "", "messages": messages, "seed": i, "extra_body": {"placement": "disaggregated"}}

    def _text(self, i: int) -> dict[str, Any]:
        return {
            "model": "",
            "prompt": prompt(300, i),
            "seed": i,
            "extra_body": {"placement": "disaggregated", "ignore_eos": True},
        }

    def streamed_choices(self, i: int) -> Any:
        texts, ends = ["", ""], [None, None]
        for part in self._http.completions.create(**self._text(i), n=2, max_tokens=96, stream=True):
            for one in part.choices:
                texts[one.index] += one.text
                ends[one.index] = one.finish_reason or ends[one.index]  # type: ignore[call-overload]
        return texts, ends

    def best(self, i: int) -> Any:
        told = self._http.completions.create(**self._text(i), n=1, best_of=3, max_tokens=96)
        return [(one.text, one.finish_reason) for one in told.choices], totals(told.usage)

    def echo(self, i: int) -> Any:
        told = self._http.completions.create(**self._text(i), echo=True, logprobs=3, max_tokens=96)
        return told.choices[0].text, told.choices[0].logprobs, told.choices[0].finish_reason, totals(told.usage)

    def beams(self, i: int) -> Any:
        asked = self._text(i)
        asked["extra_body"]["use_beam_search"] = True
        told = self._http.completions.create(**asked, n=2, max_tokens=8, temperature=0.0)
        return [(one.text, one.finish_reason) for one in told.choices], totals(told.usage)

    def streamed_call(self, i: int) -> Any:
        arguments, ends = "", None
        asked = {**self._chat(i), "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
        for part in self._http.chat.completions.create(**asked, stream=True):
            for piece in part.choices[0].delta.tool_calls or ():
                arguments += piece.function.arguments or ""
            ends = part.choices[0].finish_reason or ends
        return arguments, ends

    def schema(self, i: int) -> Any:
        form: Any = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA}}
        told = self._http.chat.completions.create(**self._chat(i), response_format=form, n=2, max_tokens=400)
        return [(one.message.content, one.finish_reason) for one in told.choices], totals(told.usage)

    def response(self, i: int) -> Any:
        body: Any = {"placement": "disaggregated", "seed": i}
        text, end = "", None
        for part in self._http.responses.create(
            model="", input=f"{i} " + "word " * 60, max_output_tokens=120, stream=True, extra_body=body
        ):
            text += part.delta if part.type == "response.output_text.delta" else ""
            end = part.type
        return text, end

    def batch(self, i: int) -> Any:
        with insecure_channel(self._cluster.grpc) as channel:
            asked = inference_pb2.GenerateBatchRequest()
            for j in range(3):
                one = asked.requests.add()
                one.tokens.ids.extend(prompt(200, 10 * i + j))
                one.sampling.max_tokens, one.sampling.seed, one.sampling.ignore_eos = 96, i, True
                one.placement = APART
            ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for part in inference_pb2_grpc.InferenceStub(channel).GenerateBatch(asked, timeout=BOUND_S * 3):
                assert not part.HasField("error"), part.error
                ids[part.index] += part.response.ids
            return ids

    def scored(self, i: int) -> Any:
        params = SamplingParams(max_tokens=200, seed=i, prompt_logprobs=1, logprobs=1, ignore_eos=True)
        (one,) = self._grpc.generate(prompt(300, i), params, placement="disaggregated").outputs
        return one.ids, one.logprobs, one.prompt_logprobs, one.finish_reason


KINDS: tuple[Callable[[Calls, int], Any], ...] = (
    Calls.streamed_choices, Calls.best, Calls.echo, Calls.beams, Calls.streamed_call, Calls.schema, Calls.response,
    Calls.batch, Calls.scored,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    router = replace(ROUTER, chat_template=str(TEMPLATE))
    with ProcessCluster(tiny(kv_cache_memory=16 << 20), prefill=2, decode=2, router=router, worker=WORKER) as running:
        yield running


@pytest.fixture(scope="module")
def calls(cluster: ProcessCluster) -> Iterator[Calls]:
    with (
        openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=3 * BOUND_S) as http,
        Client(cluster.grpc, retries=Retries(1)) as grpc,
    ):
        yield Calls(cluster, http, grpc)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_call_whose_workers_die_is_answered_as_if_nothing_had_happened(
    cluster: ProcessCluster, calls: Calls, kind: Callable[[Calls, int], Any]
) -> None:
    """(1) Answers of an undisturbed cluster; (2) the same calls, and a prefill and a decode worker die with work of theirs;
    (3) the same answers, and nothing is left."""
    cluster.heal()
    with ThreadPoolExecutor(COPIES) as pool:
        expected = list(pool.map(lambda i: kind(calls, i), range(COPIES)))
        running = [pool.submit(kind, calls, i) for i in range(COPIES)]
        for role in ("prefill-", "decode-"):
            seen = cluster.wait_state(
                lambda state, role=role: bool(working(state, role)) or all(one.done() for one in running), BOUND_S
            )
            assert working(seen, role), "they were over before a worker died"
            strike(Fault.KILL, cluster.processes[working(seen, role)[0]])
        assert [one.result(3 * BOUND_S) for one in running] == expected
    cluster.heal()
    cluster.assert_empty()


def working(state: State, role: str) -> list[str]:
    """Return the workers of a role that have blocks of requests. Which they are depends on who failed in an earlier case."""
    names = (worker.hello.worker_id for worker in state.workers if worker.load.blocks.held)
    return [name for name in names if name.startswith(role)]
