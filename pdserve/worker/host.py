"""The interface between a worker and its role, and what both roles share.

`HostedRole` has the calls that a role gets, and `Host` the parts of the worker that it may use. Both roles refuse and check
commands in the same way, write the stories of their requests, and turn tokens into text. Loop thread only.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar

import grpc

from kvtransfer.api import KvRegion
from kvtransfer.staging import Staging
from kvtransfer.thread import TransferThread
from pdserve.checkpoint.card import ModelCard
from pdserve.config import WorkerConfig
from pdserve.core.block_hash import prompt_hash
from pdserve.core.errors import InternalBug, InvalidRequest, NumericalError, PdserveError, Unavailable
from pdserve.core.ids import FIRST_DIRECT_HANDLE, Handle, Incarnation, SeqId
from pdserve.core.kv_layout import KvSpec
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.core.speculation import DraftCounts
from pdserve.core.structured.constraint import FIELD
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.core.worker import OWN_ENGINE, EngineTraits
from pdserve.engine.schedule.collect import Advance, OutputToken
from pdserve.observe.story import Story, StoryRing, Value
from pdserve.rpc import codec
from pdserve.rpc.channel import open_channel
from pdserve.rpc.codec import drafts_to_fields, entries_to_wire, finish_to_wire, logprobs_to_wire
from pdserve.rpc.status import to_reason
from pdserve.rpc.v1 import common_pb2, link_pb2, story_pb2
from pdserve.rpc.v1.decode_pb2 import Bind
from pdserve.rpc.v1.prefill_pb2 import Prefill
from pdserve.structured.compilations import Compilations, StartGrammar, no_grammars
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.messages import Command, Lent, ReserveResult, StepEvents


def is_direct(handle: Handle) -> bool:
    """Tell whether a handle names a direct request, which no router knows."""
    return handle >= FIRST_DIRECT_HANDLE


class CountedCommands:
    """The handles of one link and the sequences of one engine. The numbers of the sequences grow."""

    def __init__(self) -> None:
        self._given: deque[tuple[SeqId, Handle]] = deque()
        self._last = Handle(0)

    def give(self, seq_id: SeqId, handle: Handle) -> None:
        """Note that the command `handle` goes to the engine as sequence `seq_id`."""
        self._given.append((seq_id, handle))

    def last_handle(self, last_seq_id: SeqId) -> Handle:
        """Return the last command that is in the counts taken when `last_seq_id` was the newest sequence. 0: no command."""
        while self._given and self._given[0][0] <= last_seq_id:
            _, handle = self._given.popleft()
            self._last = max(self._last, handle)  # a request that waited for its grammar comes after later ones
        return self._last

    def forget(self) -> None:
        """Forget all commands, because the link has ended; the handles of the next link count from the start."""
        self._given.clear()
        self._last = Handle(0)


MAX_STORIES: Final = 512
MAX_ENTRIES: Final = 3072
"""A story has about 6 entries with 2 fields each, so 512 stories have so many. They take about 1 MiB."""


class WorkKind(Enum):
    """The things that may happen to a request on a worker."""

    RECEIVED = "received"
    RESERVED = "reserved"
    NO_ROOM = "no_room"
    REFUSED = "refused"
    GRANTED = "granted"
    COMPUTED = "computed"
    FIRST_TOKEN = "first_token"
    ATTACHED = "attached"
    PULLED = "pulled"
    COMMITTED = "committed"
    PREEMPTED = "preempted"
    LEASE_ENDED = "lease_ended"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()


class WorkStories:
    """The worker's stories of its latest requests."""

    def __init__(self, clock: Callable[[], float] = _loop_time_s) -> None:
        self._clock = clock
        self._ring: StoryRing[Story] = StoryRing(max_stories=MAX_STORIES, max_entries=MAX_ENTRIES)

    def note(self, request_id: str, kind: WorkKind, **fields: Value) -> None:
        """Write down what has just happened to a request."""
        story = self._ring.get(request_id)
        if story is None:
            story = Story()
            self._ring.keep(request_id, story)
        self._ring.grew(story.note(self._clock(), kind, **fields))

    def answer(self, question: story_pb2.ExplainWork) -> link_pb2.WorkerMessage:
        """Return the answer to a question of the router. It has no entries when no story of the request is kept."""
        story = self._ring.get(question.request_id) or Story()
        entries = entries_to_wire(story.entries, since_s=self._clock())
        explained = story_pb2.WorkExplained(question=question.question, entries=entries, left_out=story.left_out)
        return link_pb2.WorkerMessage(work_explained=explained)


