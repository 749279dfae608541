"""The shell around the pure core: performs its effects, keeps time, and gives front ends something to iterate."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final

from pdserve.checkpoint.card import ModelCard
from pdserve.config import RouterConfig
from pdserve.core.errors import Cancelled, PdserveError
from pdserve.core.ids import Incarnation, RequestId
from pdserve.core.kv_layout import KvLayout
from pdserve.observe.metrics import FinishedRequest, Gauges, RouterMetrics, WorkerGauges
from pdserve.rpc.v1 import link_pb2
from pdserve.text.tokenizer import Tokenizer
from router import admission, wire
from router.admission import Limits
from router.api import GenerateInput, Prompt, Report
from router.core import RouterCore
from router.events import (
    ClientGone,
    CloseLink,
    Effect,
    EmitDelta,
    EmitDone,
    EmitFailed,
    Event,
    LinkId,
    Role,
    SendWelcome,
    Tick,
)
from router.generation import RunningGeneration
from router.link import Link

log = logging.getLogger(__name__)

TICK_S: Final = 0.05
"""How late a deadline may be noticed; an idle router wakes up that often, which costs it 0.1 % of a core."""
ENCODE_IN_THREAD_CHARS: Final = 4096
"""Texts above it take more than a millisecond to tokenise and would hold up every stream."""


class RouterService:
    """Implements `router.api.RouterApi` and `router.link.Hub`. Loop-owned."""

    def __init__(
        self,
        config: RouterConfig,
        card: ModelCard,
        tokenizer: Tokenizer,
        layout: KvLayout,
        *,
        model_name: str,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.card = card
        self.layout = layout
        self.has_chat_template = tokenizer.has_chat_template
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.max_body_bytes = config.max_body_bytes
        self.incarnation = Incarnation(secrets.randbits(64))
        self.core = RouterCore(config, card.fingerprint)
        self._tokenizer = tokenizer
        self._limits = Limits(model_name, card.vocab_size, max_model_len, config.default_deadline_s, config.max_deadline_s)
        self._metrics = RouterMetrics(self._gauges)
        self._links: dict[LinkId, Link] = {}
        self._last_link_id = 0
        self._generations: dict[RequestId, RunningGeneration] = {}

    async def run(self) -> None:
        """Until cancelled: keep time."""
        while True:
            await asyncio.sleep(TICK_S)
            self._cancel_stalled()
            self.handle(Tick())

    # Front ends.

    async def submit(self, request: GenerateInput) -> RunningGeneration:
        """Check, tokenise, queue. Raises `PdserveError`."""
        try:
            admission.check_model(request.model, self._limits)
            arrived_s = self.now_s()
            ids = await self._encode(request.prompt)
            submit = admission.submission(request, ids, self._limits, now_s=arrived_s)
            generation = RunningGeneration(submit.request_id, len(ids), self._client_gone, arrived_s)
            effects = self.core.handle(submit, now_s=self.now_s())
        except PdserveError as exc:
            self._refused(request, exc)
            raise
        self._generations[submit.request_id] = generation
        self._perform(effects)
        return generation

    def cancel(self, request_id: str) -> bool:
        found = self.core.is_live(RequestId(request_id))
        if found:
            self.handle(ClientGone(RequestId(request_id)))
        return found

    async def tokenize(self, model: str | None, prompt: Prompt) -> tuple[int, ...]:
        admission.check_model(model, self._limits)
        return await self._encode(prompt)

    @property
    def ready(self) -> bool:
        return any(worker.hello.role is Role.DECODE for worker in self.core.registry)

    def metrics(self) -> bytes:
        return self._metrics.text()

    def now_s(self) -> float:
        return time.monotonic()

    # Links.

    def open_link(self, link: Link) -> LinkId:
        self._last_link_id += 1
        link_id = LinkId(self._last_link_id)
        self._links[link_id] = link
        return link_id

    def forget_link(self, link_id: LinkId) -> None:
        self._links.pop(link_id, None)

    def handle(self, event: Event) -> None:
        self._perform(self.core.handle(event, now_s=self.now_s()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case EmitDelta(request_id, delta):
                    self._generations[request_id].put(delta, self.now_s())
                case EmitDone(request_id, report):
                    self._ended(request_id, report, None)
                case EmitFailed(request_id, error, report):
                    self._ended(request_id, report, error)
                case SendWelcome(link_id):
                    self._send(link_id, link_pb2.RouterMessage(welcome=link_pb2.Welcome(router_incarnation=self.incarnation)))
                case CloseLink(link_id, error):
                    if link_id in self._links:
                        self._links[link_id].close(error)
                case _:
                    self._send(effect.link, wire.command(effect))

    def _send(self, link_id: LinkId, message: link_pb2.RouterMessage) -> None:
        link = self._links.get(link_id)
        if link is not None:  # a link that has gone is reported by its own WorkerLeft
            link.send(message)

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        size = len(prompt) if isinstance(prompt, str) else sum(len(getattr(m, "content", "")) for m in prompt)
        if size > ENCODE_IN_THREAD_CHARS:
            return await asyncio.to_thread(admission.encode, prompt, self._tokenizer, self._limits)
        return admission.encode(prompt, self._tokenizer, self._limits)

    def _client_gone(self, request_id: RequestId) -> None:
        self.handle(ClientGone(request_id))

    def _cancel_stalled(self) -> None:
        """A client that takes nothing holds blocks on two workers for nobody."""
        stalled_before_s = self.now_s() - self.config.stalled_client_s
        for generation in list(self._generations.values()):
            since_s = generation.waiting_since_s
            if since_s is not None and since_s < stalled_before_s:
                log.warning(
                    "request %s: its client took nothing for %.0f s", generation.request_id, self.config.stalled_client_s
                )
                self.handle(ClientGone(RequestId(generation.request_id)))

    # The end of a request.

    def _ended(self, request_id: RequestId, report: Report, error: PdserveError | None) -> None:
        self._generations.pop(request_id).end(report, error)
        outcome = "ok" if error is None else error.code.value
        self._metrics.saw(
            FinishedRequest(
                outcome=outcome,
                placement=report.placement.value,
                placement_reason=report.placement_reason,
                prompt_tokens=report.prompt_tokens,
                output_tokens=report.output_tokens,
                kv_bytes=report.kv_bytes,
                queue_s=report.queue_s,
                ttft_s=report.ttft_s,
                tpot_s=report.tpot_s,
                total_s=report.total_s,
                exposed_transfer_s=report.exposed_transfer_s,
            )
        )
        log.log(
            logging.INFO if error is None or isinstance(error, Cancelled) else logging.WARNING,
            "request %s %s: %s (%s) prefill=%s decode=%s prompt=%d output=%d ttft=%.1fms tpot=%.2fms total=%.1fms "
            "kv=%dB exposed=%.2fms%s",
            request_id,
            outcome,
            report.placement.value,
            report.placement_reason or "not placed",
            report.prefill_worker or "-",
            report.decode_worker or "-",
            report.prompt_tokens,
            report.output_tokens,
            report.ttft_s * 1e3,
            report.tpot_s * 1e3,
            report.total_s * 1e3,
            report.kv_bytes,
            report.exposed_transfer_s * 1e3,
            "" if error is None else f": {error.message}",
        )

    def _refused(self, request: GenerateInput, error: PdserveError) -> None:
        log.info("request %s refused, %s: %s", request.request_id or "-", error.code.value, error.message)
        self._metrics.saw(FinishedRequest(error.code.value, "", "", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0))

    def _gauges(self) -> Gauges:
        waiting = len(self.core.waiting)
        workers = tuple(
            WorkerGauges(
                worker.hello.worker_id,
                worker.hello.role.value,
                worker.load.blocks,
                worker.load.queued_requests,
                worker.load.running_sequences,
                worker.load.leases_held,
                worker.load.loop_lag_ms,
            )
            for worker in self.core.registry
        )
        return Gauges(waiting, self.core.num_requests - waiting, workers)
