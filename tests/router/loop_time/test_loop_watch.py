"""No call of a client holds the router's loop for long, since the tokens of all others stand still meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import string
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from pdserve.core.worker import LINK_VERSIONS
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer
from router.http import serve_http
from testkit.loop_watch import watched_loop
from tests.router.local_cluster import HOST, local_cluster, tiny_model

HELD_S: Final = 0.05
"""Nothing may hold the loop for longer: it is one or two steps of a decode worker. Calls stay below a third of it on an idle
machine, and what they did before was 80 to 500 ms. It is CPU time of the loop's thread, so other load changes little."""
BOUND_S: Final = 120.0
MODEL_LEN: Final = 65_536
TEMPLATE: Final = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}Write <tool_call>.{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages[::-1] %}{% if m.role == "user" and m.content is string and not m.content.startswith("<tool") %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\n" + (m.content or "") | trim }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{{ "<|im_end|>\n" }}{% endfor %}"""
"""It looks at each message twice, as those of Qwen 3 do."""


def words(chars: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    text = " ".join("".join(rng.choices(string.ascii_lowercase, k=7)) for _ in range(min(2_000, chars // 8 + 1)))
    return (text * (chars // len(text) + 1))[:chars]


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def tools(count: int, **function: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema, **function}} for i in range(count)]


def calls(count: int) -> dict[str, Any]:
    one = {"type": "function", "function": {"name": "f", "arguments": '{"city":"Rome"}'}}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{i}", **one} for i in range(count)]}


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


HOSTILE: Final[dict[str, Callable[[], list[tuple[str, dict[str, Any]]]]]] = {
    "256 prompts": lambda: [(COMPLETIONS, {"prompt": [words(1500, i) for i in range(256)], "max_tokens": 1})],
    "4,096 empty messages": lambda: [(CHATS, {"messages": [{"role": "user", "content": ""}] * 4096, "max_tokens": 1})],
    "a history of 2,000 calls": lambda: [(CHATS, {"messages": [*chat()["messages"], *[calls(8)] * 250], "max_tokens": 1})],
    "n=128 with log-probabilities": lambda: [(CHATS, chat(n=128, max_tokens=8, logprobs=True, top_logprobs=20))],
    "a long answer with log-probabilities": lambda: [(CHATS, chat(max_tokens=500, logprobs=True, top_logprobs=20))],
    "n=64 with 128 strict tools": lambda: [(CHATS, chat(n=64, max_tokens=1, tools=tools(128, strict=True)))],
    "the ids and spellings of a long text": lambda: [("/tokenize", {"prompt": words(400_000), "return_token_strs": True})],
    "30 long prompts": lambda: [(COMPLETIONS, {"prompt": words(20_000, i), "max_tokens": 1}) for i in range(30)],
    "1,500 fields that are ignored": lambda: [(CHATS, chat(**{f"x{i}": [1] for i in range(1500)}))],
    "metrics": lambda: [("/metrics", {})],
}
"""The calls by what they are. They are made when they are sent, since the large ones take a while to make."""


async def status_of(port: int, path: str, body: dict[str, Any]) -> int:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        data = json.dumps(body).encode() if body else b""
        first = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        writer.write(f"{first}content-length: {len(data)}\r\n\r\n".encode() + data)
        return int((await reader.read())[9:12])
    finally:
        writer.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_no_call_holds_the_loop_while_others_wait_for_their_tokens(name: str) -> None:
    """256 prompts of 4,096 characters held it for 400 ms, 4,096 empty messages for 80, tools with n=128 for 200, and the
    spellings of two megabytes for 500."""

    async def story() -> None:
        tokenizer = Tokenizer(tiny_model().tokenizer._backend, ChatTemplate(TEMPLATE, {}))
        model = dataclasses.replace(tiny_model(), max_model_len=MODEL_LEN, tokenizer=tokenizer)
        pools = {"max_model_len": MODEL_LEN, "num_blocks": 2 * MODEL_LEN, "link_version": LINK_VERSIONS.newest}
        async with local_cluster(model=model, worker=lambda: pools, tool_call_parser="hermes") as cluster:
            server = await serve_http(cluster.service, cluster.parser, HOST, 0)
            with watched_loop() as watch:
                statuses = await asyncio.gather(*(status_of(server.port, *one) for one in HOSTILE[name]()))
            assert set(statuses) == {200}, statuses
            await server.close()
        assert watch.longest[0] <= HELD_S, watch.longest

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_the_watch_names_what_holds_the_loop() -> None:
    def busy() -> None:
        end_s = time.thread_time() + 1.2 * HELD_S
        while time.thread_time() < end_s:
            pass

    async def story() -> None:
        asyncio.get_running_loop().call_soon(busy)
        await asyncio.sleep(0)

    with watched_loop() as watch:
        asyncio.run(story())
    held_s, name = watch.longest
    assert held_s > HELD_S
    assert name.endswith("busy")
