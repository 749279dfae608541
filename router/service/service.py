"""The router service is the shell around the core. It performs the core's effects, tells the core what happens, and serves the
front ends.

All of it runs on one loop. Between two awaits the core gets one event and its effects are performed at once, in order, so
nobody sees a half-applied change.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.config import RouterConfig
from pdserve.core.errors import Cancelled, InternalBug, Overloaded, PdserveError, RouterStopping
from pdserve.core.ids import Incarnation, RequestId, WorkerId
from pdserve.core.report import RequestRecord
from pdserve.core.sampling import SEED_LIMIT, Placement
from pdserve.core.worker import Role, check_budget
from pdserve.observe.metrics import WINDOW_S, Attainment, Metrics
from pdserve.observe.metrics_pages import MetricsPages
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from router.api.answer import Generation
from router.api.explanation import Explanation
from router.api.identity import KEY_BYTES, CancelTokens, ClientNames
from router.api.request import DetokenizeInput, GenerateInput, TokenizeInput
from router.api.router_api import Archive, ModelInfo
from router.core import events as ev
from router.core.registry import Worker
from router.core.router_core import RouterCore
from router.recording.transcript import Notes
from router.service.admission import Admission, Grammars, check_workers, unsendable
from router.service.bound_limits import BoundLimits
from router.service.buffered_generation import BufferedGeneration, Deliveries, slow_clients
from router.service.chats import Chats, constraint_named
from router.service.explaining import Explainer
from router.service.loop_time import LoopBudget
from router.service.model import LengthLimit, ServedModel
from router.service.policies import rankings_of
from router.service.prompts import PromptEncoder
from router.service.snapshots import cluster_snapshot, worker_snapshot
from router.service.tokenizer_files import TokenizerFiles
from router.workers.link import Links, LinkService
from router.workers.wire import Heard, WorkExplained, command_to_wire, welcome

logger = logging.getLogger(__name__)

TICK_S = 0.1  # the time between ticks while requests run; a passed deadline is noticed at most so late
LATE_S = 0.5  # no load makes the loop this late, so the process or the machine was stopped
NOTED_LATE_S = 0.05  # a tick that is late by less is on time
IDLE_TICK_S = 1.0  # the time between ticks while no request runs; only silent workers are looked for
CHECK_TICKS = 50  # ticks between two checks of the core's books, if these are short enough for a millisecond
CHECK_MAX_REQUESTS = 64
LAST_WORD_S = 1.0  # the time in which clients read the end of a request that the router's end cuts off
STOPPING = "the router is stopping"

_PROGRESS = (ev.StepRows, ev.Reserved, ev.PrefillStarted, ev.KvCommitted)
"""Events that do not change whether workers are ready. If their worker was silent, the next tick notices that it is not."""


class RouterService:
    """Implements `RouterApi` and `AdminApi` of `router.api.router_api`. `start` it on the loop that it is to run on, and
    `close` it."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        *,
        cluster_token: str = "",
        links: Links | None = None,
        notes: Notes | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """`links` serves the workers' links. None: a `LinkService` under `cluster_token` serves them on this loop.

        `notes` takes every event of the core. None: nobody does. `seed` is the core's only source of chance. None: it is drawn.
        """
        self.model = model
        self.model_name = model.name
        self.max_body_bytes = config.max_body_bytes
        self.max_deadline_s = config.max_deadline_s
        self.default_deadline_s = config.default_deadline_s
        self.incarnation = Incarnation(secrets.randbits(64))
        self.cancel_tokens = CancelTokens(self.incarnation, secrets.token_bytes(KEY_BYTES))
        self.clients = ClientNames(config.fairness_key, secrets.token_bytes(KEY_BYTES))
        self.links: Links = links or LinkService(cluster_token, self.hear, return_s=config.heartbeat_lost_s)
        apart = config.placement == Placement.DISAGGREGATED.value
        self._needed_roles = (Role.DECODE, Role.PREFILL) if apart else (Role.DECODE,)
        self._stalled_client_s = config.stalled_client_s
        self._clock = clock
        self._started_s = clock()
        self._notes = notes
        self._attainment = Attainment()
        self._metrics = Metrics(self.snapshot, model.name)
        self._bound = BoundLimits()
        self._pages = MetricsPages(self.snapshot, self._metrics.page, clock)
        seed = secrets.randbits(64) if seed is None else seed
        self._core = RouterCore(config, model.card.fingerprint, rankings_of(config, self._metrics.policy_fault), seed)
        self._explainer = Explainer(self._core, self.links, clock)
        self._limit = LengthLimit(model, self._core.registry)
        self.max_inflight_body_bytes = config.max_inflight_body_bytes
        self.max_inflight_answer_bytes = config.max_inflight_answer_bytes
        self._tokenizer_files = TokenizerFiles(model.directory, config.chat_template)
        self._encoder = PromptEncoder(model, self._limit)
        self._loop_budget = LoopBudget()
        self._chats = Chats(model.tokenizer, config)
        self.unenforced = self._chats.unenforced
        self._grammars = Grammars(model)
        self._admission = Admission(
            config,
            model,
            self._limit,
            self._encoder,
            partial(secrets.randbelow, SEED_LIMIT),
            lambda: self._core.prefix_index.block_size,
            self._grammars.check,
            lambda: self._core.registry.model_digest,
        )
        self._live: dict[RequestId, BufferedGeneration] = {}  # the core may still emit deltas of these
        self._open: dict[BufferedGeneration, None] = {}  # a client may still read from these
        self._admitted: dict[str, ev.Submit] = {}  # what these were admitted as, by request id; siblings take it over
        self._deliveries = Deliveries()
        self._busy = asyncio.Event()
        self._ready = False
        self._leaving = False
        self._all_taken = asyncio.Event()
        self._last_word: PdserveError | None = None
        """The error of all requests that are cancelled now, because the router ends. None: it does not end yet."""
        self._ready_flipped = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the ticks of the core on the running loop."""
        assert self._ticker is None
        forms = self._chats.call_form or "none", self._chats.reasoning_form or "none"
        logger.info("calls of tools are read by the parser %s, reasoning by %s", *forms)
        self._ticker = asyncio.create_task(self._tick_for_ever())

    async def wind_down(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Refuse new requests, and let those that run end. After `limit_s`, or when `hurry` is set, the rest ends with
        `RouterStopping`, and their clients get a moment to hear it."""
        self._leaving = True
        self._note_ready()
        logger.info("%d requests run; new ones are refused", len(self._live))
        if not self._open:
            self._all_taken.set()
        waits = [asyncio.create_task(event.wait()) for event in (hurry, self._all_taken)]
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._last_word = RouterStopping(f"{STOPPING}: its time to finish streams is over; send the request again")
        for request_id in list(self._live):
            self.cancel(request_id)
        await _wait_set(self._all_taken, LAST_WORD_S)

    async def close(self) -> None:
        """Cancel every request and stop. The servers belong to those who made them, who close them. Idempotent."""
        for request_id in list(self._live):
            self.cancel(request_id)
        if self._ticker is not None:
            ticker, self._ticker = self._ticker, None
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        self._pages.close()
        self._encoder.close()
        self._tokenizer_files.close()
        await self._grammars.close()

    # The interface of front ends ----------------------------------------------------------------------------------------------

    async def submit(self, request: GenerateInput) -> Generation:
        """Implements `RouterApi.submit`. A refused request is counted in the metrics."""
        arrived_s = self._clock()
        await self._loop_budget.admit()
        try:
            prepared = self._chats.prepare(request)
            written = prepared.constraint is not None  # only then a grammar can fail, which the client may not have written
            async with constraint_named(request, self._grammars.check) if written else contextlib.nullcontext():
                submit = await self._admit(prepared, arrived_s)
            return self._chats.read(self._start(submit), request, submit.spec.prompt_ids)
        except PdserveError as exc:
            self._refused(request, exc)
            raise

    async def _admit(self, request: GenerateInput, arrived_s: float) -> ev.Submit:
        if self._leaving:
            raise RouterStopping(f"{STOPPING}, and takes no new requests: send the request again, to another router or later")
        try:
            leader = self._admitted.get(request.leader)
            submit = await self._admission.admit(request, arrived_s=arrived_s, leader=leader)
        except Overloaded:
            self._core.requests.demand.count_refusal(self._admission.class_name(request.slo_class))  # the core counts its own
            raise
        check_workers(submit.spec, self._core.registry)
        return submit

    def _refused(self, request: GenerateInput, exc: PdserveError) -> None:
        """Count a refused request: by its class if it names one that is known here."""
        self._metrics.rejected(exc.code.value)
        if (slo_class := self._admission.known_class(request.slo_class)) is not None:
            reason = exc.reason if isinstance(exc, Overloaded) and exc.reason else exc.code.value
            self._metrics.slo.refused(slo_class.name, reason)
            self._attainment.refused(slo_class.name, self._clock())

    def cancel(self, request_id: str) -> bool:
        """Implements `RouterApi.cancel`."""
        known = RequestId(request_id) in self._live
        if known:
            self.tell(ev.ClientGone(RequestId(request_id)))
        return known

    def drain(self, worker_id: str, *, force: bool = False) -> None:
        """Implements `AdminApi.drain`."""
        self.tell(ev.DrainAsked(WorkerId(worker_id), spare_last=not force))

    def flip(self, worker_id: str, role: Role, incarnation: int) -> None:
        """Implements `AdminApi.flip`."""
        self.tell(ev.FlipAsked(WorkerId(worker_id), role, Incarnation(incarnation) if incarnation else None))

    def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int = 0) -> None:
        """Implements `AdminApi.set_budget`."""
        for worker_id in worker_ids:  # all are checked before one is told
            check_budget(self._core.linked(WorkerId(worker_id)).hello, max_num_batched_tokens, max_num_seqs)
        for worker_id in worker_ids:
            self.tell(ev.BudgetAsked(WorkerId(worker_id), max_num_batched_tokens, max_num_seqs))

    async def explain(self, name: str) -> Explanation:
        """Implements `AdminApi.explain`."""
        return await self._explainer.explain(name)

    async def tokenize(self, asked: TokenizeInput) -> tuple[int, ...]:
        """Implements `RouterApi.tokenize`."""
        self._admission.check_model(asked.model)
        return await self._encoder.encode(asked.prompt, asked.client, add_special_tokens=asked.add_special_tokens)

    async def detokenize(self, asked: DetokenizeInput) -> str:
        """Implements `RouterApi.detokenize`."""
        self._admission.check_model(asked.model)
        return await self._encoder.decode(asked)

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Implements `RouterApi.spellings`."""
        return [self.model.tokenizer.spelling(token_id) for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Implements `RouterApi.token_bytes`."""
        return self.model.tokenizer.written_bytes(token_id)

    def text_of(self, ids: Sequence[int], *, after: Sequence[int]) -> str:
        """Implements `RouterApi.text_of`."""
        return self.model.tokenizer.decode(ids, after=after)

    @property
    def ready(self) -> bool:
        """Implements `RouterApi.ready`."""
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """The reason why a request that names no placement would not be served now. Empty: it would be served."""
        if self._leaving:
            return STOPPING
        for role in self._needed_roles:
            if not any(self._serves(worker) for worker in self._core.registry.of_role(role)):
                return f"no {role.value} worker is ready"
        return ""

    def _serves(self, worker: Worker) -> bool:
        return not self._core.placer.not_ready_reason(worker, now_s=self._clock())

    async def next_ready(self, known: bool) -> bool:
        """Implements `RouterApi.next_ready`."""
        while self.ready == known:
            await self._ready_flipped.wait()
            self._ready_flipped.clear()
        return not known

    @property
    def max_model_len(self) -> int:
        """Prompt and output of one request together have at most this many tokens."""
        return self._limit.max_model_len

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt may have at most this many tokens, since one token of output must fit after it."""
        return self._limit.max_model_len - 1

    def model_info(self) -> ModelInfo:
        """Implements `RouterApi.model_info`."""
        model = self.model
        return ModelInfo(
            model=model.name,
            architecture=model.card.architecture,
            vocab_size=model.card.vocab_size,
            max_model_len=self.max_model_len,
            block_size=model.kv_spec.block_size,
            dtype=model.dtype,
            kv_cache_dtype=model.kv_spec.dtype,
            kv_bytes_per_token=model.kv_spec.bytes_per_token,
            eos_token_ids=model.card.eos_token_ids,
            has_chat_template=model.tokenizer.has_chat_template,
        )

    async def tokenizer_files(self) -> Archive:
        """Implements `RouterApi.tokenizer_files`."""
        return await self._tokenizer_files.archive()

    def ignored_fields(self, endpoint: str, count: int) -> None:
        """Implements `RouterApi.ignored_fields`."""
        self._metrics.ignored_fields(endpoint, count)

    @property
    def streams(self) -> int:
        """Implements `RouterApi.streams`."""
        return self._core.limits.streams

    def connection_refused(self) -> None:
        """Implements `RouterApi.connection_refused`."""
        self._bound.note("connections")

    async def metrics_page(self, *, per_worker: bool) -> bytes:
        """Implements `RouterApi.metrics_page`."""
        return await self._pages.page(per_worker=per_worker)

    def metrics(self) -> bytes:
        """Return all metrics of this moment. The loop stands still meanwhile, so this is for small clusters in one process."""
        return self._metrics.render()

    def snapshot(self) -> ClusterSnapshot:
        """Implements `RouterApi.snapshot` and `AdminApi.snapshot`. Metrics show it as well."""
        now_s = self._clock()
        classes = self._attainment.classes(now_s), WINDOW_S
        self._note_bound()
        return cluster_snapshot(
            self._core, self.incarnation, classes, self._bound.counts, now_s=now_s, uptime_s=now_s - self._started_s
        )

    def worker(self, worker_id: str) -> WorkerSnapshot | None:
        """Implements `AdminApi.worker`."""
        worker = self._core.registry.find(WorkerId(worker_id))
        return None if worker is None else worker_snapshot(self._core, worker, now_s=self._clock())

    # Events in, effects out --------------------------------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """Take what a link delivers: an answer to a question, or an event for the core."""
        if isinstance(heard, WorkExplained):
            self._explainer.answered(heard)
        else:
            self.tell(heard)

    def tell(self, event: ev.Event) -> None:
        """Give the core an event and perform its effects. Every event except a Submit goes through here. A bug of the core is
        raised after the effects were performed."""
        bug = self._perform(self._handle(event))
        if type(event) not in _PROGRESS:
            self._note_ready()
        if bug is not None:
            raise bug

    def _start(self, submit: ev.Submit) -> BufferedGeneration:
        generation = BufferedGeneration(
            submit.request_id, submit.spec.prompt_ids, self._released, self._deliveries, submit.spec.sampling
        )
        effects = self._handle(submit)  # raises before anything is registered
        self._live[submit.request_id] = generation
        self._open[generation] = None
        self._admitted[submit.request_id] = submit
        self._busy.set()
        bug = self._perform(effects)
        if bug is not None:
            try:
                self._released(generation)  # the core may have taken the request
            finally:
                self._live.pop(submit.request_id, None)
            raise bug
        return generation

    def _handle(self, event: ev.Event) -> list[ev.Effect]:
        now_s = self._clock()
        if self._notes is None:
            return self._core.handle(event, now_s=now_s)
        try:
            effects = self._core.handle(event, now_s=now_s)
        except Exception as exc:
            self._notes.note(now_s, event, exc)
            raise
        self._notes.note(now_s, event, effects)
        return effects

    def _perform(self, effects: list[ev.Effect]) -> Exception | None:
        """Perform the effects in their order. Return the first bug that they report, after a look at the core's books."""
        bug: Exception | None = None
        for effect in effects:
            if isinstance(effect, ev.EmitDelta):
                self._live[effect.request_id].push(effect.delta)
            elif isinstance(effect, ev.SendWelcome):
                self.links.send(effect.link, welcome(self.incarnation, effect.link_version))
            elif isinstance(effect, ev.CloseLink):
                self.links.hang_up(effect.link, effect.error)
            elif isinstance(effect, ev.EmitDone):
                self._ended(effect.request_id, effect, None)
            elif isinstance(effect, ev.EmitFailed):
                self._ended(effect.request_id, effect, self._last_word or effect.error)
            elif isinstance(effect, ev.ReportBug):
                bug = bug or effect.bug
            elif (failure := unsendable(effect, self._core.registry)) is not None:  # the present effects come first
                asyncio.get_running_loop().call_soon(self.tell, failure)
            else:
                self.links.send(effect.link, command_to_wire(effect))
        if bug is not None:
            self._check_books()
        return bug

    def _ended(self, request_id: RequestId, effect: ev.EmitDone | ev.EmitFailed, error: PdserveError | None) -> None:
        generation = self._live.pop(request_id)
        generation.end(effect.report, error)
        end = error or generation.finish_reason
        if end is None:
            raise InternalBug(f"request {request_id} is done without a finish reason")
        record = RequestRecord.of(effect.report, end)
        self._metrics.finished(record)
        self._attainment.finished(record, self._clock())
        logger.info("%s", record.line())

    def _released(self, generation: BufferedGeneration) -> None:
        """Cancel the request if it still runs: its client has taken all of it, or is gone."""
        self._open.pop(generation, None)
        if self._leaving and not self._open:
            self._all_taken.set()
        self._admitted.pop(generation.request_id, None)
        if self._live.get(RequestId(generation.request_id)) is generation:
            self.tell(ev.ClientGone(RequestId(generation.request_id)))

    # Time --------------------------------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        """Tick until cancelled. After the process stood still one tick is left out, so that heartbeats that wait in the sockets
        are read before a worker is found silent. The next tick carries the time by which ticks were late."""
        late, late_s = False, 0.0
        for turn in itertools.count():
            began_s = self._clock()
            due_s = TICK_S if self._open else IDLE_TICK_S
            if self._open:
                await asyncio.sleep(due_s)
            else:
                self._busy.clear()
                await self._wait_busy(due_s)
            passed_s = self._clock() - began_s
            late = not late and passed_s > IDLE_TICK_S + LATE_S
            late_s += passed_s - due_s if passed_s > due_s + NOTED_LATE_S else 0.0
            if not late:
                self._tick(late_s)
                late_s = 0.0
                self._drop_slow_clients()
            if turn % CHECK_TICKS == 0 and self._core.num_requests <= CHECK_MAX_REQUESTS:
                self._check_books()

    def _tick(self, late_s: float = 0.0) -> None:
        try:
            self.tell(ev.Tick(self.links.take_alive(), late_s))
        except Exception:  # a bug of ours costs the requests that it concerned, and later ticks are still given
            logger.exception("the core failed on a tick")
        self._note_bound()
        self._bound.warn(self._clock())

    def _note_bound(self) -> None:
        self._bound.counts["queue"] = self._core.queue_bound
        self._bound.counts["prefix_index"] = self._core.prefix_index.evicted

    def _check_books(self) -> None:
        """Check the core's invariants. A broken one is our own bug: operators hear of it in the log and the metrics, clients do
        not."""
        try:
            self._core.check_invariants()
        except AssertionError:
            self._metrics.invariant_broken()
            logger.exception("the books of the core disagree")

    async def _wait_busy(self, timeout_s: float) -> None:
        await _wait_set(self._busy, timeout_s)

    def _drop_slow_clients(self) -> None:
        slow = slow_clients(self._open, self._clock(), self._stalled_client_s, self.max_inflight_answer_bytes)
        for generation, why in slow.items():
            logger.warning("request %s: %s", generation.request_id, why)
            generation.drop_client(Cancelled(why))

    def _note_ready(self) -> None:
        ready = self.ready
        if ready != self._ready:
            self._ready = ready
            self._ready_flipped.set()


async def _wait_set(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` would lose a cancellation that comes with the event
            await event.wait()
    except TimeoutError:
        pass
