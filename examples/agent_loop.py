"""Let the model call functions of this file until it answers without a call.

pdserve up --chat-template examples/tools.jinja
python examples/agent_loop.py --base-url http://127.0.0.1:8000/v1 "What is 17 times 23?"

In the first turn `tool_choice` demands a call, because a small model would answer without one. A large model does not need it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import openai

NUMBERS = {"type": "object", "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in "ab"}}
FUNCTIONS: dict[str, Callable[..., int]] = {"add": lambda a=0, b=0: a + b, "multiply": lambda a=0, b=0: a * b}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name} a and b", "parameters": {**NUMBERS, "required": ["a", "b"]}},
    }
    for name in FUNCTIONS
]
MAX_TURNS = 4


def answer(client: openai.OpenAI, question: str) -> str:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        choice: Any = "auto" if turn else "required"
        made = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_completion_tokens=200, temperature=0
        )
        message = made.choices[0].message
        if made.choices[0].finish_reason != "tool_calls":
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return "no answer"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is 17 times 23?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args(argv)
    try:
        with openai.OpenAI(base_url=args.base_url, api_key="unused", timeout=120) as client:
            print(answer(client, args.question))
    except openai.OpenAIError as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