log = logging.getLogger(__name__)


TICKET_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class KvDamage:
    """The damaged blocks of KV since the start. `corrupt_blocks` counts blocks whose checksums differed at their readers;
    `rotted_blocks` counts blocks that have changed in this worker's memory."""

    corrupt_blocks: int = 0
    rotted_blocks: int = 0


@dataclass(slots=True)
class Host:
    """The parts of a worker that its role may use. Only the loop thread uses them, except the immutable ones."""

    config: WorkerConfig
    card: ModelCard
    kv_spec: KvSpec
    regions: tuple[KvRegion, ...]
    """The region of each KV group."""
    tokenizer: Tokenizer
    max_model_len: int
    incarnation: Incarnation
    transport: str
    """The name of the transport. Both workers of a pair have the same."""
    transfer: TransferThread
    agent_metadata: bytes
    address: str
    server: grpc.aio.Server
    submit: Callable[[Command], None]
    send: Callable[[link_pb2.WorkerMessage], None]
    open_channel: Callable[[str], grpc.aio.Channel] = open_channel
    """Opens a channel to a peer's services."""
    start_grammar: StartGrammar | None = no_grammars
    """Compiles the constraint of a request. A thread of the role calls it. None: the engine takes constraints as they are."""
    staging: Staging | None = None
    """Reads KV of peers that store it in another dtype. None: such peers are refused."""
    ticket_secret: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET_SECRET_BYTES))
    """The key with which this incarnation seals its tickets. It never leaves the process."""
    traits: EngineTraits = OWN_ENGINE
    """What differs from pdserve's own engine."""
    draining: bool = False
    """True when the worker takes no new request and only finishes those that it has."""
    link_version: int = 0
    """The version of the link's protocol that this worker and its router speak. 0: that of a router without versions."""
    counted: CountedCommands = field(default_factory=CountedCommands)
    stories: WorkStories = field(default_factory=WorkStories)
    model_digest: str = ""
    """The name of the model with every byte of its weights. Empty: they do not come from files."""
    numerics: str = ""
    """The name of the bits that the engine computes. Empty: a token depends on the batch in which it is computed."""
    seq_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The ids of new sequences. An engine that has served another role goes on with its own ids."""

    def next_seq_id(self, handle: Handle) -> SeqId:
        """Return a new id for the sequence that this command starts in the engine."""
        seq_id = SeqId(next(self.seq_ids))
        if not is_direct(handle):  # the router asks for its own handles
            self.counted.give(seq_id, handle)
        return seq_id


CLOSE_TIMEOUT_S: Final = 10.0


async def close_role(role: HostedRole[Any], transfer: TransferThread) -> bool:
    """Close role and transport at the same time: the role waits until its reads have stopped, and a read that does not stop by
    itself stops with the transport. The wait for the role ends after `CLOSE_TIMEOUT_S`. Return True if both have closed."""
    results = await asyncio.gather(_close_in_time(role), transfer.close(), return_exceptions=True)
    for part, result in zip(("role", "transport"), results, strict=True):
        if isinstance(result, TimeoutError):
            log.error("the %s was not closed within %.0f s: a read may still write", part, CLOSE_TIMEOUT_S)
        elif isinstance(result, Exception):
            log.error("the %s was not closed", part, exc_info=result)
    return all(result is None for result in results)


async def _close_in_time(role: HostedRole[Any]) -> None:
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await role.close()


RoleFactory = Callable[[Host], "HostedRole[Any]"]


REFUSED_SINCE: Final = 1
"""The first version of the link's protocol that has `Refused`. An older router would wait for ever for another answer."""


