"""A server of vLLM as the engine of a worker: the commands of a role become requests to it, and its answers become events.

Everything runs on the worker's loop; the server computes. One task serves one sequence, and to end the task closes its
connection, which makes vLLM drop the request. Another task asks for the server's load once a second."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvtransfer.api import KvRegion, Region
from kvtransfer.backends.engine import EngineTransport
from kvtransfer.thread import TransferThread
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.layout import weight_files
from pdserve.checkpoint.progress import Progress
from pdserve.checkpoint.resolve import resolve
from pdserve.config import WorkerConfig
from pdserve.core.block_hash import encode_parts
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import ConfigError, InternalBug, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import BlockId, Incarnation, SeqId, WorkerId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason
from pdserve.core.worker import EngineTraits, WorkerLoad
from pdserve.engine.schedule.collect import OutputToken
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine import WorkerEngine
from pdserve.worker.engine_thread import EngineView
from pdserve.worker.messages import (
    Abort,
    Activate,
    AddLent,
    Command,
    DiscardKv,
    EndQuarantine,
    EngineKv,
    EngineSnapshot,
    Lent,
    Rehash,
    Reserve,
    ReserveResult,
    ReturnLease,
    SetBudget,
    SetLending,
    StepEvents,
)
from pdserve.worker.start_report import MemoryReport
from pdserve.worker.vllm.activity import Activity, Outstanding
from pdserve.worker.vllm.attached import check_attached
from pdserve.worker.vllm.client import ConnectionLost, VllmClient
from pdserve.worker.vllm.kv_events import EngineKeys, EventSocket
from pdserve.worker.vllm.metrics import EngineLoad, read_load
from pdserve.worker.vllm.requests import (
    BadAnswer,
    Chunk,
    decode_body,
    discard_body,
    prefill_body,
    read_chunk,
    read_hits,
    read_kv,
)
from pdserve.worker.vllm.server import ANSWER_S, KV_LEASE_S, ServerFacts, VllmServer, check_settings, slots_of

log = logging.getLogger(__name__)
Work = Callable[[Outstanding], Coroutine[Any, Any, None]]
"""Begins the work of one sequence. One that is dropped before its task has run begins none."""

TRANSPORT: Final = "engine"
UNDIVIDED: Final = ("structured_outputs", "presence_penalty", "frequency_penalty")
"""The features that one server must serve from the prompt to the end: a decode server takes token 0 for a part of the prompt,
so it would count it in no penalty, and begin a grammar behind it (docs/design/0086-what-a-vllm-pair-does.md)."""
UNRESUMED: Final = ("structured_outputs",)
"""vLLM begins each grammar at its first word. Penalties only forget the tokens from before."""
REFUSED: Final = ("prompt_logprobs", "speculation")
"""The streams of vLLM's interface do not have the former, and a server takes no limit of drafts for a request."""
EVENTS_TASK: Final = "KV events of vLLM"
POLL_S: Final = 1.0
WATCH_S: Final = 0.2
DISCARD_S: Final = 5.0
"""A request that only frees KV is closed after so long. vLLM has read it by then, and tells the lender's engine at the
close."""
GATHER_S: Final = 0.002
"""A token waits at most so long for those of other sequences: the tokens of one step come in some milliseconds one after the
other, and a message of its own for each would cost more than all the rest."""
END_S: Final = 1.0
"""A stream that does not end so long after its last token is closed."""
NO_LOAD: Final = EngineLoad(0, 0.0, 0, 0, 0)
"""The load of a server that has not been asked yet."""
_HASHED_BYTES: Final = 1 << 24


@dataclass(slots=True)
class _Sequence:
    """One sequence of a role. `drawn` is its output so far, with that of earlier attempts."""

    spec: RequestSpec
    drawn: list[int]
    began: int
    """The length of `drawn` at the beginning."""
    runs: bool = False
    fetches: bool = False
    """vLLM has been told to fetch KV for it, and has not answered yet."""
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        return len(self.spec.prompt_ids) + len(self.drawn)


