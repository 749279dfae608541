"""Tables and units for people to read. They are built from plain reports; nothing is printed here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.config import MIB
from pdserve.core.shards import Degrees
from pdserve.core.speculation import DraftCounts, ToldCounts
from pdserve.core.worker import VersionRange, niced
from pdserve.rpc.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from pdserve.cluster.keeping.order import WorkerReport

BAR_CELLS = 20
WIDE = 140  # columns of a terminal that the whole status needs
UTILISATION_WIDE = 20  # columns more if the utilisation of workers is known
MOST_ASIDE = 5  # workers that are named when not all pairs are: one broken machine is among the first
ROOMY = 100  # columns of a terminal that shows it
RARE = ("cached", "quarantined", "unaccounted")
_INEXACT = (
    "exact: false; workers compute other bits, or a token depends on its batch, so tokens may depend on where a request runs"
)
SHORT = {"quarantined": "quar", "unaccounted": "unacc", "heartbeat": "beat"}  # headings on a narrow terminal


def size(count: float) -> str:
    """Write a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def millis(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{seconds * 1000:.1f} ms"


def role(wire: int) -> str:
    """Return the role of the wire's enum in lower case: "prefill" or "decode"."""
    return common_pb2.Role.Name(wire).removeprefix("ROLE_").lower()


def bar(used: float, total: float) -> str:
    """Draw the used share as a bar of `BAR_CELLS` cells, followed by percent. A total of 0 is drawn as 0 %, and a larger share
    than 1 as 100 %: the numbers are a worker's own."""
    share = min(1.0, used / total) if total else 0.0
    full = round(share * BAR_CELLS)
    return f"{'█' * full}{'░' * (BAR_CELLS - full)} {share:4.0%}"


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make a table. The `left` columns hold words, the `right` ones numbers. It fits 80 columns of a terminal if it can."""
    made = Table(
        title=title, title_justify="left", header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD
    )
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", overflow="fold")  # a long header wraps first, and no number is cut
    return made


def pool(reports: Sequence[WorkerReport]) -> Group:
    """Describe the started workers: their addresses, the use of their memory, the size of the KV pools, and the code that
    computes steps."""
    nice = any(report.niceness > 0 for report in reports)
    sizes = ("weights", "largest step", "KV pool", "rest")
    made = table("", ("worker", "role", "address"), (*sizes, "nice") if nice else sizes)
    for report in reports:
        memory = report.memory
        parts = (memory.weights_bytes, memory.step_bytes, memory.kv_bytes, memory.rest_bytes)
        cells = [f"{part / MIB:,.0f} MiB" for part in parts]
        made.add_row(report.worker_id, report.role, report.address, *cells, *([str(report.niceness)] if nice else []))
    pools = _by_role(reports, lambda report: report.memory.pool(), " each")
    return Group(made, *pools, *_by_role(reports, lambda report: report.computes), *_niced(reports))


def _niced(workers: Iterable[WorkerReport | common_pb2.WorkerHello]) -> list[Text]:
    """Make one line for all workers of the same niceness above 0: these yield to ordinary processes."""
    alike: dict[int, list[str]] = {}
    for worker in workers:
        if worker.niceness > 0:
            alike.setdefault(worker.niceness, []).append(worker.worker_id)
    return [Text(niced(worker_ids, niceness), "yellow") for niceness, worker_ids in alike.items()]


def _by_role(reports: Sequence[WorkerReport], said: Callable[[WorkerReport], str], of_several: str = "") -> list[Text]:
    """Make one line for each role, or one for each group of workers of a role for which `said` gives the same words."""
    alike: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        alike.setdefault((report.role, said(report)), []).append(report.worker_id)
    roles = [role for role, _ in alike]
    return [
        Text(f"{role if roles.count(role) == 1 else ', '.join(workers)}: {words}{of_several if len(workers) > 1 else ''}")
        for (role, words), workers in alike.items()
    ]


def status(state: inference_pb2.GetClusterStateResponse, width: int) -> Group:
    """Draw the pools and the classes of requests, then the reasons why workers are not ready, damaged KV, niced workers, pairs
    set aside, gangs, the instruction sets of compiled steps, how many drafts were right, and versions that differ.

    width: columns of the terminal. A wide terminal also shows how many tokens each pool holds.
    """
    why = [
        Text(f"{worker.hello.worker_id} is not ready: {worker.not_ready_reason}")
        for worker in state.workers
        if worker.not_ready_reason and not worker.ready
    ]
    why += [
        Text(f"{worker.hello.worker_id} is a {role(worker.hello.role)} worker after {_flips(worker.hello.flips)}")
        for worker in state.workers
        if worker.hello.flips
    ]
    why += [damage for worker in state.workers if (damage := _damage(worker)) is not None]
    aside: list[RenderableType] = [_set_aside(state.set_aside_pairs), *_more_aside(state)] if state.set_aside_pairs else []
    mixed = [] if state.exact or not state.workers else [Text(_INEXACT)]
    classes = [_classes(state.classes)] if state.classes else []
    return Group(
        _pools(state, width),
        *classes,
        *why,
        *_niced(worker.hello for worker in state.workers),
        *aside,
        *mixed,
        *_gangs(state.workers),
        *_sets(state.workers),
        *_engines(state.workers),
        *_drafts(state.workers),
        *_versions(state.workers),
    )


def _flips(count: int) -> str:
    return "a role flip" if count == 1 else f"{count} role flips"


def _engines(workers: Iterable[inference_pb2.WorkerState]) -> list[Text]:
    """Make one line for all workers of the same foreign engine, and one for each that keeps blocks for nobody."""
    alike: dict[str, list[str]] = {}
    for worker in workers:
        if worker.hello.engine:
            alike.setdefault(worker.hello.engine, []).append(worker.hello.worker_id)
    engines = [Text(f"foreign: true; {', '.join(worker_ids)}: {engine}") for engine, worker_ids in alike.items()]
    kept = [(worker.hello.worker_id, worker.load.foreign_blocks) for worker in workers if worker.load.foreign_blocks]
    return engines + [
        Text(f"{name}: its engine keeps {blocks} blocks for no reader, until its own time") for name, blocks in kept
    ]


def _gangs(workers: Iterable[inference_pb2.WorkerState]) -> list[Text]:
    """Make one line for all gangs of the same degrees and cores."""
    alike: dict[tuple[Degrees, int], list[str]] = {}
    for worker in workers:
        hello = worker.hello
        tensor, pipeline = hello.tensor_parallel_size or 1, hello.pipeline_parallel_size or 1
        if tensor * pipeline > 1:
            degrees = Degrees(tensor, pipeline, hello.enable_expert_parallel)
            alike.setdefault((degrees, hello.cores), []).append(hello.worker_id)
    return [
        Text(
            f"{', '.join(worker_ids)}: a gang of {degrees.ranks} ranks ({degrees}){f' on {cores} cores' if cores else ''}"
            f"{' each' if len(worker_ids) > 1 else ''}"
        )
        for (degrees, cores), worker_ids in alike.items()
    ]


def _sets(workers: Iterable[inference_pb2.WorkerState]) -> list[Text]:
    """Make one line for all workers whose compiled steps are for the same instruction set."""
    alike: dict[str, list[str]] = {}
    for worker in workers:
        if worker.hello.isa:
            alike.setdefault(worker.hello.isa, []).append(worker.hello.worker_id)
    return [Text(f"{', '.join(worker_ids)}: steps compiled for {isa}") for isa, worker_ids in alike.items()]


def _drafts(workers: Iterable[inference_pb2.WorkerState]) -> list[Text]:
    """Make one line for each worker that has drafted since its start."""
    return [
        Text(f"{worker.hello.worker_id}: {acceptance(worker.load.speculation)}")
        for worker in workers
        if worker.load.speculation.num_drafts
    ]


def acceptance(told: ToldCounts) -> str:
    """Say how many drafts were right, and how many tokens a step with drafts gave."""
    counts = DraftCounts.told(told)
    return f"{counts.acceptance_rate:.1%} of its drafts were right, {counts.acceptance_length:.2f} tokens a step with drafts"


def _versions(workers: Iterable[inference_pb2.WorkerState]) -> list[Text]:
    """Make one line for all workers of the same versions, if there are several such lines."""
    alike: dict[tuple[VersionRange, VersionRange], list[str]] = {}
    for worker in workers:
        hello = worker.hello
        link = VersionRange(hello.oldest_link_version, hello.link_version)
        peer = VersionRange(hello.oldest_peer_version, hello.peer_version)
        alike.setdefault((link, peer), []).append(hello.worker_id)
    if len(alike) < 2:
        return []
    lines = [
        Text(f"{', '.join(worker_ids)}: version {peer} of the protocol between workers, {link} of the link's protocol")
        for (link, peer), worker_ids in alike.items()
    ]
    return [*lines, Text("only workers with a common version of the protocol between workers are paired")]


def _classes(classes: Sequence[inference_pb2.ClassState]) -> Table:
    """Draw how well each class met its targets in the last minutes. A dash: the class has no such target."""
    made = table(
        f"classes of requests, last {classes[0].window_s / 60:.0f} minutes",
        ("class",),
        ("ended", "good", "TTFT met", "TPOT met", "refused", "shed"),
    )
    for one in classes:
        made.add_row(
            one.slo_class,
            str(one.requests),
            _share(one.good, one.requests),
            _share(one.ttft_met, one.ttft_met + one.ttft_missed),
            _share(one.tpot_met, one.tpot_met + one.tpot_missed),
            str(one.refused),
            str(one.shed),
        )
    return made


def _share(part: int, total: int) -> str:
    """Write a share in percent, rounded down so that 100 % says that nothing was missed."""
    return f"{part * 1000 // total / 10:.1f} %" if total else "-"


def _damage(worker: inference_pb2.WorkerState) -> Text | None:
    """Tell how much of the KV that this worker lent was damaged; None for no damage. Damaged KV is never used."""
    if not worker.load.kv_corrupt_blocks:
        return None
    said = f"{worker.hello.worker_id}: {worker.load.kv_corrupt_blocks} lent KV blocks were not read as they were written"
    return Text(f"{said}, {worker.load.kv_rotted_blocks} have changed in its memory", style="red")


def _set_aside(pairs: Iterable[inference_pb2.SetAsidePair]) -> Table:
    """Draw the pairs of workers between which KV did not pass. The reason comes last, since it may be long."""
    made = table("pairs set aside", ("prefill", "decode"), ("failures", "tried again in"))
    made.add_column("reason", overflow="fold")
    for pair in pairs:
        again = f"{pair.remaining_s:.0f} s" if math.isfinite(pair.remaining_s) else "never"
        made.add_row(pair.prefill_worker, pair.decode_worker, str(pair.failures), again, Text(pair.reason))
    return made


def _more_aside(state: inference_pb2.GetClusterStateResponse) -> list[Text]:
    """Make a line about the pairs that the state does not name, with the workers that are in most of all pairs."""
    more = state.num_set_aside_pairs - len(state.set_aside_pairs)
    if more <= 0:
        return []
    most = sorted(state.set_aside_counts, key=lambda one: -one.pairs)[:MOST_ASIDE]
    names = ", ".join(f"{one.worker_id} ({one.pairs})" for one in most)
    return [Text(f"and {more} more pairs; the workers in most pairs are {names}")]


def _pools(state: inference_pb2.GetClusterStateResponse, width: int) -> Group:
    """Draw the pools, their queues and their use of KV. Columns that find no room go into further tables below.

    A terminal below `WIDE` columns shows no bar, no role, and no column of rare blocks that are all 0. One below `ROOMY`
    columns does not show utilisation either.
    """
    title = f"router: {state.queued_requests} queued, {state.running_requests} running"
    counts = {
        "free": [str(worker.load.blocks.free) for worker in state.workers],
        "held": [str(worker.load.blocks.held) for worker in state.workers],
        "cached": [str(worker.load.blocks.cached) for worker in state.workers],
        "quarantined": [str(worker.load.blocks.quarantined) for worker in state.workers],
        "unaccounted": [str(worker.load.blocks.unaccounted) for worker in state.workers],
        "queued": [str(worker.load.queued_requests) for worker in state.workers],
        "running": [str(worker.load.running_sequences) for worker in state.workers],
        "leases": [str(worker.load.leases_held) for worker in state.workers],
        "heartbeat": [f"{worker.heartbeat_age_s:.1f} s" for worker in state.workers],
    }
    used = {name: cells for name, cells in _utilisation(state).items() if any(cell != "-" for cell in cells)}
    counts |= used if width >= ROOMY else {}
    steps = [_lowered(worker.load.max_num_batched_tokens, worker.hello.max_num_batched_tokens) for worker in state.workers]
    if any(steps):
        counts["step tokens"] = steps
    seqs = [_lowered(worker.load.max_num_seqs, worker.hello.max_num_seqs) for worker in state.workers]
    if any(seqs):
        counts["sequences"] = seqs
    wide = width >= WIDE + (UTILISATION_WIDE if used else 0)
    if wide and state.block_size:
        counts = {"KV tokens": [f"{worker.hello.num_blocks * state.block_size:,}" for worker in state.workers], **counts}
    shown = {name: cells for name, cells in counts.items() if wide or name not in RARE or any(cell != "0" for cell in cells)}
    kvs = [bar(one.load.blocks.held + one.load.blocks.quarantined, one.load.blocks.total) for one in state.workers]
    workers: dict[str, list[Text]] = {"worker": [Text(worker.hello.worker_id) for worker in state.workers]}
    left = workers | ({"role": [Text(role(worker.hello.role)) for worker in state.workers]} if wide else {})
    left["ready"] = [_readiness(worker) for worker in state.workers]
    left["KV use" if wide else "KV"] = [Text(kv if wide else kv.rpartition(" ")[2]) for kv in kvs]
    right = {
        name if wide else SHORT.get(name, name): [
            Text.assemble((cell, "red" if name == "unaccounted" and cell != "0" else "")) for cell in cells
        ]
        for name, cells in shown.items()
    }
    made: list[Table] = []
    while right or not made:
        words = left if not made else workers
        room, numbers = width - sum(_room(*column) for column in words.items()) - 1, dict[str, list[Text]]()
        while right and (not numbers or _room(*next(iter(right.items()))) <= room):
            name = next(iter(right))
            numbers[name] = right.pop(name)
            room -= _room(name, numbers[name])
        made.append(table(title if not made else "", tuple(words), tuple(numbers)))
        for row in zip(*words.values(), *numbers.values(), strict=True):
            made[-1].add_row(*row)
    return Group(*made)


def _room(name: str, cells: Sequence[Text]) -> int:
    """Return the columns of a terminal that a column of a table takes, with the gap behind it."""
    return max(len(name), *(cell.cell_len for cell in cells), 0) + 2


def _utilisation(state: inference_pb2.GetClusterStateResponse) -> dict[str, list[str]]:
    """Return the utilisation of the last seconds by column. A dash: it is unknown, or there were no such steps."""
    shares = {"busy": "busy", "MFU": "mfu", "MBU": "mbu"}
    return {
        title: [f"{getattr(one.recent, name):.0%}" if one.recent.HasField(name) else "-" for one in state.workers]
        for title, name in shares.items()
    }


def _lowered(now: int, most: int) -> str:
    """Return a limit that an operator has lowered, as "256 of 512"; else nothing."""
    return f"{now} of {most}" if 0 < now < most else ""


def _readiness(worker: inference_pb2.WorkerState) -> Text:
    if worker.draining:
        return Text.assemble(("draining", "yellow"))
    return Text.assemble(("yes", "green") if worker.ready else ("no", "red"))


def requests(reports: Mapping[str, Any]) -> Table:
    """Draw one row for each finished request. `reports`: (`RequestReport`, `Usage`) by name."""
    numbers = ("tokens", "TTFT ms", "TPOT ms", "KV moved", "exposed ms")
    made = table("", ("request", "prefill", "decode"), numbers)
    for name, (report, usage) in reports.items():
        made.add_row(
            name,
            report.prefill_worker or "-",
            report.decode_worker,
            f"{usage.prompt_tokens} + {usage.output_tokens}",
            f"{report.ttft_s * 1000:.1f}",
            f"{report.tpot_s * 1000:.1f}",
            size(report.kv_bytes),
            f"{report.exposed_transfer_s * 1000:.1f}",
        )
    return made