def read_request(command: Prefill | Bind, host: Host) -> tuple[RequestSpec, tuple[int, ...]]:
    """Return the request of a command, and the output of its earlier attempts.

    Raises `InvalidRequest` for values that the model or the pool cannot take.
    """
    try:
        spec, resumed = codec.spec_from_wire(command.spec), codec.unpack_ids(command.resumed_ids)
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="prompt_ids") from exc
    prompt = spec.prompt_ids + resumed
    if not 0 < len(prompt) < host.max_model_len:
        raise InvalidRequest(f"has {len(prompt)} tokens; from 1 to {host.max_model_len - 1} are allowed", field="prompt")
    if max(prompt) >= host.card.vocab_size:
        raise InvalidRequest(f"token id {max(prompt)} is not below {host.card.vocab_size}", field="prompt")
    params = spec.sampling
    named = max((*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)), default=0)
    if named >= host.card.vocab_size:
        raise InvalidRequest(f"names token id {named}, which is not below {host.card.vocab_size}", field="sampling")
    if not len(resumed) < min(len(prompt), params.max_tokens):
        raise InvalidRequest(
            f"{len(resumed)} ids cannot be output: the prompt has {len(prompt)} ids, max_tokens is {params.max_tokens}",
            field="resumed",
        )
    return spec, resumed


def named(command: Prefill | Bind, spec: RequestSpec) -> bytes:
    """Return the hash by which a ticket is bound to the prompt of a command.

    The two phases of a direct request may come from a caller that sends different ones. The hash then also covers the
    constraint: an output whose token 0 was drawn under another one could have ended already.
    """
    ids = command.spec.prompt_ids + command.resumed_ids
    return request_hash(ids, spec) if is_direct(Handle(command.handle)) else prompt_hash(ids, spec.cache_salt)


def request_hash(prompt_ids: bytes, spec: RequestSpec) -> bytes:
    """Return the hash that names the prompt of a direct request, its salt and its constraint."""
    return prompt_hash(prompt_ids, spec.cache_salt, repr(spec.constraint).encode() if spec.constraint is not None else b"")


def fail_foreign(host: Host, message: link_pb2.RouterMessage, role: str) -> None:
    """Answer a command that another role handles: its request fails here, and the router serves it elsewhere.

    A message that no role knows is only logged: a newer router sent it.
    """
    body = message.WhichOneof("body")
    if body not in ("prefill", "bind", "attach"):
        log.error("%s was sent %s, which this version does not know", host.config.worker_id, body)
        return
    command = getattr(message, body)
    error = Unavailable(f"{host.config.worker_id} is a {role} worker and was sent {body}")
    log.error("%s", error.message)
    host.send(failed(Handle(command.handle), error))


def fail_unstarted(host: Host, handle: Handle, request_id: str, error: PdserveError) -> None:
    """Report a request that has failed before the engine heard of it."""
    host.stories.note(request_id, WorkKind.FAILED, error=error.code, message=error.message)
    host.send(failed(handle, error))


def failed(handle: Handle, error: PdserveError, *, pair_failed: bool = False) -> link_pb2.WorkerMessage:
    """Make the message that this request has failed here. `pair_failed` True: KV did not pass from the lender to here."""
    return link_pb2.WorkerMessage(
        request_failed=link_pb2.RequestFailed(
            handle=handle, reason=to_reason(error.code), message=error.message, pair_failed=pair_failed
        )
    )


def refuse(host: Host, handle: Handle, request_id: str) -> bool:
    """Refuse a command if this worker drains, and return True. The router then places the work elsewhere at once.

    Return False, and do nothing, if the worker does not drain or the router does not know this answer.
    """
    if not host.draining or (host.link_version < REFUSED_SINCE and not is_direct(handle)):
        return False
    host.stories.note(request_id, WorkKind.REFUSED, why="draining")
    host.send(link_pb2.WorkerMessage(refused=link_pb2.Refused(handle=handle)))
    return True


