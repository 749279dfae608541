"""A router in a few lines, for tests of the HTTP front end alone: it checks sampling as the real one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from starlette.applications import Starlette

from pdserve.config import RouterConfig
from pdserve.core.errors import InternalBug, InvalidRequest, PdserveError, UnknownModel
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement, SamplingParams, TokenLogprobs
from router.api.answer import Delta
from router.api.identity import ClientNames
from router.api.request import ChatPrompt, DetokenizeInput, GenerateInput, TokenizeInput
from router.api.router_api import ModelInfo
from router.http import build_app, serve_http
from router.http.reply import RunningCalls
from router.parsing.parser import RequestParser

MODEL = "org/tiny"
WORDS = ("Hal", "lo ", "wör", "ld", " 世界", "!\n", '"quoted"', "\u2028", "end")


class FakeGeneration:
    """Yields words; `fail_at` n raises `error` before word n; a cleared `gate` holds the next word back."""

    def __init__(self, api: FakeApi, request: GenerateInput) -> None:
        self.request_id = request.request_id or "made-by-router"
        parts = request.prompt.messages if isinstance(request.prompt, ChatPrompt) else request.prompt
        self.prompt_len = max(1, len(parts))
        self.prompt_ids = tuple(range(self.prompt_len))
        self.closed = False
        self.finished = False
        self.failed = False
        self._api = api
        self._words = api.words[: request.sampling.get("max_tokens", len(api.words))]
        self._logprobs = request.sampling.get("logprobs")
        self._scores = request.sampling.get("prompt_logprobs")

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._run()

    async def _run(self) -> AsyncIterator[Delta]:
        for i, word in enumerate(self._words):
            await self._api.gate.wait()
            if self._api.error is not None and i == self._api.fail_at:
                self.failed = True
                raise self._api.error
            last = i + 1 == len(self._words) and self._api.finishes
            self.finished = last
            scores = () if i or self._scores is None else [self._scored(at) for at in range(1, self.prompt_len)]
            reason = self._api.finish_reason if last else None
            yield Delta(i, (i,), word, reason, self._told(i), prompt_logprobs=tuple(scores))
            await asyncio.sleep(0)

    def _told(self, i: int) -> tuple[TokenLogprobs, ...]:
        """Token i is drawn with -i - 0.5; the likeliest are those that follow it in the vocabulary."""
        if self._logprobs is None:
            return ()
        return (TokenLogprobs(-i - 0.5, tuple((i + 1 + rank, -float(rank)) for rank in range(self._logprobs))),)

    def _scored(self, at: int) -> TokenLogprobs:
        return TokenLogprobs(-at - 0.25, tuple((at + rank, -at - 0.25 - rank) for rank in range(self._scores or 0)))

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """All deltas are left to the task."""

    @property
    def report(self) -> Report:
        if not (self.finished or self.failed):
            raise InternalBug("no report before the end")
        return Report(
            Placement.DISAGGREGATED, "auto", self.prompt_len, len(self._words), "prefill-0", "decode-0", kv_bytes=4096
        )

    def close(self) -> None:
        self.closed = True
        self._api.closed.set()


@dataclass
class FakeApi:
    model_name: str = MODEL
    max_body_bytes: int = 1 << 20
    ready: bool = True
    words: tuple[str, ...] = WORDS
    error: PdserveError | BaseException | None = None
    fail_at: int | None = None  # None: submit raises
    finishes: bool = True
    finish_reason: FinishReason = FinishReason.LENGTH
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerateInput] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    parser: RequestParser = field(default_factory=lambda: RequestParser(8 << 20))
    max_prompt_tokens: int = 4095
    max_deadline_s: float = 600.0
    ignored: dict[str, int] = field(default_factory=dict)
    default_deadline_s: float = 60.0
    clients: ClientNames = field(default_factory=lambda: ClientNames("address", bytes(32)))

    def __post_init__(self) -> None:
        self.gate.set()

    async def submit(self, request: GenerateInput) -> FakeGeneration:
        await asyncio.sleep(0)
        self._check_model(request.model)
        assert set(request.sampling) <= {f.name for f in fields(SamplingParams)}
        biases = tuple(request.sampling.get("logit_bias", {}).items())
        SamplingParams(**{"max_tokens": 4096, **request.sampling, "logit_bias": biases})
        if not -100 <= request.options.get("priority", 0) <= 100:
            raise InvalidRequest("priority: must be from -100 to 100", field="priority")
        if self.error is not None and self.fail_at is None:
            raise self.error
        self.requests.append(request)
        self.generations.append(FakeGeneration(self, request))
        self.submitted.set()
        return self.generations[-1]

    def cancel(self, request_id: str) -> bool:
        return False

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            raise UnknownModel(f"model: {name!r} is not served", field="model")

    async def tokenize(self, asked: TokenizeInput) -> tuple[int, ...]:
        self._check_model(asked.model)
        return (*([1] if asked.add_special_tokens else []), *map(ord, str(asked.prompt)))

    async def detokenize(self, asked: DetokenizeInput) -> str:
        self._check_model(asked.model)
        return "".join(map(chr, asked.ids))

    def spellings(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Words are tokens; after them come half a character, and ids of no token."""
        if token_id < len(self.words):
            return self.words[token_id].encode()
        return "ö".encode()[:1] if token_id == len(self.words) else b""

    def text_of(self, ids: Sequence[int], *, after: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    @property
    def not_ready_reason(self) -> str:
        return "" if self.ready else "no decode worker is ready"

    def model_info(self) -> ModelInfo:
        return ModelInfo(self.model_name, "Fake", 1000, 64, 16, "float32", "float32", 4, (0,), False)

    def unenforced(self, request: GenerateInput) -> tuple[str, ...]:
        """All fields are enforced."""
        return ()

    def ignored_fields(self, endpoint: str, count: int) -> None:
        self.ignored[endpoint] = self.ignored.get(endpoint, 0) + count

    streams = 1024

    def connection_refused(self) -> None:
        self.refused_connections = getattr(self, "refused_connections", 0) + 1

    async def metrics_page(self, *, per_worker: bool) -> bytes:
        return b"# HELP pdserve_up 1 while it serves\npdserve_up 1\n" + b'pdserve_worker_up{worker="w"} 1\n' * per_worker


def app_of(api: FakeApi) -> Starlette:
    """The application alone, as `protocol_post` calls it."""
    return build_app(api, api.parser, RunningCalls(), RouterConfig())


@asynccontextmanager
async def served(api: FakeApi, **limits: Any) -> AsyncIterator[str]:
    """A real socket for the fake router; nothing of it may be left afterwards."""
    server = await serve_http(api, api.parser, "127.0.0.1", 0, RouterConfig(**limits))
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await asyncio.wait_for(server.close(), 30)
        api.parser.close()
    assert all(generation.closed for generation in api.generations)
