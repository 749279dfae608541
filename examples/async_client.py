"""Several requests at once to a running cluster, streamed as they come.

python examples/async_client.py [--address 127.0.0.1:50051] PROMPT ...
"""

import argparse
import asyncio
import sys

from pdserve import AsyncClient, Retries, SamplingParams
from pdserve.core.errors import PdserveError


async def follow(client: AsyncClient, prompt: str, params: SamplingParams) -> None:
    """Print one answer with its timeline."""
    pieces = []
    async for delta in client.stream(prompt, params):
        pieces.append(delta.text)
        if delta.report is not None:
            served = f"{delta.report.prefill_worker or 'colocated'} -> {delta.report.decode_worker}"
            print(f"{prompt!r} + {''.join(pieces)!r} [{delta.output_tokens} tokens, {served}]")


async def main() -> None:
    """Send all prompts at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompts", nargs="*", default=["The sky is", "The sea is"])
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.max_tokens)
    async with AsyncClient(options.address, retries=Retries(2)) as client:
        await asyncio.gather(*[follow(client, prompt, params) for prompt in options.prompts])


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PdserveError as error:
        sys.exit(f"failed: {error}")
