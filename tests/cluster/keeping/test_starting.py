"""The workers with which a cluster starts: all that run already, and what is missing."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster import plan
from pdserve.config import ClusterConfig
from pdserve.planner.limits import PoolSizes

RUNNING = st.dictionaries(
    st.builds("{}-{}".format, st.sampled_from(["prefill", "decode"]), st.integers(0, 12)),
    st.sampled_from(["prefill", "decode"]),  # a worker that has changed its role keeps its id
    max_size=8,
)


@given(running=RUNNING, prefill=st.integers(0, 4), decode=st.integers(1, 4))
def test_every_running_worker_is_adopted_and_only_missing_ones_are_added(
    running: dict[str, str], prefill: int, decode: int
) -> None:
    workers = plan.starting(running, PoolSizes(prefill, decode))
    assert running.items() <= workers.items()
    for role, replicas in (("prefill", prefill), ("decode", decode)):
        there = list(running.values()).count(role)
        assert list(workers.values()).count(role) == max(there, replicas)


def test_a_lasting_cluster_plans_lasting_workers_which_are_looked_for_where_they_ran() -> None:
    blueprint = plan.Blueprint(ClusterConfig(), "127.0.0.1:1", "", Path("/logs"), plan.WORKER_ENTRIES, "mine")
    plans = blueprint.plan_these({"prefill-0": "prefill", "decode-0": "decode"}, hosts={"decode-0": "10.0.0.2"})
    assert [(each.lasting, each.host) for each in plans] == [("mine", ""), ("mine", "10.0.0.2")]
