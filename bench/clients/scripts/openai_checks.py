"""The openai package against a server: each line of the output is one check and its result.

python openai_checks.py URL MODEL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

YEAR = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "year": YEAR},
    "required": ["city", "year"], "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}]
ASK: Any = [{"role": "user", "content": "Name a city."}]
ENOUGH = 1000
"""Tokens for JSON of the schema, also of a model that writes all the blanks that a grammar allows."""


class Checks:
    """The checks, each with the number of requests that it makes."""

    def __init__(self, url: str, model: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.same: dict[str, Any] = {"model": model, "temperature": 0.0}

    def models(self) -> int:
        """The model is listed."""
        assert self.same["model"] in [one.id for one in self.client.models.list()]
        return 1

    def streams(self) -> int:
        """A streamed completion and chat equal the unstreamed answers, and usage is reported."""
        whole = self.client.completions.create(prompt="The sky is", max_tokens=12, **self.same)
        parts = self.client.completions.create(prompt="The sky is", max_tokens=12, stream=True, **self.same)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        chat = self.client.chat.completions.create(messages=ASK, max_tokens=12, **self.same)
        told = list(
            self.client.chat.completions.create(
                messages=ASK, max_tokens=12, stream=True, stream_options={"include_usage": True}, **self.same
            )
        )
        text = "".join(part.choices[0].delta.content or "" for part in told if part.choices)
        assert text == chat.choices[0].message.content
        assert told[-1].usage == chat.usage
        return 4

    def choices(self) -> int:
        """Choice i of n equals the request with the seed plus i."""
        named = {**self.same, "temperature": 1.0, "max_tokens": 8, "prompt": "Once", "logprobs": 2}
        several = self.client.completions.create(n=3, seed=5, **named).choices
        alone = [self.client.completions.create(seed=5 + i, **named).choices[0] for i in range(3)]
        assert [one.text for one in several] == [one.text for one in alone]
        assert [one.logprobs for one in several] == [one.logprobs for one in alone]
        return 4

    def echo(self) -> int:
        """A prompt is echoed with its log-probabilities."""
        told = self.client.completions.create(prompt="The sky is blue", echo=True, logprobs=1, max_tokens=1, **self.same)
        assert told.choices[0].text.startswith("The sky is blue")
        assert told.choices[0].logprobs.token_logprobs[0] is None
        return 1

    def structured(self) -> int:
        """An answer with a schema is valid."""
        form: Any = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA}}
        told = self.client.chat.completions.create(messages=ASK, max_tokens=ENOUGH, response_format=form, **self.same)
        assert json.loads(told.choices[0].message.content)["city"] in ("Paris", "Rome")
        return 1

    def tools(self) -> int:
        """A required call has valid arguments, or a template without tools says so."""
        try:
            told = self.client.chat.completions.create(
                messages=ASK, max_tokens=ENOUGH, tools=TOOLS, tool_choice="required", **self.same
            )
        except openai.BadRequestError as exc:
            if "tools" not in str(exc):
                raise
            return 1
        assert json.loads(told.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
        return 1

    def responses(self) -> int:
        """A response equals the chat, whole and streamed."""
        chat = self.client.chat.completions.create(messages=ASK, max_tokens=12, **self.same)
        told = self.client.responses.create(input="Name a city.", max_output_tokens=12, **self.same)
        assert told.output_text == chat.choices[0].message.content
        with self.client.responses.stream(input="Name a city.", max_output_tokens=12, **self.same) as stream:
            text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
        assert text == told.output_text
        return 3

    def refusals(self) -> int:
        """The right error refuses a request for something that is not there."""
        for wrong, call in (
            (openai.NotFoundError, lambda: self.client.embeddings.create(model="x", input="a")),
            (openai.BadRequestError, lambda: self.client.completions.create(prompt="a", n=0, **self.same)),
        ):
            try:
                call()
            except wrong:
                continue
            raise AssertionError(wrong.__name__)
        return 2


def main() -> None:
    """Run all checks and print them as JSON."""
    checks = Checks(*sys.argv[1:3])
    ways: list[Callable[[], int]] = [
        checks.models, checks.streams, checks.choices, checks.echo, checks.structured, checks.tools, checks.responses,
        checks.refusals,
    ]  # fmt: skip
    done, wrong, requests = [], [], 0
    for way in ways:
        try:
            requests += way()
            done.append(way.__name__)
        except (openai.OpenAIError, AssertionError, AttributeError, TypeError, ValueError) as exc:
            requests += 1
            wrong.append(f"{way.__name__}: {type(exc).__name__}: {exc}")
    print(json.dumps({"requests": requests, "wrong": wrong, "done": done}))


if __name__ == "__main__":
    main()
