"""The actuator's report to the router, for operators. Every part of it is bounded, so that it fits one message. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from pdserve.cluster.events import WorkerChanged
from pdserve.cluster.scaling.wanted import WantedSizes
from pdserve.core.worker import Role
from pdserve.planner.observe import ClusterReading, WorkerReading
from pdserve.planner.planner import Plan, PoolNeed
from pdserve.planner.reasons import setting_of
from pdserve.planner.resizing import Phase, PoolMember
from pdserve.rpc.codec import demand_from_wire, hello_from_wire, load_from_wire
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2

ROLES: Final = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}
EVENTS: Final = 16  # of one report; the rest follows with the next one. All parts together stay under the port's 64 KiB
MEMBERS: Final = 96
REASONS: Final = 8
TEXT_CHARS: Final = 500
DETAIL_CHARS: Final = 160


def report_of(
    wanted: WantedSizes,
    members: Sequence[PoolMember],
    said: Mapping[str, WorkerChanged],
    notes: Iterable[str],
    now_s: float,
) -> scaling_pb2.ScalingReport:
    """Return the report. said: the last phase of each worker. notes: sentences beside the reasons."""
    return scaling_pb2.ScalingReport(
        mode=wanted.mode.value,
        prefill=wanted.sizes.prefill,
        decode=wanted.sizes.decode,
        order=wanted.taken,
        reasons=_texts((*notes, *wanted.reasons)),
        members=_members(members, said),
        events=[
            scaling_pb2.ScalingEvent(
                age_s=max(0.0, now_s - event.at_s),
                text=_clean(event.text, TEXT_CHARS),
                prefill=event.sizes.prefill,
                decode=event.sizes.decode,
            )
            for event in islice(wanted.events, EVENTS)
        ],
        refused=_clean(wanted.refused, TEXT_CHARS),
    )


def plan_to_wire(plan: Plan, age_s: float) -> scaling_pb2.ScalingPlan:
    """Return the planner's plan, made `age_s` ago."""
    return scaling_pb2.ScalingPlan(
        age_s=max(0.0, age_s), reasons=_texts(plan.reasons), pools=[_need_to_wire(pool) for pool in plan.pools]
    )


def _need_to_wire(need: PoolNeed) -> scaling_pb2.PoolNeed:
    return scaling_pb2.PoolNeed(
        role=ROLES[need.role],
        demand_tokens_per_s=need.demand_tokens_per_s,
        worker_tokens_per_s=need.worker_tokens_per_s,
        correction=need.correction,
        raw_workers=need.raw_workers,
        wanted=need.wanted,
        size=need.size,
        limits=_texts(map(setting_of, need.limits)),
    )


def _members(members: Sequence[PoolMember], said: Mapping[str, WorkerChanged]) -> list[scaling_pb2.ScalingMember]:
    """Return the workers that come, leave or change. Those that serve are linked to the router, which knows them."""
    shown = [member for member in members if member.phase is not Phase.SERVING or not member.ready]
    return [
        scaling_pb2.ScalingMember(
            worker_id=_clean(member.worker_id, DETAIL_CHARS),
            role=ROLES[member.role],
            phase=_phase(member, said.get(member.worker_id)),
            detail=_clean(event.detail, DETAIL_CHARS) if (event := said.get(member.worker_id)) is not None else "",
        )
        for member in shown[:MEMBERS]
    ]


def _phase(member: PoolMember, event: WorkerChanged | None) -> str:
    if member.phase is Phase.LEAVING:
        return "draining"
    if member.phase is Phase.SERVING:  # the router does not place requests on it yet
        return "joining"
    return event.phase.value if event is not None else member.phase.value


def _texts(texts: Iterable[str]) -> list[str]:
    return [_clean(text, TEXT_CHARS) for text in islice(texts, REASONS)]


def _clean(text: str, most_chars: int) -> str:
    """Return the text as printable ASCII, so that its bytes are as bounded as its characters."""
    plain = "".join(char if char.isprintable() else " " for char in text).encode("ascii", "replace").decode()
    return plain if len(plain) <= most_chars else plain[: most_chars - 3] + "..."


# The answer of `GetClusterState` becomes a reading that the planner's observations are built from.


def reading_of(state: inference_pb2.GetClusterStateResponse, *, at_s: float) -> ClusterReading:
    """Return the reading of a state that was told at `at_s`, a time on the reader's clock."""
    return ClusterReading(
        at_s=at_s,
        router_incarnation=state.router_incarnation,
        queued_requests=state.queued_requests,
        demand=demand_from_wire(state.demand),
        workers=tuple(
            WorkerReading(hello_from_wire(one.hello), load_from_wire(one.load), one.ready, one.draining)
            for one in state.workers
        ),
    )
