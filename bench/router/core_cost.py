"""The cost of one request in the router's core, without links and front ends, against the size of the cluster.

`python -m bench.router.core_cost [--plot FILE]` prints a table. One request is disaggregated, has a prompt of 1,024
tokens and an output of three, and takes seven events from Submit to its end. Each figure is the median over rounds of the
fastest request of a round: the fastest request shows the cost of the code, and the median excludes accidents.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Final, NamedTuple

from pdserve.config import RouterConfig
from pdserve.core.block_hash import PrefixDelta
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.rpc.v1 import link_pb2
from router.core import events as ev
from router.core.policy import splitmix64
from router.core.router_core import RouterCore
from router.service.policies import rankings_of

PROMPT_TOKENS: Final = 1024
BLOCK_SIZE: Final = 16
BLOCKS: Final = 8192
SEQUENCES: Final = 64
ROUNDS: Final = 5
REQUESTS: Final = 60
WORKERS: Final = (1, 10, 100, 500)
WAITING: Final = (0, 100, 1000)
KEYS: Final = (0, 10_000, 100_000, 1_000_000)
POLICIES: Final = ("prefix_aware", "least_loaded", "power_of_two", "round_robin", "random")


class Cluster:
    """A core with idle workers of both roles, and requests that run through it."""

    def __init__(
        self, workers: int, *, policy: str = "prefix_aware", keys: int = 0, waiting: int = 0, slots: int = SEQUENCES
    ) -> None:
        """`keys` are held prefixes, spread evenly over the workers. `waiting` requests wait for room on a worker of their
        own."""
        config = RouterConfig(
            probe_workers=False,
            prefill_policy=policy,
            decode_policy=policy,
            max_queued_requests=2 * waiting + 1,
            max_queued_tokens=1 << 40,
            prefix_index_bytes=1 << 30,
        )
        self.core = RouterCore(config, "model", rankings_of(config, lambda role, reason: None))
        self.now_s = 0.0
        self._names = 0
        self._joined = 0
        self.links = {role: [self._join(role, n, slots) for n in range(workers)] for role in Role}
        self._fill_index(keys)
        if waiting:
            self._fill_queue(waiting)

    def _join(self, role: Role, number: int, slots: int, length: int = 32_768) -> ev.LinkId:
        self._joined += 1
        link = ev.LinkId(self._joined)
        hello = WorkerHello(
            worker_id=WorkerId(f"{role.value}-{length}-{number}"),
            role=role,
            incarnation=Incarnation(link),
            address="127.0.0.1:1",
            model_fingerprint="model",
            block_size=BLOCK_SIZE,
            num_blocks=BLOCKS,
            max_model_len=length,
            max_num_seqs=slots,
            dtype="bfloat16",
            kv_bytes_per_token=1,
        )
        self.tell(ev.WorkerJoined(link, hello))
        return link

    def _fill_index(self, keys: int) -> None:
        links = [link for role in Role for link in self.links[role]]
        share = min(BLOCKS, keys // len(links))
        for link in links:
            held = tuple(splitmix64(link << 32 | n) for n in range(share))
            digest = 0
            for key in held:
                digest ^= key
            self.tell(ev.PrefixSeen(link, PrefixDelta(1, held, (), digest, full=True)))

    def _fill_queue(self, waiting: int) -> None:
        """Let requests wait for which only one full worker is long enough. All other workers stay idle."""
        self._join(Role.PREFILL, 0, 1, 65_536)
        self._join(Role.DECODE, 0, 1, 65_536)
        for _ in range(waiting + 1):
            self.tell(self.submit(max_tokens=40_000))

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        """Give the core an event, a microsecond after the last event."""
        self.now_s += 1e-6
        return self.core.handle(event, now_s=self.now_s)

    def submit(self, *, max_tokens: int = 3, keys: tuple[int, ...] = ()) -> ev.Submit:
        """Make a request."""
        self._names += 1
        spec = RequestSpec(_PROMPT, SamplingParams(max_tokens=max_tokens))
        name = RequestId(f"r{self._names}")
        return ev.Submit(name, spec, arrived_s=self.now_s, deadline_s=self.now_s + 600.0, prefix_keys=keys)

    def run(self) -> float:
        """Run one request from its Submit to its end, and return the seconds that the core took. Heartbeats that end the credit
        of its keys are not counted."""
        first = splitmix64(self._names % self._joined + 1 << 32)
        submit = self.submit(keys=(first, *(splitmix64(first ^ n) for n in range(1, PROMPT_TOKENS // BLOCK_SIZE))))
        taken_s, links = 0.0, list[ev.LinkId]()
        answers: list[ev.Event] = [submit]
        while answers:
            event = answers.pop(0)
            self.now_s += 1e-6
            began_s = time.perf_counter()
            effects = self.core.handle(event, now_s=self.now_s)
            taken_s += time.perf_counter() - began_s
            for effect in effects:
                assert not isinstance(effect, ev.ReportBug | ev.EmitFailed), effect
                links += [effect.link] if isinstance(effect, ev.SendBind | ev.SendPrefill) else []
                answers.extend(_answer(effect))
        assert self.core.requests.get(submit.request_id) is None
        for link in links * 2:
            self.tell(ev.HeartbeatSeen(link, _LOAD))
        return taken_s

    def beat(self) -> float:
        """Give the core a heartbeat of a decode worker and a heartbeat of a prefill worker, and return the mean of their
        seconds."""
        began_s = time.perf_counter()
        for role in Role:
            self.tell(ev.HeartbeatSeen(self.links[role][self._names % len(self.links[role])], _LOAD))
        return (time.perf_counter() - began_s) / 2

    def tick(self) -> float:
        """Give the core one tick, and return the seconds that it took."""
        began_s = time.perf_counter()
        self.tell(ev.Tick())
        return time.perf_counter() - began_s


_PROMPT: Final = tuple(range(PROMPT_TOKENS))
_LOAD: Final = WorkerLoad(BlockCounts(BLOCKS, BLOCKS, 0, 0, 0), last_handle=1 << 40)


def _answer(effect: ev.Effect) -> Iterator[ev.Event]:
    """Yield the events by which a worker answers a command, in order."""
    match effect:
        case ev.SendBind(link=link, work=work):
            yield ev.Reserved(link, work.handle)
        case ev.SendPrefill(link=link, work=work):
            yield ev.PrefillStarted(link, work.handle, LeaseId(Incarnation(link), work.handle), b"ticket")
            yield ev.StepRows(link, [link_pb2.StepRow(handle=work.handle, index=0, ids=[7], text=b"a", finish_reason=0)])
        case ev.SendAttach(link=link, handle=handle):
            yield ev.KvCommitted(link, handle, 1 << 20, 0.01, 0.001, 0.001)
            yield ev.StepRows(link, [link_pb2.StepRow(handle=handle, index=1, ids=[7], text=b"b", finish_reason=0)])
            yield ev.StepRows(link, [link_pb2.StepRow(handle=handle, index=2, ids=[7], text=b"c", finish_reason=2)])
        case _:
            pass


class Cost(NamedTuple):
    """Microseconds of the core for one kind of event, in each measured setting."""

    name: str
    settings: tuple[int, ...]
    us: tuple[float, ...]


def microseconds(measure: Callable[[], float]) -> float:
    """Return the median over rounds of the fastest call of a round, in microseconds. `measure` returns seconds."""
    return 1e6 * median(min(measure() for _ in range(REQUESTS)) for _ in range(ROUNDS))


def costs() -> Iterator[Cost]:
    """Measure everything, one line of the table at a time."""
    for policy in POLICIES:
        clusters = [Cluster(n, policy=policy) for n in WORKERS]
        yield Cost(f"request, {policy}", WORKERS, tuple(microseconds(cluster.run) for cluster in clusters))
    clusters = [Cluster(n) for n in WORKERS]
    yield Cost("heartbeat", WORKERS, tuple(microseconds(cluster.beat) for cluster in clusters))
    yield Cost("tick", WORKERS, tuple(microseconds(cluster.tick) for cluster in clusters))
    clusters = [Cluster(100, waiting=n) for n in WAITING]
    yield Cost("request, so many wait", WAITING, tuple(microseconds(cluster.run) for cluster in clusters))
    yield Cost("heartbeat, so many wait", WAITING, tuple(microseconds(cluster.beat) for cluster in clusters))
    clusters = [Cluster(100, keys=n) for n in KEYS]
    yield Cost("request, so many keys", KEYS, tuple(microseconds(cluster.run) for cluster in clusters))


def main() -> None:
    """Measure, print the table, and draw it where `--plot` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", metavar="FILE", help="write a PNG file; needs matplotlib (pip install pdserve[plot])")
    args = parser.parse_args()
    print(f"{'microseconds of the core for one':34}  setting: cost")
    found = []
    for cost in costs():
        found.append(cost)
        print(
            f"{cost.name:34}  " + "   ".join(f"{n:,}: {us:.1f}" for n, us in zip(cost.settings, cost.us, strict=True)),
            flush=True,
        )
    if args.plot:
        plot(found, args.plot)


def plot(found: list[Cost], path: str) -> None:
    """Draw the costs against workers, waiting requests and held keys, beside each other."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, settings, label in zip(panels, (WORKERS, WAITING, KEYS), _LABELS, strict=True):
        for cost in found:
            if cost.settings == settings:
                label_of = cost.name if settings == WORKERS else cost.name.partition(",")[0]
                panel.plot(range(len(settings)), cost.us, marker="o", label=label_of)
        panel.set(xlabel=label, yscale="log", xticks=range(len(settings)), xticklabels=[f"{n:,}" for n in settings])
        panel.grid(alpha=0.3, which="both")
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.legend(fontsize=8, loc="center right")
    panels[0].set_ylabel("time of the router's core, µs")
    figure.savefig(path, dpi=120)


_LABELS: Final = (
    "prefill workers, and as many decode workers",
    "requests that wait (100 workers in each pool)",
    "held keys (100 workers in each pool)",
)


if __name__ == "__main__":
    main()
