"""A router of a few lines that repeats each prompt: what a front end needs, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import Cancelled, CannotFlip, InternalBug, Unavailable, UnknownRequest, UnknownWorker
from pdserve.core.ids import Incarnation, RequestId, WorkerId
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from router.api.answer import Delta, Generation
from router.api.explanation import Explanation
from router.api.identity import KEY_BYTES, CancelTokens, ClientNames
from router.api.request import DetokenizeInput, GenerateInput, TokenizeInput
from router.api.router_api import AdminApi, Archive, ModelInfo, RouterApi

WORKER = WorkerSnapshot(
    WorkerHello(
        worker_id=WorkerId("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), address="h:1", model_fingerprint="f",
        block_size=16, num_blocks=10, max_model_len=101, max_num_seqs=1, dtype="float32", kv_bytes_per_token=4, pid=1,
    ),
    WorkerLoad(BlockCounts(10, 10, 0, 0, 0)),
    heartbeat_age_s=0.1,
    requests_placed=0,
)  # fmt: skip


class Echo:
    """Implements `Generation`: one delta for each character of the prompt. `gate` holds the end back."""

    def __init__(self, request_id: str, text: str, gate: asyncio.Event) -> None:
        self.request_id = request_id
        self.prompt_len = len(text)
        self.prompt_ids = tuple(map(ord, text))
        self.dropped: Cancelled | None = None
        self.cancelled = False
        self.closed = False
        self._text = text
        self._gate = gate
        self._done = False

    def on_stalled(self, callback: Callable[[], object]) -> None:
        """No client is ever dropped here."""

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """All deltas are left to the task."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for index, character in enumerate(self._text):
            last = index + 1 == len(self._text)
            if last:
                await self._gate.wait()
                self._done = True
                if self.cancelled:
                    raise Cancelled("cancelled by the client")
            yield Delta(index, (ord(character),), character, FinishReason.STOP if last else None)

    @property
    def report(self) -> Report:
        """The report of one echo."""
        if not self._done:
            raise InternalBug("no report before the end")
        return Report(Placement.COLOCATED, "requested", self.prompt_len, self.prompt_len, decode_worker="decode-0")

    def close(self) -> None:
        """Release nothing; note the call."""
        self.closed = True


class EchoRouter:
    """Implements `RouterApi` and `AdminApi`."""

    model_name = "echo"
    max_body_bytes = 1 << 20
    max_inflight_body_bytes = 1 << 22
    max_inflight_answer_bytes = 1 << 22
    max_deadline_s = 60.0
    default_deadline_s = 60.0
    max_prompt_tokens = 100
    not_ready_reason = ""
    streams = 1024

    def __init__(self) -> None:
        self.cancel_tokens = CancelTokens(Incarnation(1), bytes(KEY_BYTES))
        self.clients = ClientNames("address", bytes(KEY_BYTES))
        self.gate = asyncio.Event()
        self.gate.set()
        self.echoes: dict[str, Echo] = {}
        self.ready = True
        self.changed = asyncio.Event()
        self.workers: tuple[WorkerSnapshot, ...] = (WORKER,)

    async def submit(self, request: GenerateInput) -> Echo:
        """Start an echo."""
        request_id = RequestId(request.request_id or f"echo-{len(self.echoes)}")
        self.echoes[request_id] = Echo(request_id, str(request.prompt), self.gate)
        return self.echoes[request_id]

    def cancel(self, request_id: str) -> bool:
        """Cancel an echo that the gate holds back."""
        found = request_id in self.echoes
        if found:
            self.echoes[request_id].cancelled = True
            self.gate.set()
        return found

    async def tokenize(self, asked: TokenizeInput) -> tuple[int, ...]:
        """A token is a character."""
        return tuple(map(ord, str(asked.prompt)))

    async def detokenize(self, asked: DetokenizeInput) -> str:
        """Write the characters."""
        return "".join(map(chr, asked.ids))

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """A token is spelled as its character."""
        return list(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the character."""
        return chr(token_id).encode()

    def text_of(self, ids: Sequence[int], *, after: Sequence[int]) -> str:
        """Return the characters."""
        return "".join(map(chr, ids))

    async def next_ready(self, known: bool) -> bool:
        """Wait for a change that a test makes."""
        await self.changed.wait()
        self.changed.clear()
        return self.ready

    def model_info(self) -> ModelInfo:
        """Describe the echo."""
        return ModelInfo("echo", "EchoForNobody", 1 << 20, 101, 16, "float32", "float32", 4, (0,), False)

    async def tokenizer_files(self) -> Archive:
        """Have no files."""
        raise Unavailable("an echo has no tokenizer")

    def unenforced(self, request: GenerateInput) -> tuple[str, ...]:
        """All fields are enforced."""
        return ()

    def ignored_fields(self, endpoint: str, count: int) -> None:
        """Count nothing."""

    def connection_refused(self) -> None:
        """Count nothing."""

    async def metrics_page(self, *, per_worker: bool) -> bytes:
        """Return one metric, and one of the worker."""
        return b"echo_up 1\n" + b'echo_worker_up{worker="decode-0"} 1\n' * per_worker

    def snapshot(self) -> ClusterSnapshot:
        """Return a cluster of one worker."""
        return ClusterSnapshot(1, 0, 0, self.workers)

    def worker(self, worker_id: str) -> WorkerSnapshot | None:
        """Return the one worker."""
        return next((worker for worker in self.workers if worker.hello.worker_id == worker_id), None)

    async def explain(self, name: str) -> Explanation:
        """Keep no stories."""
        raise UnknownRequest(f"no story of {name!r} is kept", field="request_id")

    def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int = 0) -> None:
        """Know no worker."""
        raise UnknownWorker(f"{worker_ids[0]!r} is not linked to this router", field="worker_id")

    def flip(self, worker_id: str, role: Role, incarnation: int) -> None:
        """Know no worker that could change its role."""
        raise CannotFlip(f"{worker_id!r} only echoes", field="worker_id")

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        """Let the worker go at once."""
        if worker_id != WORKER.hello.worker_id:
            raise UnknownWorker(f"{worker_id!r} is not linked", field="worker_id")
        self.workers = ()


def conforms(router: EchoRouter, echo: Echo) -> tuple[RouterApi, AdminApi, Any]:
    """Let a type checker compare both with the interfaces."""
    generation: Generation = echo
    return router, router, generation