class OutputStream:
    """The output of one request on this worker. Every token is pushed in order, after the tokens of `earlier`."""

    def __init__(
        self,
        handle: Handle,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        earlier: Sequence[int] = (),
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Start after `earlier`, the output ids that the client has already. The text depends only on the prompt and the output
        ids, so it goes on from there."""
        self._handle = handle
        self._params = params
        self._stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self._stops = params.stop
        self._text = OutputText.of(tokenizer, prompt_ids, params)
        self._next_index = 0
        for token_id in earlier:
            self.skip(token_id)

    def skip(self, token_id: int) -> None:
        """Take the next token without making a row, because the client gets that row from another worker."""
        self._text.push(token_id)
        self._next_index += 1

    def push_first(self, token_id: int, *, ended: bool, room: int) -> link_pb2.StepRow:
        """Return the row of token 0, which another worker drew, perhaps for parameters other than these, which decide here.

        `ended` tells that its grammar has ended, and `room` how many tokens fit in all.
        """
        params = self._params
        if ended or (token_id in self._stop_ids and params.min_tokens <= 1):
            return self.push(0, token_id, FinishReason.STOP)
        return self.push(0, token_id, FinishReason.LENGTH if min(params.max_tokens, room) == 1 else None)

    def push(
        self,
        index: int,
        token_id: int,
        finish_reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        speculation: DraftCounts | None = None,
    ) -> link_pb2.StepRow:
        """Return the row of this token. Its finish reason is STOP also when the token completes a stop string. Counts of drafts
        go out with the last token only, whether the engine knows that it is the last or not.

        The engine's STOP is that of a stop token or, for any other token, that of a grammar which has ended.
        """
        assert index == self._next_index, f"token {index} after {self._next_index - 1}"
        self._next_index += 1
        if finish_reason is FinishReason.STOP and token_id in self._stop_ids:
            text = self._text.push_stop(token_id)
        else:
            text = self._text.push(token_id).text
            if finish_reason is not None:
                text += self._text.flush()
        if self._text.stopped:
            finish_reason = FinishReason.STOP
        row = link_pb2.StepRow(
            handle=self._handle,
            index=index,
            ids=(token_id,),
            text=text.encode(),
            finish_reason=finish_to_wire(finish_reason),
            logprobs=logprobs_to_wire((logprobs,)) if logprobs is not None else None,
            prompt_logprobs=logprobs_to_wire(prompt_logprobs),
        )
        if self._text.stopped:
            row.stop_string = 1 + self._stops.index(self._text.stop_string)
        if speculation is not None and finish_reason is not None:
            row.speculation.CopyFrom(common_pb2.DraftCounts(**drafts_to_fields(speculation)))
        return row


@dataclass(slots=True, kw_only=True)
class RoleRequest:
    """One command that begins work here, from its arrival until nothing of it is left."""

    handle: Handle
    request_id: str
    """The router names the request so, and logs repeat it. Nothing is decided by it."""
    seq_id: SeqId
    prompt_hash: bytes
    prompt_len: int
    output: OutputStream
    failed: bool = False
    """It has failed here, and what is left of it waits for its end."""


Request = TypeVar("Request", bound=RoleRequest)
Item = TypeVar("Item", Lent, ReserveResult, Advance, OutputToken)
Result = TypeVar("Result")


class HostedRole(ABC, Generic[Request]):
    """The role of a worker, prefill or decode: its requests, and the ring around each of them. Loop thread only.

    A fault of ours in one request costs only that request: see `_each`. A fault of the engine costs the worker.
    """

    name: ClassVar[str]

    def __init__(self, host: Host) -> None:
        self._host = host
        self._by_handle: dict[Handle, Request] = {}
        self._by_seq: dict[SeqId, Request] = {}
        self._compilations = Compilations(host.start_grammar or no_grammars, functools.partial(fail_unstarted, host))

    @abstractmethod
    def on_command(self, message: link_pb2.RouterMessage) -> None:
        """Handle one command of the router."""

    @abstractmethod
    def on_step(self, events: StepEvents) -> None:
        """Handle the events of one engine step."""

    def on_link_lost(self) -> None:
        """Cancel all requests of the router, because the link is lost and the router has dropped them."""
        self._compilations.cancel_all(lambda handle: not is_direct(handle))
        for handle in [one for one in self._by_handle if not is_direct(one)]:
            self._cancel(handle)

    def drop_all(self) -> None:
        """Cancel all requests, because this life of the worker ends."""
        self._compilations.cancel_all()
        for handle in list(self._by_handle):
            self._cancel(handle)

    def has(self, handle: Handle) -> bool:
        """Tell whether something of a request is left here, such as its lease."""
        return handle in self._by_handle

    def on_tick(self) -> None:
        """Do the periodic work. The worker calls this at every heartbeat."""

    @property
    def leases_held(self) -> int:
        """The number of leases that this worker has granted and still holds."""
        return 0

    @property
    def damage(self) -> KvDamage:
        """The damaged blocks of KV since the start."""
        return KvDamage()

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True when no request, lease, read or clean-up is left. The engine may still run its last step."""

    async def close(self) -> None:
        """Drop all requests, and wait until their reads have stopped."""
        self.drop_all()
        self._compilations.close()

    def _take(self, command: Prefill | Bind) -> None:
        """Check a command that begins a request, compile its grammar if it has one, and then `_begin` it."""
        handle = Handle(command.handle)
        try:
            spec, resumed = read_request(command, self._host)
            if spec.constraint is None or self._host.draining or self._host.start_grammar is None:
                self._begin(command, spec, resumed, None)
            else:
                then = functools.partial(self._begin, command, spec, resumed)
                self._compilations.begin(handle, command.request_id, spec.constraint, then)
        except PdserveError as exc:
            fail_unstarted(self._host, handle, command.request_id, exc)

    def _each(self, items: Sequence[Item], act: Callable[[Request, Item], Result | None]) -> list[Result]:
        """Handle the parts of an engine step, each of one request, and return what `act` returns for them.

        If our own code fails at a part, only its request fails. Parts of requests that have ended or failed are left out.
        """
        results = []
        for item in items:
            request = self._by_seq.get(item.seq_id)
            if request is None or request.failed:
                continue
            try:
                result = act(request, item)
            except Exception as exc:
                log.exception("request %s", request.request_id)
                self._fail_alone(request, InternalBug(f"{self.name} worker: {exc!r}"))
            else:
                if result is not None:
                    results.append(result)
        return results

    def _fail_alone(self, request: Request, error: PdserveError) -> None:
        """Fail a request. If our own code fails at that too, the other requests of the step still get what is theirs."""
        try:
            self._fail(request, error)
        except Exception:
            log.exception("request %s could not be failed", request.request_id)

    def _take_losses(self, events: StepEvents) -> None:
        """Note which requests were preempted, and fail those that the engine could not go on with."""
        for seq_id in events.preempted:
            if (request := self._by_seq.get(seq_id)) is not None:
                self.note(request, WorkKind.PREEMPTED)
        for seq_id in events.failed:
            if (request := self._by_seq.get(seq_id)) is not None:
                worker_id = self._host.config.worker_id
                self._fail_alone(request, NumericalError(f"the logits of a step were not finite numbers on worker {worker_id}"))
        for seq_id, error in events.given_up:
            if (request := self._by_seq.get(seq_id)) is not None:
                self._fail_alone(request, error)
        for seq_id, reason in events.grammars_failed:
            if (request := self._by_seq.get(seq_id)) is not None:
                self._fail_alone(request, InvalidRequest(reason, field=FIELD))  # the same request would fail anywhere

    def note(self, request: Request, kind: WorkKind, **fields: Value) -> None:
        """Write down what has just happened to a request."""
        self._host.stories.note(request.request_id, kind, **fields)

    @abstractmethod
    def _begin(self, command: Any, spec: RequestSpec, resumed: tuple[int, ...], grammar: GrammarState | None) -> None:
        """Give a request to the engine, or refuse it."""

    @abstractmethod
    def _cancel(self, handle: Handle) -> None:
        """Drop a request, because the router has cancelled or dropped it."""

    @abstractmethod
    def _fail(self, request: Request, error: PdserveError) -> None:
        """Tell the router that a request has failed here, and release what nobody else needs of it."""
