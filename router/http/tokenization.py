"""The endpoints `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from pdserve.rpc.status import CORRELATION_ID_METADATA
from router.api.request import DetokenizeInput, TokenizeInput
from router.api.router_api import RouterApi
from router.http.reply import Exchange, Reply, RunningCalls, client_of, errors_told, exchange_of, header, read_body
from router.openai.json import encode_json
from router.parsing.parser import BodyBudget, Job, JobKind, RequestParser

PIECE_IDS: Final = 8192
"""So many ids are written between two turns of the loop: about 3 ms with their spellings. A body has room for two million."""


class Tokenization:
    """An ASGI endpoint between text and token ids."""

    def __init__(self, api: RouterApi, parser: RequestParser, running: RunningCalls, budget: BodyBudget, kind: JobKind) -> None:
        self._api = api
        self._parser = parser
        self._running = running
        self._budget = budget
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        reply = Reply(exchange)
        reply.correlate(header(scope, CORRELATION_ID_METADATA))
        async with errors_told(scope, receive, reply):
            await reply.encoded(200, await self._answer(scope, receive, exchange))

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> bytes:
        with self._budget.share() as share:
            body = await read_body(scope, receive, exchange, self._api.max_body_bytes, share)
            return await self._running.run(exchange, self._made(body, client_of(scope, self._api.clients)))

    async def _made(self, body: bytes, client: tuple[str, ...]) -> bytes:
        asked = await self._parser.parse(Job(self._kind, body, self._api.max_prompt_tokens, client=client))
        if isinstance(asked, DetokenizeInput):
            return encode_json({"prompt": await self._api.detokenize(replace(asked, client=client))})
        assert isinstance(asked, TokenizeInput)
        ids = await self._api.tokenize(replace(asked, client=client))
        tokens = await _listed(ids, list)
        spellings = await _listed(ids, self._api.spellings) if asked.with_spellings else b"null"
        told = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}'
        return told % (len(ids), self._api.max_prompt_tokens + 1, tokens, spellings)


async def _listed(ids: tuple[int, ...], made: Callable[[Sequence[int]], list[Any]]) -> bytes:
    """Return what is made of ids as a JSON list."""
    pieces = []
    for start in range(0, len(ids), PIECE_IDS):
        if start:
            await asyncio.sleep(0)
        pieces.append(encode_json(made(ids[start : start + PIECE_IDS]))[1:-1])
    return b"[%b]" % b",".join(pieces)
