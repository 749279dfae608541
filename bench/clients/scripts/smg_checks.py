"""The answers of a gateway against those of the router behind it, which computes both.

python smg_checks.py SMG_URL ROUTER_URL MODEL
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import openai

START_S = 60.0
ANSWER_S = 30.0
"""A gateway that answers nothing for so long will not. The client's own limit is ten minutes."""
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
SAMPLED: dict[str, Any] = {
    "temperature": 0.75, "seed": 1, "frequency_penalty": 0.5, "presence_penalty": 0.25,
    "extra_body": {"repetition_penalty": 1.25, "top_k": 20, "min_p": 0.03125, "ignore_eos": True},
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0}
COMPLETIONS: Mapping[str, dict[str, Any]] = {
    "completion": {"max_tokens": 12, **GREEDY},
    "sampling": {"max_tokens": 24, **SAMPLED},
    "choices": {"max_tokens": 12, "seed": 5, "n": 3},
    "stop string": {"max_tokens": 40, "stop": [" the"], **GREEDY},
    "regex": {"max_tokens": 8, "extra_body": {"regex": "(yes|no)", "structured_outputs": {"regex": "(yes|no)"}}, **GREEDY},
}
CHATS: Mapping[str, dict[str, Any]] = {
    "chat": {"max_completion_tokens": 24, **GREEDY},
    "chat with choices": {"max_completion_tokens": 24, "seed": 7, "n": 2},
    "log-probabilities": {"max_completion_tokens": 4, "logprobs": True, "top_logprobs": 3, **GREEDY},
    "schema": {
        "max_completion_tokens": 1000, **GREEDY,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
}  # fmt: skip
ASK: Any = [{"role": "user", "content": "Name a city."}]


def completion(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> Any:
    """Return the texts, the reasons and the usage of a completion."""
    told = client.completions.create(model=model, prompt="The sky is", **fields)
    assert told.usage is not None
    return [(one.text, one.finish_reason) for one in told.choices], told.usage.total_tokens


def chat(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> Any:
    """Return the texts, the reasons, the log-probabilities and the usage of a chat."""
    told = client.chat.completions.create(model=model, messages=ASK, **fields)
    assert told.usage is not None
    return [(one.message.content, one.finish_reason, scores(one.logprobs)) for one in told.choices], told.usage.total_tokens


def scores(logprobs: Any) -> Any:
    """Return the log-probabilities of a choice, to three digits: a gateway writes fewer than the router."""
    if logprobs is None:
        return None
    return [
        (one.token, round(one.logprob, 3), [(t.token, round(t.logprob, 3)) for t in one.top_logprobs])
        for one in logprobs.content
    ]


def stream(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> Any:
    """Return the text, the reason and the usage of a streamed chat."""
    options: Any = {"include_usage": True}
    parts = list(client.chat.completions.create(model=model, messages=ASK, stream=True, stream_options=options, **fields))
    choices = [one for part in parts for one in part.choices]
    text = "".join(one.delta.content or "" for one in choices)
    usage = next(part.usage for part in parts if part.usage)
    return text, [one.finish_reason for one in choices if one.finish_reason], usage.total_tokens


def refusal(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> Any:
    """Return the status of a request that must be refused, and whether the field is named."""
    try:
        client.completions.create(model=model, prompt="a", **fields)
    except openai.APIStatusError as exc:
        return exc.status_code, "max_model_len" in str(exc)
    raise AssertionError("it was served")


def leave(client: openai.OpenAI, model: str) -> None:
    """Leave a long answer at its first chunk. The cluster must be empty at the end of the run."""
    body = {"ignore_eos": True}
    with client.chat.completions.create(
        model=model, messages=ASK, max_completion_tokens=2000, stream=True, extra_body=body
    ) as parts:
        next(iter(parts))


def wait_served(client: openai.OpenAI, model: str) -> None:
    """Wait until the gateway serves, which it does once it has asked the router for the model and its tokenizer. Raises its
    last error after `START_S`."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        try:
            client.completions.create(model=model, prompt="a", max_tokens=1)
        except openai.OpenAIError:
            time.sleep(0.1)
        else:
            return
    client.completions.create(model=model, prompt="a", max_tokens=1)


def main() -> None:
    """Run all checks and print them as JSON."""
    smg, router = [
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S) for url in sys.argv[1:3]
    ]
    model = sys.argv[3]
    wait_served(smg, model)
    table: list[tuple[str, Callable[[openai.OpenAI, str, dict[str, Any]], Any], dict[str, Any]]] = [
        *((name, completion, fields) for name, fields in COMPLETIONS.items()),
        *((name, chat, fields) for name, fields in CHATS.items()),
        ("stream", stream, {"max_completion_tokens": 24, **GREEDY}),
        ("refusal", refusal, {"max_tokens": 100_000}),
    ]
    done, wrong = [], []
    for name, ask, fields in table:
        try:
            got, want = ask(smg, model, fields), ask(router, model, fields)
            if got != want:
                raise AssertionError(f"{got} is not {want}")
            done.append(name)
        except (openai.OpenAIError, AssertionError, AttributeError, TypeError, ValueError) as exc:
            wrong.append(f"{name}: {type(exc).__name__}: {exc}")
    leave(smg, model)
    print(json.dumps({"requests": len(table) + 2, "wrong": wrong, "done": done}))


if __name__ == "__main__":
    main()
