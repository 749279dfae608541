"""The answer of capacity planning as tables for people to read. Nothing is printed here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.capacity.answer import CapacityAnswer
from pdserve.capacity.placements import PlacementRate
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.worker_speed import Memory
from pdserve.commands.tables import table
from pdserve.core.shards import Degrees

GB = 1e9
LINE = 100  # columns of a sentence


def report(question: CapacityQuestion, answer: CapacityAnswer) -> Group:
    """Return all tables: the verdict, memory, speed, pools, links and cost."""
    return Group(_verdict(question, answer), _memory(answer), _room(answer), _steps(answer), _pools(answer), _links(answer))


def _verdict(question: CapacityQuestion, answer: CapacityAnswer) -> Text:
    verdict = answer.verdict
    lines = list(_head(question, answer))
    split = verdict.split
    if verdict.disaggregate and split:
        lines.append(
            f"Disaggregate: {split.prefill} prefill and {_counted(split.decode, 'decode worker')}. {_sentence(verdict.reason)}"
        )
    elif verdict.requests_per_s:
        lines.append(f"Do not disaggregate: {_counted(answer.workers, 'colocated worker')}. {_sentence(verdict.reason)}")
    else:
        lines.append(f"Not possible: {verdict.reason}.")
    lines.append(f"Bound by {verdict.constraint}: {verdict.lever}.")
    if verdict.requests_per_s:
        rates = f"{verdict.requests_per_s:.3g} requests/s, {answer.output_tokens_per_s:,.0f} output tokens/s"
        lines.append(f"Goodput of all workers: {rates}{_cost(answer)}.")
    loaded = "" if answer.e2e_loaded_s is None else f", {answer.e2e_loaded_s:.3g} s on average at that goodput"
    lines.append(f"A whole request, TTFT + (n - 1) TPOT: {answer.e2e_alone_s:.3g} s alone{loaded}.")
    if answer.cost is not None:
        lines.append(f"Price of a GPU: ${answer.cost.per_gpu_hour:g} an hour ({answer.cost.source}).")
    return Text("\n".join(part for line in lines for part in textwrap.wrap(line, LINE)) + "\n")


def _head(question: CapacityQuestion, answer: CapacityAnswer) -> Iterator[str]:
    model, gpu = question.model, question.gpu
    weights = question.dtype if question.weight_scheme == "none" else f"layers in {question.weight_scheme}"
    yield f"{model.name}: {model.shape.numbers / 1e9:.4g} billion parameters, {weights}"
    kv = f"KV {answer.kv_bytes_per_token:,.0f} B a token ({question.kv_bits:g} bits)"
    yield f"{kv}, {answer.kv_bytes_per_request / 1e6:,.4g} MB a prompt"
    ranks = answer.degrees.ranks
    yield f"{question.gpus} x {gpu.title}: {_counted(answer.workers, 'worker')} of {_counted(ranks, 'GPU')}"
    if answer.prefill_degrees != answer.degrees:
        yield f"Prefill workers: {_counted(answer.prefill_degrees.ranks, 'GPU')}, {_degrees(question, answer.prefill_degrees)}"
    if answer.prefill_degrees != answer.degrees or max(question.pp, ranks // question.gpus_per_node) > 1 or question.experts:
        yield f"{'Other' if answer.prefill_degrees != answer.degrees else 'All'} workers: {_degrees(question, answer.degrees)}"
    targets = f"TTFT {question.ttft_s:g} s and TPOT {question.tpot_s:g} s for {question.attainment:.4g} of the requests"
    yield f"{question.isl} prompt and {question.osl} output tokens; {targets}"


def _degrees(question: CapacityQuestion, degrees: Degrees) -> str:
    nodes = -(-degrees.ranks // question.gpus_per_node)
    network = f"; {question.node_bytes_per_s / GB:,.4g} GB/s between nodes ({question.node_link})" if nodes > 1 else ""
    return f"{degrees}, on {_counted(nodes, 'node')} of {_counted(question.gpus_per_node, 'GPU')}{network}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _cost(answer: CapacityAnswer) -> str:
    if answer.cost is None or answer.cost.per_million_output_tokens is None:
        return ""
    dollars, tokens = answer.cost.per_million_output_tokens, answer.cost.output_tokens_per_dollar
    return f", ${dollars:.3g} a million output tokens ({tokens:,.0f} a dollar)"


def _memory(answer: CapacityAnswer) -> Table:
    columns = ("GPUs", "usable", "weights", "activations", "KV", "KV share")
    if answer.prefill_degrees == answer.degrees:
        made = table("Memory of a worker, GB", (), columns)
        made.add_row(*_sizes(answer.memory))
        return made
    made = table("Memory of a worker, GB", ("worker",), columns)
    made.add_row("prefill", *_sizes(answer.prefill_memory))
    made.add_row("decode", *_sizes(answer.memory))
    return made


def _sizes(memory: Memory) -> Iterator[str]:
    sizes = (memory.total_bytes, memory.usable_bytes, memory.weights_bytes, memory.activation_bytes, memory.kv_bytes)
    yield from (f"{size / GB:,.1f}" for size in sizes)
    yield f"{memory.kv_bytes / memory.total_bytes:.0%}"


def _room(answer: CapacityAnswer) -> Table:
    room = answer.room
    made = table("Room of a worker", (), ("context", "most users", "users", "longest context", "users of all workers"))
    counts = (room.context, room.max_users, room.users, room.max_context, room.max_users * answer.workers)
    made.add_row(*(f"{count:,}" for count in counts))
    return made


def _steps(answer: CapacityAnswer) -> Table:
    made = table("Decode steps of a worker", (), ("batch", "ms a step", "between GPUs", "tokens/s", "bound by", "KV fits"))
    for step in answer.steps:
        fits = "yes" if step.fits else "no"
        made.add_row(
            str(step.batch),
            f"{step.step_s * 1e3:.2f}",
            f"{step.links_s * 1e3:.2f}",
            f"{step.tokens_per_s:,.0f}",
            step.bound,
            fits,
        )
    return made


def _pools(answer: CapacityAnswer) -> RenderableType:
    made = table("Most requests a second of one worker within both targets", ("worker",), _COLUMNS)
    for name, rate in (("prefill", answer.prefill), ("decode", answer.decode), ("colocated", answer.colocated)):
        made.add_row(name, *_rate(rate))
    ratio = answer.verdict.ideal_prefill_per_decode
    ideal = "" if ratio is None else f"Both pools are full with {ratio:.3g} prefill workers for each decode worker. "
    floor = (
        f"A prompt alone takes {answer.prefill_floor_s * 1e3:,.4g} ms. The largest batch within TPOT: {answer.largest_batch}.\n"
    )
    return Group(made, Text("\n".join(textwrap.wrap(ideal + floor, LINE)) + "\n"))


_COLUMNS = ("requests/s", "mean TTFT ms", "mean TPOT ms", "batch", "chunk", "bound by")


def _rate(rate: PlacementRate) -> Iterator[str]:
    yield f"{rate.requests_per_s:.3g}"
    yield _milliseconds(rate.ttft_s)
    yield _milliseconds(rate.tpot_s)
    yield "-" if rate.batch is None else f"{rate.batch:.1f}"
    yield "-" if rate.chunk is None else str(rate.chunk)
    yield rate.bound


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _links(answer: CapacityAnswer) -> RenderableType:
    made = table("KV of a prompt over the link of a worker", ("link",), ("GB/s", "ms", "exposed ms", "two pools serve as much"))
    for one in answer.transfers:
        mark = " (chosen)" if one.link == answer.link.name else ""
        times = (f"{one.transfer_s * 1e3:,.2f}", f"{one.exposed_s * 1e3:,.2f}")
        made.add_row(one.link + mark, f"{one.bytes_per_s / GB:,.4g}", *times, "yes" if one.pays else "no")
    even = answer.verdict.break_even_bytes_per_s
    text = "With no link do two pools serve as much as one." if even is None else f"Break-even: {even / GB:.3g} GB/s a worker."
    return Group(made, Text(text))
