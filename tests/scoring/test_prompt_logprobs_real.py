"""Scoring of prompts through real processes, as harnesses for evaluation ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pdserve.config import MIB, EngineConfig, RouterConfig
from testkit.processes import ProcessCluster
from testkit.told_worker import Hold

pytestmark = pytest.mark.cluster

MODEL = "tiny"
PROMPT = [(i * 37 + 11) % 250 + 3 for i in range(70)]
PLACEMENTS = ("disaggregated", "colocated")
BOUND_S = 60.0
ENGINE = EngineConfig(
    model="tiny", batch_invariant=True, kv_cache_memory=16 * MIB, max_num_batched_tokens=64, threads=1,
    max_model_len=256, step_timeout_s=600.0,
)  # fmt: skip
HELD = 100  # tokens: beyond the first chunk of a prompt and before its end


@pytest.fixture(scope="module")
def scoring_client() -> Iterator[openai.OpenAI]:
    with ProcessCluster(ENGINE, prefill=1, decode=1, router=RouterConfig(colocate_by_cost=False)) as running:
        url = f"http://{running.http}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=BOUND_S) as client:
            yield client


def test_an_echoed_answer_scores_as_it_was_drawn(scoring_client: openai.OpenAI) -> None:
    """(1) An answer is drawn with log-probabilities. (2) Prompt and answer are echoed, as a harness does, in both placements,
    streamed and whole. The scores of the answer's part are the same numbers each time, and so are those of the prompt's."""
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 1}
    drawn = scoring_client.completions.create(
        **fields, prompt=PROMPT, max_tokens=12, extra_body={"ignore_eos": True, "return_token_ids": False}
    )
    told = drawn.choices[0].logprobs
    assert told is not None
    ids = drawn_ids(scoring_client, drawn.choices[0].text, told.tokens)
    seen: list[tuple[Any, Any]] = []
    for placement in PLACEMENTS:
        for stream in (False, True):
            body = {"placement": placement}
            got = scoring_client.completions.create(
                **fields, prompt=PROMPT + ids, max_tokens=1, echo=True, stream=stream, extra_body=body
            )
            parts = [chunk.choices[0].logprobs for chunk in got if chunk.choices] if stream else [got.choices[0].logprobs]
            values = [value for part in parts if part for value in part.token_logprobs]
            tops = [top for part in parts if part for top in part.top_logprobs]
            seen.append((values, tops))
    assert all(one == seen[0] for one in seen)
    values, tops = seen[0]
    assert values[0] is None
    assert len(values) == len(PROMPT) + len(ids) + 1
    assert values[len(PROMPT) : -1] == told.token_logprobs
    assert tops[len(PROMPT) : -1] == told.top_logprobs


def drawn_ids(client: openai.OpenAI, text: str, tokens: list[str] | None) -> list[int]:
    """Return the ids of an answer, which `prompt_logprobs` of its greedy text cannot tell apart: each is the likeliest one."""
    ids: list[int] = []
    for _ in tokens or ():
        got = client.completions.create(
            model=MODEL, prompt=PROMPT + ids + [0], max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 1}
        )
        last = got.choices[0].model_extra["prompt_logprobs"][-1]
        ids.append(next(int(key) for key, one in last.items() if one.get("rank") == 1))
    return ids


def test_prompt_logprobs_are_the_same_in_either_placement(scoring_client: openai.OpenAI) -> None:
    """The chat endpoint has them too. A scored prompt finds no cached blocks, so asking twice tells the same."""
    for ask in (
        lambda body: scoring_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, extra_body=body),
        lambda body: scoring_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=2, extra_body=body
        ),
    ):
        told = [
            ask({"placement": placement, "prompt_logprobs": 2, "seed": 1}).choices[0].model_extra["prompt_logprobs"]
            for placement in PLACEMENTS * 2
        ]
        assert told[0][0] is None
        assert all(2 <= len(one) <= 3 for one in told[0][1:])
        assert all(one == told[0] for one in told)


def test_an_echo_alone_draws_nothing_that_shows(scoring_client: openai.OpenAI) -> None:
    got = scoring_client.completions.create(model=MODEL, prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert got.choices[0].text == "Hello"
    assert got.usage is not None
    assert got.usage.completion_tokens == 0
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.token_logprobs is not None
    assert len(got.choices[0].logprobs.token_logprobs) == got.usage.prompt_tokens


@pytest.mark.slow
def test_a_prompt_whose_worker_dies_scores_as_if_nothing_had_happened(tmp_path_factory: pytest.TempPathFactory) -> None:
    """(1) The prefill worker is held in the middle of the prompt, and killed. (2) The prompt is computed again elsewhere, and
    scores as an undisturbed one."""
    hold = Hold(tmp_path_factory.mktemp("hold"))
    body = {"prompt_logprobs": 3}
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT * 3, "max_tokens": 2, "temperature": 0, "extra_body": body}
    router = RouterConfig(colocate_by_cost=False)
    with ProcessCluster(ENGINE, prefill=1, decode=1, router=router, places=hold.places("prefill-0")) as cluster:
        url = f"http://{cluster.http}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=BOUND_S) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            expected = client.completions.create(**fields).choices[0]
            with hold.at(HELD):
                running = pool.submit(client.completions.create, **fields)
                cluster.wait_state(lambda state: any(w.load.leases_held for w in state.workers), BOUND_S)
                cluster.processes["prefill-0"].popen.kill()
                cluster.processes["prefill-0"].stop()
            got = running.result(BOUND_S)
    assert got.model_extra["pdserve"]["attempts"] >= 2
    assert len(expected.model_extra["prompt_logprobs"]) == len(PROMPT) * 3
    assert got.choices[0].model_extra["prompt_logprobs"] == expected.model_extra["prompt_logprobs"]
    assert got.choices[0].text == expected.text
