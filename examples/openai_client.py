"""Talk to pdserve with the public openai client: list the models, stream one chat, and print how it was served.

python examples/openai_client.py --base-url http://127.0.0.1:8000/v1 "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import openai

TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue? Answer in one sentence.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args(argv)
    try:
        with openai.OpenAI(base_url=args.base_url, api_key="unused", timeout=TIMEOUT_S) as client:
            stream_chat(client, args.prompt, args.max_tokens)
    except openai.OpenAIError as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    return 0


def stream_chat(client: openai.OpenAI, prompt: str, max_tokens: int) -> None:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # this is the last chunk; `pdserve` is our extension of it
            served = (chunk.model_extra or {}).get("pdserve", {})
            print(f"\n[{model}: {chunk.usage.completion_tokens} tokens, {served.get('placement')}]")


if __name__ == "__main__":
    sys.exit(main())
