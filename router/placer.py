"""Placement: from the registry and the ledger, through the policies, to a worker. Decides; changes nothing but its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from router.events import Role
from router.ledger import Ledger, OutputMean
from router.live import LiveRequest
from router.policy import filters, scorers
from router.policy.candidate import Candidate
from router.policy.decider import Reason, decide
from router.policy.picker import pick
from router.registry import Registry, Worker

SUSPECT_SHARE: Final = 0.6
"""Of the time after which a silent worker is lost: from then on it gets nothing new. 3 s of 5 s."""


class Placer:
    def __init__(self, config: RouterConfig, registry: Registry, ledger: Ledger, outputs: OutputMean) -> None:
        self._registry = registry
        self._ledger = ledger
        self._outputs = outputs
        self._configured = Placement(config.placement)
        self._colocate_below_tokens = config.colocate_below_tokens
        self._suspect_s = config.heartbeat_lost_s * SUSPECT_SHARE
        self._turns = dict.fromkeys(Role, 0)  # a shared one would advance by two a handoff and so keep picking one of two

    def decide(self, request: LiveRequest, *, now_s: float) -> tuple[Placement, Reason]:
        """Raises `Unavailable` when nobody here could ever serve the request as asked."""
        decoders = self._candidates(Role.DECODE, now_s)
        if not decoders:
            raise Unavailable("no decode worker is ready")
        if not filters.long_enough(decoders, request.max_len):
            raise Unavailable(f"no decode worker takes a request of {request.max_len} tokens (prompt and max_tokens)")
        return decide(
            request.asked,
            self._configured,
            prompt_tokens=len(request.prompt_ids),
            colocate_below_tokens=self._colocate_below_tokens,
            has_prefill=bool(self._prefillers(request, now_s)),
        )

    def need_tokens(self, request: LiveRequest) -> int:
        """KV that the request will probably take on its decode worker."""
        return len(request.prompt_ids) + self._outputs.expect(request.sampling.max_tokens)

    def decode_worker(self, request: LiveRequest, *, now_s: float) -> Worker | None:
        """None: nobody has room by the estimate."""
        need = self.need_tokens(request)
        fitting = filters.long_enough(filters.alive(self._candidates(Role.DECODE, now_s)), request.max_len)
        roomy = filters.with_room(fitting, need)
        return self._pick(Role.DECODE, roomy, lambda candidate: scorers.decode_score(candidate, need))

    def prefill_worker(self, request: LiveRequest, *, now_s: float) -> Worker | None:
        """None: the pool is empty, or all of it has fallen silent."""
        return self._pick(Role.PREFILL, self._prefillers(request, now_s), scorers.prefill_score)

    def suspect(self, worker: Worker, *, now_s: float) -> bool:
        return now_s - worker.last_seen_s > self._suspect_s

    def _prefillers(self, request: LiveRequest, now_s: float) -> list[Candidate]:
        alive = filters.alive(self._candidates(Role.PREFILL, now_s))
        return filters.long_enough(alive, len(request.prompt_ids) + 1)

    def _pick(self, role: Role, among: list[Candidate], score: Callable[[Candidate], float]) -> Worker | None:
        picked = pick(among, score, self._turns[role])
        if picked is None:
            return None
        self._turns[role] += 1
        return self._registry.get(picked.link)

    def _candidates(self, role: Role, now_s: float) -> list[Candidate]:
        return [
            Candidate(
                link=worker.link,
                kv_tokens=worker.hello.kv_tokens,
                promised_tokens=self._ledger.charged(worker.link),
                free_slots=worker.hello.max_num_seqs - len(worker.work),
                queued_tokens=worker.queued_tokens,
                max_model_len=worker.hello.max_model_len,
                suspect=self.suspect(worker, now_s=now_s),
                refused=worker.refused_blocks is not None,
            )
            for worker in self._registry.of_role(role)
        ]