@dataclass(slots=True)
class _Unsent:
    """The events that wait for the end of this turn of the loop."""

    lent: list[Lent] = field(default_factory=list)
    reserved: list[ReserveResult] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    given_up: list[tuple[SeqId, PdserveError]] = field(default_factory=list)


class VllmEngine(WorkerEngine):
    """The engine of one worker. `on_death` is called when its server has ended or is stuck."""

    transport = TRANSPORT

    def __init__(
        self, config: WorkerConfig, role: common_pb2.Role, progress: Progress, on_death: Callable[[BaseException], None]
    ) -> None:
        """`role` is the role of the first life. `progress` is told how far the start is."""
        self.config = config
        self._role = role
        self._progress = progress
        self._on_death = on_death
        self._server: VllmServer | None = None
        self._facts: ServerFacts | None = None
        self._directory = Path()
        self._client: VllmClient | None = None
        self._view: EngineView | None = None
        self._slots = slots_of(config.engine)
        self._sequences: dict[SeqId, _Sequence] = {}
        self._lent_blocks: dict[SeqId, int] = {}
        self._foreign: deque[tuple[float, int]] = deque()  # (end, blocks) of KV that waits for vLLM's own time
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent = _Unsent()
        self._flushing: asyncio.Handle | None = None
        self._taken = 0
        self._load = NO_LOAD
        self._activity = Activity()
        self._newest = SeqId(0)
        self._keys: EngineKeys | None = None

    # The start and the end --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Start the server, or find it, and read the model's files. Raises `ConfigError`."""
        engine = self.config.engine
        check_settings(engine)
        self._directory = directory = resolve(engine.model, progress=self._progress, load_format=engine.load_format)
        self.card = ModelCard.load(directory, load_format=engine.load_format, foreign=True)
        self.tokenizer = Tokenizer.load(directory)
        weights: list[str] = []
        hashing = threading.Thread(target=lambda: weights.append(_weights(directory, engine.load_format)), daemon=True)
        hashing.start()  # while the server starts
        facts = self._start_server()
        hashing.join()
        if not weights:
            raise ConfigError(f"the weights in {directory} cannot be read")
        self.traits = EngineTraits(f"vllm {facts.release}", REFUSED, UNDIVIDED, UNRESUMED)
        kv_dtype = "auto" if facts.cache_dtype not in ("fp8", "fp8_e4m3") else facts.cache_dtype
        self.kv_spec = self.card.kv_layout(facts.block_size, engine.dtype, kv_dtype)
        self.max_model_len = facts.max_model_len
        identity = (self.card.fingerprint, weights[0], facts.release, str(facts.block_size), facts.cache_dtype, engine.dtype)
        self.model_digest = hashlib.sha256(encode_parts(*[part.encode() for part in identity])).hexdigest()
        self._measure(facts)

    def _measure(self, facts: ServerFacts) -> None:
        """Note the size of the KV pool. A server that starts again on a GPU may find another size."""
        self.regions = tuple(
            KvRegion.of(group, Region(0, facts.num_blocks, group.block_bytes)) for group in self.kv_spec.groups
        )
        self.memory = MemoryReport(
            kv_bytes=facts.num_blocks * self.kv_spec.block_bytes,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
        )

    def _start_server(self) -> ServerFacts:
        """Start the server in the present role, or find it. Raises `ConfigError`."""
        role = codec.role_from_wire(self._role).value
        server = self._server = VllmServer(self.config, role, self._directory)
        facts = self._facts = server.wait_ready(self.config.start_timeout_s, self._progress)
        if not server.ours:
            check_attached(self.config, self._directory, facts, role)
        return facts

    async def open(self) -> EngineView:
        """Begin to ask for the load of the server and to take its KV events."""
        assert self._facts is not None
        self._connect()
        if self._server is not None and self._server.events:
            self._keys = EngineKeys(self.model_digest.encode(), self.kv_spec.block_size, self._total)
        self._view = EngineView(
            EngineSnapshot(self._worker_load()),
            self._submit,
            step_timeout_s=self.config.engine.step_timeout_s,
            prefix_caching=self._keys is not None,
        )
        self._listen()
        self._spawn(self._poll(), "load of vLLM")
        self._spawn(self._watch(), "watch over vLLM")
        return self._view

    def _connect(self) -> None:
        assert self._server is not None
        self._client = VllmClient(self._server.url)

    @property
    def _connected(self) -> VllmClient:
        assert self._client is not None
        return self._client

    def _listen(self) -> None:
        """Take the events of the present server from now on. It has connected to nobody before."""
        assert self._server is not None
        if self._keys is not None:
            events = EventSocket(self._server.events)
            self._spawn(self._take_events(events, self._keys), EVENTS_TASK)

    async def _take_events(self, events: EventSocket, keys: EngineKeys) -> None:
        try:
            while True:
                try:
                    keys.message(*await events.next())
                except ValueError as exc:
                    log.warning("%s", exc)
                self._flush_soon()
        finally:
            events.close()

    async def take_role(self, role: common_pb2.Role) -> None:
        """Restart the server when the role has changed: vLLM takes its part in handoffs from its command. One that is not ours
        must do for both roles. Raises `ConfigError`."""
        if role == self._role:
            return
        self._role = role
        self._slots = slots_of(self.config.engine)
        server = self._server
        assert server is not None
        if not server.ours:
            assert self._facts is not None
            role_name = codec.role_from_wire(role).value
            await asyncio.to_thread(check_attached, self.config, self._directory, self._facts, role_name)
            return
        log.info("%s changes its role: the server of vLLM starts again", self.config.worker_id)
        self._server = None
        for task in [task for task in self._tasks if task.get_name() == EVENTS_TASK]:
            task.cancel()
        await self._connected.close()
        await asyncio.to_thread(server.stop)
        before = self._facts
        facts = await asyncio.to_thread(self._start_server)
        assert before is not None
        if replace(facts, num_blocks=before.num_blocks) != before:
            raise ConfigError(f"vLLM came back as another server: {before}, then {facts}")
        self._measure(facts)
        self._load = NO_LOAD
        if self._keys is not None:
            self._keys.restart(facts.num_blocks)
        self._connect()
        self._listen()

    async def close(self) -> None:
        """End all requests. Idempotent."""
        self._view = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def stop(self, timeout_s: float) -> None:
        """End the server if this worker has started it."""
        if self._server is not None:
            self._server.stop()

    def describe(self) -> str:
        """Describe the server by its release and its address."""
        assert self._facts is not None
        assert self._server is not None
        return f"{self.traits.engine} at {self._server.url}"

    def make_transfer(self, worker_id: WorkerId, incarnation: Incarnation) -> TransferThread:
        """Make a thread that moves nothing: the servers do."""
        return TransferThread(EngineTransport)

    # Commands ---------------------------------------------------------------------------------------------------------------

    def _submit(self, command: Command) -> None:
        """Take a command of the role. Its events follow in a later turn of the loop."""
        self._taken += 1
        match command:
            case AddLent(seq_id, spec, resumed, _):
                sequence = self._add(seq_id, spec, resumed)
                self._start(seq_id, sequence, lambda asked: self._prefill(seq_id, sequence, asked), prompt=True)
            case Reserve(seq_id, spec, local, resumed, _):
                self._reserve(seq_id, spec, resumed, local=local)
            case Activate(seq_id, first_token, kv):
                if (reserved := self._sequences.get(seq_id)) is not None:
                    reserved.drawn.append(first_token)
                    reserved.fetches = kv is not None  # from now on, also if it is dropped before its task has begun
                    self._start(seq_id, reserved, lambda asked: self._decode(seq_id, reserved, asked, kv), prompt=kv is None)
            case Abort(seq_id, _):
                self._drop(seq_id)
            case ReturnLease(seq_id, read):
                blocks = self._lent_blocks.pop(seq_id, 0)
                if blocks and not read:
                    self._foreign.append((self._now_s() + KV_LEASE_S, blocks))
            case DiscardKv(prompt_ids, kv):
                self._spawn(self._discard(prompt_ids, kv), "discard")
            case SetBudget(tokens, seqs):
                assert not tokens, "`check_budget` refuses them, since the load names no limit of tokens"
                self._slots = seqs or self._slots
            case EndQuarantine() | Rehash() | SetLending():
                raise InternalBug(f"vLLM's blocks are its own, and {type(command).__name__} is about ours")
        self._flush_soon()

    def _add(self, seq_id: SeqId, spec: RequestSpec, resumed: tuple[int, ...]) -> _Sequence:
        sequence = self._sequences[seq_id] = _Sequence(spec, list(resumed), len(resumed))
        self._newest = max(self._newest, seq_id)
        return sequence

    def _reserve(self, seq_id: SeqId, spec: RequestSpec, resumed: tuple[int, ...], *, local: bool) -> None:
        """Count a sequence in if there is a slot and room for its prompt and one block more. vLLM itself gives blocks as it
        goes, and preempts where they run out."""
        self._newest = max(self._newest, seq_id)
        needed = self.kv_spec.blocks_for(len(spec.prompt_ids) + len(resumed)) + 1
        if len(self._sequences) >= self._slots or self._held() + needed > self._total:
            self._unsent.reserved.append(ReserveResult(seq_id, None))
            return
        sequence = self._add(seq_id, spec, resumed)
        tables = tuple(tuple(map(BlockId, range(needed))) for _ in self.kv_spec.groups)  # as many as vLLM takes, not which ones
        self._unsent.reserved.append(ReserveResult(seq_id, tables))
        if local:
            self._start(seq_id, sequence, lambda asked: self._decode(seq_id, sequence, asked, None), prompt=True)

    def _start(self, seq_id: SeqId, sequence: _Sequence, work: Work, *, prompt: bool) -> None:
        sequence.runs = True
        sequence.task = self._spawn(self._guarded(seq_id, work, prompt=prompt), f"sequence {seq_id}")

    def _drop(self, seq_id: SeqId) -> None:
        """Forget a sequence, and end its request. One that fetches KV goes on until vLLM has answered, or for `DISCARD_S`: a
        connection that closes before vLLM has read the request would leave the KV with the lender's engine."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None or sequence.task is None:
            return
        if sequence.fetches:
            asyncio.get_running_loop().call_later(DISCARD_S, sequence.task.cancel)
        else:
            sequence.task.cancel()

    async def _guarded(self, seq_id: SeqId, work: Work, *, prompt: bool) -> None:
        """Run the work of one sequence, and report what ended it other than its last token."""
        asked = self._activity.begin(self._now_s(), prompt=prompt)
        try:
            await work(asked)
        except ConnectionLost as exc:
            await asyncio.sleep(2 * WATCH_S)  # if its server has ended, so does this worker, which costs its requests nothing
            self._give_up(seq_id, exc)
        except PdserveError as exc:
            self._give_up(seq_id, exc)
        except Exception as exc:
            log.exception("sequence %s", seq_id)
            self._give_up(seq_id, InternalBug(f"vLLM's worker: {exc!r}"))
        finally:
            self._activity.end(asked, self._now_s())
            if (sequence := self._sequences.get(seq_id)) is not None:
                sequence.task = None

    def _give_up(self, seq_id: SeqId, error: PdserveError) -> None:
        if self._sequences.pop(seq_id, None) is not None:
            self._unsent.given_up.append((seq_id, error))
            self._flush_soon()

    # Requests ---------------------------------------------------------------------------------------------------------------

    async def _prefill(self, seq_id: SeqId, sequence: _Sequence, asked: Outstanding) -> None:
        """Compute a prompt and token 0, and report both with the engines' ticket."""
        spec = sequence.spec
        body = prefill_body(spec, sequence.drawn, self.card.eos_token_ids)
        answer = await self._connected.ask(body)
        chunk = read_chunk(answer, top=spec.sampling.logprobs)
        if chunk is None or len(chunk.token_ids) != 1:
            raise BadAnswer(f"vLLM sent {0 if chunk is None else len(chunk.token_ids)} tokens instead of one")
        self._check_ids(chunk)
        blocks = self.kv_spec.blocks_for(sequence.tokens)
        kv, hits, finish = EngineKv(blocks, b""), 0, chunk.finish_reason
        if finish is not FinishReason.STOP:
            finish = FinishReason.LENGTH if spec.sampling.max_tokens - sequence.began <= 1 else None
        if finish is None:
            kv = read_kv(answer, sequence.tokens, self.kv_spec.block_size)
            hits = read_hits(answer, sequence.tokens, self.kv_spec.block_size)
            self._lent_blocks[seq_id] = blocks
        self._activity.computed(asked, sequence.tokens - hits * self.kv_spec.block_size, self._now_s())
        tables = tuple(tuple(map(BlockId, range(blocks))) for _ in self.kv_spec.groups)
        self._unsent.lent.append(Lent(seq_id, tables, hits=hits, kv=kv))
        self._tokens(seq_id, sequence, asked, chunk._replace(finish_reason=finish))

    async def _decode(self, seq_id: SeqId, sequence: _Sequence, asked: Outstanding, kv: EngineKv | None) -> None:
        """Compute the rest of an output. With `kv`, vLLM first fetches the KV of the prompt by itself."""
        spec = sequence.spec
        body = decode_body(spec, sequence.drawn, self.card.eos_token_ids, kv, self.kv_spec.block_size)
        finished = False
        try:
            async with asyncio.timeout(None) as end, contextlib.aclosing(self._connected.stream(body)) as answers:
                async for answer in _before(answers, self.config.lease.stalled_s, fetches=kv is not None):
                    if finished:
                        continue  # to the end of the stream: then its connection can take another request
                    sequence.fetches = False
                    if self._sequences.get(seq_id) is not sequence:
                        return  # it was dropped meanwhile
                    chunk = read_chunk(answer, top=spec.sampling.logprobs)
                    if chunk is None or (not chunk.token_ids and chunk.finish_reason is None):
                        continue
                    self._check_ids(chunk)
                    if asked.prompt:
                        self._activity.computed(asked, sequence.tokens, self._now_s())
                    if finished := self._tokens(seq_id, sequence, asked, chunk):
                        end.reschedule(self._now_s() + END_S)
        except TimeoutError:
            log.warning("vLLM does not close the stream of sequence %s", seq_id)
        except ReplicaLost as exc:
            if finished:
                return
            if kv is not None and len(sequence.drawn) == sequence.began + 1 and not isinstance(exc, BadAnswer | ConnectionLost):
                raise TransferFailed(f"vLLM did not get the KV of the prompt: {exc}") from exc
            raise
        if not finished:
            raise BadAnswer("vLLM closed the stream before its end")

    def _check_ids(self, chunk: Chunk) -> None:
        likeliest = [token_id for each in chunk.logprobs for token_id, _ in each.top]
        if (highest := max([*chunk.token_ids, *likeliest], default=0)) >= self.card.vocab_size:
            raise BadAnswer(f"vLLM sent token id {highest}, which is not below {self.card.vocab_size}")

    def _tokens(self, seq_id: SeqId, sequence: _Sequence, asked: Outstanding, chunk: Chunk) -> bool:
        """Report tokens, in order, and return True after the last one. What vLLM sends beyond the limit of the request is left
        out. Raises `BadAnswer` for an end before it."""
        room = sequence.spec.sampling.max_tokens - len(sequence.drawn)
        token_ids = chunk.token_ids[:room]
        finish = chunk.finish_reason if len(chunk.token_ids) <= room else None
        if len(token_ids) == room:
            finish = finish or FinishReason.LENGTH
        elif finish is FinishReason.LENGTH or (finish is not None and not token_ids):
            raise BadAnswer(f"vLLM ended {room - len(token_ids)} tokens before the end")
        for number, token_id in enumerate(token_ids):
            ends = finish if number == len(token_ids) - 1 else None
            logprobs = chunk.logprobs[number] if chunk.logprobs else None
            self._unsent.tokens.append(OutputToken(seq_id, len(sequence.drawn), token_id, ends, logprobs))
            sequence.drawn.append(token_id)
        now_s, is_first = self._now_s(), asked.answered_s is None
        self._activity.answered(asked, len(token_ids), now_s)
        if finish is not None or self._role == common_pb2.ROLE_PREFILL:
            self._activity.end(asked, now_s)
            del self._sequences[seq_id]
        is_step_whole = len(self._unsent.tokens) >= self._activity.streaming
        self._flush_soon(0.0 if is_first or is_step_whole else GATHER_S)
        return finish is not None

    async def _discard(self, prompt_ids: tuple[int, ...], kv: EngineKv) -> None:
        """Let vLLM take over KV that nobody will use, and close the connection, so that the lender's engine frees it."""
        body = discard_body(prompt_ids, kv, self.kv_spec.block_size)
        with contextlib.suppress(TimeoutError, PdserveError):
            async with asyncio.timeout(DISCARD_S), contextlib.aclosing(self._connected.stream(body)) as answers:
                async for _ in answers:
                    break

    # Events and load --------------------------------------------------------------------------------------------------------

    def _flush_soon(self, wait_s: float = 0.0) -> None:
        """Publish what has happened within `wait_s`, or at the end of this turn of the loop."""
        if self._flushing is not None:
            if wait_s or not isinstance(self._flushing, asyncio.TimerHandle):
                return
            self._flushing.cancel()
        loop = asyncio.get_running_loop()
        self._flushing = loop.call_later(wait_s, self._flush) if wait_s else loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        batch, self._unsent = self._unsent, _Unsent()
        if self._view is None:
            return
        self._view.on_step(
            StepEvents(
                lent=tuple(batch.lent),
                reserved=tuple(batch.reserved),
                tokens=tuple(batch.tokens),
                given_up=tuple(batch.given_up),
                snapshot=EngineSnapshot(
                    self._worker_load(),
                    self._taken,
                    self._works,
                    self._newest,
                    None if self._keys is None else self._keys.take(),
                ),
            )
        )

    @property
    def _works(self) -> bool:
        """True while vLLM owes an answer."""
        return any(sequence.runs for sequence in self._sequences.values())

    @property
    def _total(self) -> int:
        assert self._facts is not None
        return self._facts.num_blocks

    def _held(self) -> int:
        """Return the blocks in use: by what vLLM says, or by what it will need for what it has got, whichever is more."""
        ours = sum([self.kv_spec.blocks_for(sequence.tokens) + 1 for sequence in self._sequences.values()])
        return min(self._total, max(ours, math.ceil(self._load.kv_usage * self._total)))

    def _worker_load(self) -> WorkerLoad:
        held, activity = self._held(), self._activity
        activity.advance(self._now_s())
        cached = 0 if self._keys is None else min(self._keys.count, self._total - held)
        while self._foreign and self._foreign[0][0] <= self._now_s():
            self._foreign.popleft()
        running = sum(sequence.runs for sequence in self._sequences.values())
        waiting = min(self._load.waiting, running)
        return WorkerLoad(
            blocks=BlockCounts(self._total, self._total - held - cached, cached, held, 0),
            queued_requests=waiting,
            queued_tokens=self._queued_tokens(),
            running_sequences=running - waiting,
            foreign_blocks=sum(blocks for _, blocks in self._foreign),
            prefix_queried_tokens=self._load.prefix_queried,
            prefix_hit_tokens=self._load.prefix_hit,
            max_num_seqs=self._slots,
            prompt_tokens_per_s=activity.prompt_tokens_per_s,
            decode_step_s=activity.decode_step_s,
            computed_prompt_tokens=activity.computed_prompt_tokens,
            output_tokens=activity.output_tokens,
            prompt_busy_s=activity.prompt_busy_s,
            prompt_steps=activity.prompts,
            decode_busy_s=activity.decode_busy_s,
        )

    def _queued_tokens(self) -> int:
        """Return the prompt tokens that a prefill server has got and has not answered yet."""
        if self._role != common_pb2.ROLE_PREFILL:
            return 0
        return sum(sequence.tokens for sequence in self._sequences.values())

    async def _poll(self) -> None:
        """Ask the server for its load, for ever. A server that does not answer for `step_timeout_s` is lost."""
        assert self._view is not None
        last_s, is_known = self._now_s(), True
        while True:
            await asyncio.sleep(POLL_S)
            if self._connected.closed:  # the server starts again, which takes as long as a start may
                last_s = self._now_s()
                continue
            try:
                load = read_load(await self._connected.load_page(ANSWER_S))
                if not is_known:
                    await self._check_same()
            except ConfigError as exc:
                self._on_death(exc)
                return
            except (PdserveError, ValueError) as exc:
                silent_s, is_known = self._now_s() - last_s, False
                log.warning("vLLM does not tell its load: %s", exc)
                if silent_s > self.config.engine.step_timeout_s:
                    self._on_death(ReplicaLost(f"vLLM has not told its load for {silent_s:.0f} s: {exc}"))
                    return
                continue
            last_s, is_known = self._now_s(), True
            advanced, self._load = load.tokens != self._load.tokens, load
            if advanced or not self._works:  # otherwise only the watch over the engine may decide that it lives
                self._flush_soon()

    async def _check_same(self) -> None:
        """Raise `ConfigError` if a server that is not ours has come back as another one, such as one of another model, or does
        not answer within `step_timeout_s`."""
        server = self._server
        if server is None or server.ours:
            return
        facts = await asyncio.to_thread(server.wait_ready, self.config.engine.step_timeout_s, self._progress)
        if facts != self._facts:
            raise ConfigError(f"another server of vLLM answers at {server.url}: {facts}, before it was {self._facts}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                if self._server is not None:
                    self._server.check_running()
            except ReplicaLost as exc:
                self._on_death(exc)
                return

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _before(answers: AsyncIterator[Any], limit_s: float, *, fetches: bool) -> AsyncIterator[Any]:
    """Yield answers. Where vLLM must fetch KV, the first one must come within `limit_s`: a lender that stands still holds it up
    for ever. Raises `ReplicaLost`."""
    if fetches:
        try:
            async with asyncio.timeout(limit_s):
                first = await anext(answers, None)
        except TimeoutError:
            raise ReplicaLost(f"vLLM has computed nothing for {limit_s:.0f} s") from None
        if first is None:
            return
        yield first
    async for answer in answers:
        yield answer


def _weights(directory: Path, load_format: str) -> str:
    """Return a name for every byte of the weights in this directory. Two servers with one name have loaded the same ones."""
    digest = hashlib.sha256()
    for path in () if load_format == "dummy" else sorted(weight_files(directory)):
        with path.open("rb") as file:
            while piece := file.read(_HASHED_BYTES):
                digest.update(piece)
    return digest.hexdigest()
