"""A worker without an engine. It speaks the real link protocol and computes its tokens with a formula.

It serves tests of the router and of the front ends, through real sockets, in one process. Token `i` of a prompt is
`token_at(prompt, i)`, so a test knows the whole answer in advance, whichever workers served it. Tests make it slow, make it
refuse or fail, or make it silent through its public attributes. `LightWorker` is one with a real worker's own end of the link.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc.aio

from pdserve.core.kv_layout import ceil_div
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.rpc.bundle import Outbound, unbundled
from pdserve.rpc.codec import drafts_to_fields, pack_ids, unpack_ids
from pdserve.rpc.status import CLUSTER_TOKEN_METADATA
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, link_pb2_grpc, prefill_pb2, story_pb2
from pdserve.worker.link import RouterLink

PREFILL = common_pb2.ROLE_PREFILL
DECODE = common_pb2.ROLE_DECODE

WAIT_S = 30.0  # for what takes milliseconds: only what hangs should fail
_MAX_OUTBOUND = 1 << 16
_LENGTH = common_pb2.FINISH_REASON_LENGTH
_STOP = common_pb2.FINISH_REASON_STOP
_UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


def token_at(prompt_ids: Iterable[int], index: int, vocab_size: int = 256) -> int:
    """Return output token `index` of a prompt. It is the same on every worker."""
    return zlib.crc32(pack_ids([*prompt_ids, index])) % vocab_size


def text_of_token(token_id: int) -> str:
    """Return the text of a token."""
    return f"t{token_id} "


def expected_text(prompt_ids: Iterable[int], count: int, vocab_size: int = 256) -> str:
    """Return the text of the first `count` output tokens."""
    ids = tuple(prompt_ids)
    return "".join(text_of_token(token_at(ids, index, vocab_size)) for index in range(count))


@dataclass(slots=True)
class _Sequence:
    handle: int
    prompt_ids: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    runs: bool  # False: it only holds blocks (a bind before its Attach, a lease after token 0)
    resumed: int = 0  # the number of ids that an earlier attempt drew
    next_index: int = 0
    attached: bool = False  # its KV comes from a prefill worker

    def __post_init__(self) -> None:
        self.next_index = self.resumed

    @classmethod
    def of(cls, command: decode_pb2.Bind | prefill_pb2.Prefill, *, runs: bool) -> _Sequence:
        ids, resumed = unpack_ids(command.spec.prompt_ids), len(unpack_ids(command.resumed_ids))
        return cls(command.handle, ids, command.spec.sampling, runs=runs, resumed=resumed)


def logprobs_at(index: int, sampling: common_pb2.SamplingParams) -> common_pb2.Logprobs | None:
    """Return log-probabilities that differ for each output index. None: the request asks for none."""
    if not sampling.HasField("logprobs"):
        return None
    count = sampling.logprobs
    return common_pb2.Logprobs(chosen=[-index - 0.5], top_ids=range(count), top=[-index - 0.25 * i for i in range(count)])


@dataclass(slots=True)
class FakeWorker:
    """`async with FakeWorker(DECODE, address) as worker:` dials the router and serves until it is left.

    It runs what it is sent while its blocks last, and answers NoRoom after that.
    """

    role: common_pb2.Role
    router_address: str
    worker_id: str = ""
    cluster_token: str = ""
    model_fingerprint: str = "fake"
    address: str = "127.0.0.1:1"
    pid: int = 1
    ticket: bytes = b"ticket"
    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = 64
    link_version: int = 0
    dtype: str = "bfloat16"
    quantization: str = ""
    numerics: str = "fake"
    kv_bytes_per_token: int = 1024
    vocab_size: int = 256
    incarnation: int = 1
    max_num_batched_tokens: int = 512
    step_timeout_s: float = 0.0
    heartbeat_interval_s: float = 1.0
    token_interval_s: float = 0.0  # pause after each step of all sequences
    eos_after: int | None = None  # the token with this number, counted from 1, ends the sequence
    text_of: Callable[[int], str] = text_of_token
    script: Sequence[str] = ()  # the texts of the outputs in order, in place of `text_of`; the last one ends the sequence

    # A test changes these while the worker runs.
    refuse_binds: int = 0  # the number of next binds that are answered with NoRoom
    fail_next: common_pb2.ErrorReason | None = None  # the next command fails with this reason
    fail_attach: common_pb2.ErrorReason | None = None  # each attach fails with this reason: it reads KV and draws nothing
    silent: bool = False  # the worker sends no heartbeats
    engine_stalled_s: float = 0.0  # the value in its heartbeats
    draining: bool = False  # it reports this in heartbeats and refuses new work; Drain sets it
    budget: int = 0  # the tokens of a step, after SetBudget; 0: as at the start
    seqs: int = 0  # the sequences that may run, likewise
    explains: bool = True  # it answers questions about requests
    drafts: DraftCounts | None = None  # the drafts that it tells of each request; None: it drafts nothing
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # while it is cleared, there are no tokens and no commits

    # A test reads these.
    commands: list[str] = field(default_factory=list)  # "bind", "prefill", "attach", "cancel", "drain", "set_budget", in order
    cancelled: list[int] = field(default_factory=list)  # handles that were live when cancelled
    drafted: DraftCounts = NO_COUNTS  # the drafts that it has told of requests, which its heartbeats tell as well
    draft_limits: list[int | None] = field(default_factory=list)  # of each bind and prefill, in order
    alive_seen: int = 0  # answers to heartbeats
    refused: grpc.aio.AioRpcError | None = None  # the error with which the router closed the link

    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _last_handle: int = 0
    _outbound: Outbound[link_pb2.WorkerMessage] = field(default_factory=lambda: Outbound(_MAX_OUTBOUND))
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    _channel: grpc.aio.Channel | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker_id = self.worker_id or ("prefill-0" if self.role == PREFILL else "decode-0")
        self.gate.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, *, timeout_s: float = WAIT_S) -> None:
        """Dial, and return when the router has said Welcome. Raises the router's refusal as `grpc.aio.AioRpcError`, or
        TimeoutError."""
        self._channel = grpc.aio.insecure_channel(self.router_address)
        stub: Any = link_pb2_grpc.WorkerLinkStub(self._channel)
        call = stub.Connect(metadata=((CLUSTER_TOKEN_METADATA, self.cluster_token),))
        self._outbound = Outbound(_MAX_OUTBOUND)
        self._send(hello=self._hello(), takes_bundles=True)
        jobs = (self._read(call), self._write(call), self._heartbeat(), self._step_loop())
        self._tasks = [asyncio.create_task(job) for job in jobs]
        welcomed = asyncio.create_task(self._welcomed.wait())
        try:
            await asyncio.wait((welcomed, self._tasks[0]), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            welcomed.cancel()
        if not self._welcomed.is_set():
            await self.stop()
            raise self.refused or TimeoutError("the router did not answer Hello")

    async def stop(self) -> None:
        """Drop the link and all work, as a process that dies does. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None
        self._sequences.clear()

    @property
    def connected(self) -> bool:
        """The link has been dialled and has not ended."""
        return bool(self._tasks) and not self._tasks[0].done()

    @property
    def live_handles(self) -> list[int]:
        """The handles for which this worker holds blocks. It is empty when everything was released."""
        return list(self._sequences)

    async def wait_empty(self, *, timeout_s: float = WAIT_S) -> None:
        """Wait until nothing is held. Raises TimeoutError naming what is."""
        await self.wait_for(lambda: not self._sequences, timeout_s=timeout_s)

    async def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
        """Wait until a condition holds. Raises TimeoutError with the live handles and the commands."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while not condition():
            if loop.time() > end_s:
                raise TimeoutError(f"{self.worker_id}: live {self.live_handles}, commands {self.commands}")
            await asyncio.sleep(0.005)

    def _hello(self) -> common_pb2.WorkerHello:
        return common_pb2.WorkerHello(
            worker_id=self.worker_id,
            role=self.role,
            incarnation=self.incarnation,
            address=self.address,
            model_fingerprint=self.model_fingerprint,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            dtype=self.dtype,
            kv_bytes_per_token=self.kv_bytes_per_token,
            pid=self.pid,
            step_timeout_s=self.step_timeout_s,
            niceness=15,
            quantization=self.quantization,
            numerics=self.numerics,
            max_num_batched_tokens=self.max_num_batched_tokens,
            link_version=self.link_version,
        )

    def _send(self, **body: Any) -> None:
        self._outbound.put(link_pb2.WorkerMessage(**body))

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbound.next())

    async def _read(self, call: Any) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                for one in unbundled(message):
                    self._obey(one)
            await call  # raises the status of a refused link
        except grpc.aio.AioRpcError as exc:
            self.refused = exc
        self._sequences.clear()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_interval_s)
            if not self.silent:
                self._send(heartbeat=self.heartbeat())

    def heartbeat(self) -> common_pb2.WorkerLoad:
        """Return the heartbeat for the present state."""
        held = sum(self._blocks(s) for s in self._sequences.values())
        counts = common_pb2.BlockCounts(total=self.num_blocks, free=self.num_blocks - held, held=held)
        return common_pb2.WorkerLoad(
            blocks=counts,
            speculation=None if self.drafts is None else drafts_to_fields(self.drafted),
            running_sequences=len(self._sequences),
            draining=self.draining,
            engine_stalled_s=self.engine_stalled_s,
            last_handle=self._last_handle,
            max_num_batched_tokens=self.budget or self.max_num_batched_tokens,
            max_num_seqs=self.seqs or self.max_num_seqs,
        )

    def _blocks(self, sequence: _Sequence) -> int:
        output = sequence.resumed if self.role == PREFILL else sequence.sampling.max_tokens
        return ceil_div(len(sequence.prompt_ids) + output, self.block_size)

    def _obey(self, message: link_pb2.RouterMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "welcome":
            self._outbound.bundles = message.takes_bundles
            self._welcomed.set()
            return
        if kind == "alive":
            self.alive_seen += 1
            return
        assert kind is not None
        if kind == "explain_work":
            if self.explains:
                self._send(work_explained=self._explain(message.explain_work))
            return
        self.commands.append(kind)
        command = getattr(message, kind)
        if kind == "drain":
            self.draining = True
            return
        if kind == "set_budget":
            self.budget = command.max_num_batched_tokens or self.budget
            self.seqs = command.max_num_seqs or self.seqs
            return
        if kind in ("bind", "prefill"):
            self._last_handle = command.handle
            self.draft_limits.append(command.spec.draft_limit if command.spec.HasField("draft_limit") else None)
        if self.draining and kind in ("bind", "prefill"):
            self._fail(command.handle, common_pb2.ERROR_REASON_UNAVAILABLE, "draining")
            return
        if self.fail_next is not None and kind != "cancel":
            reason, self.fail_next = self.fail_next, None
            self._fail(command.handle, reason, "told to fail")
            return
        if self.fail_attach is not None and kind == "attach":
            self._fail(command.handle, self.fail_attach, "told to fail")
            return
        handlers: dict[str, Callable[[Any], None]] = {
            "bind": self._bind,
            "prefill": self._prefill,
            "attach": self._attach,
            "cancel": self._cancel,
        }
        handlers[kind](command)

    def _explain(self, question: story_pb2.ExplainWork) -> story_pb2.WorkExplained:
        """Answer with one entry for each command of any request, as this fake keeps no stories."""
        entries = [story_pb2.StoryEntry(at_s=-0.001, kind=kind) for kind in self.commands]
        return story_pb2.WorkExplained(question=question.question, entries=entries)

    def _fail(self, handle: int, reason: common_pb2.ErrorReason, message: str) -> None:
        self._sequences.pop(handle, None)
        self._send(request_failed=link_pb2.RequestFailed(handle=handle, reason=reason, message=message))

    def _bind(self, bind: decode_pb2.Bind) -> None:
        sequence = _Sequence.of(bind, runs=bind.local_prefill)
        free = self.num_blocks - sum(self._blocks(s) for s in self._sequences.values())
        needed = self._blocks(sequence)
        if self.refuse_binds > 0 or needed > free:
            self.refuse_binds = max(0, self.refuse_binds - 1)
            self._send(no_room=decode_pb2.NoRoom(handle=bind.handle, blocks_needed=needed))
            return
        self._sequences[bind.handle] = sequence
        self._send(reserved=decode_pb2.Reserved(handle=bind.handle))
        self._work.set()

    def _prefill(self, prefill: prefill_pb2.Prefill) -> None:
        self._sequences[prefill.handle] = _Sequence.of(prefill, runs=True)
        lease_id = common_pb2.LeaseId(incarnation=self.incarnation, counter=prefill.handle)
        started = prefill_pb2.PrefillStarted(handle=prefill.handle, lease_id=lease_id, ticket=self.ticket)
        self._send(prefill_started=started)
        self._work.set()

    def _attach(self, attach: decode_pb2.Attach) -> None:
        sequence = self._sequences.get(attach.handle)
        if sequence is None:
            return
        _, _, finish = self._draw(sequence, sequence.resumed)
        if finish == _UNFINISHED:  # otherwise the first token ends the request, and the router cancels it
            sequence.next_index = sequence.resumed + 1
            sequence.runs = sequence.attached = True
            self._work.set()

    def _cancel(self, cancel: link_pb2.Cancel) -> None:
        if self._sequences.pop(cancel.handle, None) is not None:
            self.cancelled.append(cancel.handle)

    async def _step_loop(self) -> None:
        while True:
            await self._work.wait()
            await self.gate.wait()
            rows = [self._advance(s) for s in list(self._sequences.values()) if s.runs]
            if rows:
                self._send(step_batch=link_pb2.StepBatch(rows=rows))
            else:
                self._work.clear()
            await asyncio.sleep(self.token_interval_s)

    def _advance(self, sequence: _Sequence) -> link_pb2.StepRow:
        """Return the sequence's next token. On prefill its blocks are dropped after token 0, because nobody tells this fake
        that its lease was committed; on decode they are dropped after the last token."""
        index = sequence.next_index
        if sequence.attached and index == sequence.resumed + 1:
            self._commit(sequence)
        sequence.next_index += 1
        token_id, text, finish = self._draw(sequence, index)
        if self.role == PREFILL or finish != _UNFINISHED:
            self._sequences.pop(sequence.handle, None)
        told = self.drafts if finish != _UNFINISHED else None
        self.drafted = self.drafted.plus(told or NO_COUNTS)
        return link_pb2.StepRow(
            handle=sequence.handle,
            index=index,
            ids=[token_id],
            text=text.encode(),
            finish_reason=finish,
            logprobs=logprobs_at(index, sequence.sampling),
            stop_string=self._stop_string(token_id, sequence.sampling),
            speculation=None if told is None else drafts_to_fields(told),
        )

    def _stop_string(self, token_id: int, sampling: common_pb2.SamplingParams) -> int:
        """Return 1 + the place of the first stop string in a token's text. 0: there is none, or a script is spoken."""
        text = "" if self.script else self.text_of(token_id)
        return next((place for place, stop in enumerate(sampling.stop, start=1) if stop in text), 0)

    def _draw(self, sequence: _Sequence, index: int) -> tuple[int, str, common_pb2.FinishReason]:
        """Return token id, text and finish reason of output `index`. A stop string is found only within one token's text."""
        sampling = sequence.sampling
        token_id = token_at(sequence.prompt_ids, index, self.vocab_size)
        if self.script:
            return token_id, self.script[index], _STOP if index + 1 == len(self.script) else _UNFINISHED
        text = self.text_of(token_id)
        if place := self._stop_string(token_id, sampling):
            return token_id, text[: text.index(sampling.stop[place - 1])], _STOP
        if token_id in sampling.stop_token_ids:
            return token_id, "", _STOP
        if self.eos_after is not None and index + 1 >= self.eos_after and not sampling.ignore_eos:
            return token_id, text, _STOP
        return token_id, text, _LENGTH if index + 1 >= sampling.max_tokens else _UNFINISHED

    def _commit(self, sequence: _Sequence) -> None:
        blocks = ceil_div(len(sequence.prompt_ids) + sequence.resumed, self.block_size)
        committed = decode_pb2.KvCommitted(
            handle=sequence.handle,
            kv_bytes=blocks * self.block_size * self.kv_bytes_per_token,
            transfer_s=0.001,
            commit_s=0.001,
            exposed_transfer_s=0.001,
        )
        self._send(kv_committed=committed)


@dataclass(slots=True)
class LightWorker(FakeWorker):
    """A `FakeWorker` that dials through `pdserve.worker.link`. When its link is lost it drops its work and dials again."""

    router_lost_s: float = 5.0
    losses: int = 0
    link: RouterLink = field(init=False)

    def __post_init__(self) -> None:
        FakeWorker.__post_init__(self)
        self.link = RouterLink(
            self.router_address,
            self.cluster_token,
            self._hello,
            self.heartbeat,
            heartbeat_interval_s=self.heartbeat_interval_s,
            router_lost_s=self.router_lost_s,
            on_command=self._obey,
            on_lost=self._lose,
        )

    async def start(self, *, timeout_s: float = WAIT_S) -> None:
        """Dial, and return when the router has said Welcome. Raises TimeoutError."""
        self._tasks = [asyncio.create_task(job) for job in (self.link.run(), self._step_loop())]
        async with asyncio.timeout(timeout_s):
            await self.link.connected.wait()

    def _lose(self) -> None:
        self.losses += 1
        self._sequences.clear()

    def _send(self, **body: Any) -> None:
        self.link.send(link_pb2.WorkerMessage(**body))
