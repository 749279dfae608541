"""A drawing of an answer: decode steps by batch, and the goodput of one and two pools by the speed of the link."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.capacity.answer import CapacityAnswer
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.verdict import TwoPools, goodput_apart
from pdserve.capacity.worker_speed import WorkerSpeed
from pdserve.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS: Final = 160
GB: Final = 1e9


def draw(path: Path, question: CapacityQuestion, answer: CapacityAnswer) -> None:
    """Write the drawing as a PNG file. Raises `ConfigError` without matplotlib, and when the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--plot needs matplotlib: run `pip install 'pdserve[plot]'`") from exc
    worker = WorkerSpeed(question, answer.degrees)
    pools = TwoPools(WorkerSpeed(question, answer.prefill_degrees), worker)
    figure = Figure(figsize=(12, 5), layout="constrained", facecolor="white")  # readable on light and on dark pages
    left, right = figure.subplots(1, 2)
    _draw_steps(left, worker, answer)
    _draw_links(right, pools, answer)
    cluster = f"{question.model.name} on {question.gpus} x {question.gpu.title}, workers of {worker.gpus}"
    targets = f"{question.attainment:.4g} within TTFT {question.ttft_s:g} s and TPOT {question.tpot_s:g} s"
    figure.suptitle(f"{cluster}\n{question.isl} + {question.osl} tokens; {targets}", fontsize="medium")
    for axes in (left, right):
        axes.grid(True, which="major", alpha=0.25)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as exc:
        raise ConfigError(f"--plot cannot write {path}: {exc.strerror}") from exc


def _draw_steps(axes: Axes, worker: WorkerSpeed, answer: CapacityAnswer) -> None:
    question = worker.question
    context, users = question.isl + question.osl // 2, worker.users_at(question.isl + question.osl)
    most = float(min(answer.steps[-1].batch, max(16, 2 * users)))  # twice the largest batch that fits
    batches = [most ** (point / (POINTS - 1)) for point in range(POINTS)]
    fitting = [batch for batch in batches if batch <= users]

    def step_ms(batch: float) -> float:
        return 1e3 * worker.decode_s(worker.lane(batch), context)

    axes.plot(batches, [*map(step_ms, batches)], color="C0", linewidth=1, linestyle=":")
    axes.plot(fitting, [*map(step_ms, fitting)], color="C0", linewidth=2.2, label="decode step")
    axes.axhline(1e3 * question.tpot_s, color="C3", linestyle="--", label=f"TPOT {1e3 * question.tpot_s:g} ms")
    if 1 <= users <= most:
        axes.axvline(users, color="0.4", linestyle="-.", label=f"KV is full: {users} sequences")
    if answer.largest_batch:
        at = min(float(answer.largest_batch), most)
        axes.plot([at], [step_ms(at)], "o", color="C0", label=f"largest batch: {answer.largest_batch}")
    axes.set(xscale="log", xlabel="sequences of one worker", ylabel="ms", title="time of a decode step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _draw_links(axes: Axes, pools: TwoPools, answer: CapacityAnswer) -> None:
    verdict = answer.verdict
    rates = [one.bytes_per_s for one in answer.transfers]
    low, high = min(rates) / 20, max(rates) * 4
    links = [low * (high / low) ** (point / (POINTS - 1)) for point in range(POINTS)]
    apart = [goodput_apart(pools, rate) for rate in links]
    axes.plot([rate / GB for rate in links], apart, color="C0", linewidth=2.2, label="two pools, the best split")
    axes.axhline(verdict.colocated_requests_per_s, color="C1", linewidth=2.2, linestyle="--", label="one pool, colocated")
    even = verdict.break_even_bytes_per_s
    if even is not None and low <= even <= high:
        axes.axvline(even / GB, color="0.4", linestyle="-.", label=f"break-even: {even / GB:.3g} GB/s")
    highest = max(*apart, verdict.colocated_requests_per_s) or 1.0
    for one in answer.transfers:
        at = goodput_apart(pools, one.bytes_per_s)
        axes.plot([one.bytes_per_s / GB], [at], "o", color="C0", fillstyle="full" if one.link == answer.link.name else "none")
        axes.annotate(one.link, (one.bytes_per_s / GB, at), (0, 6), textcoords="offset points", rotation=45)
    axes.set(xscale="log", xlabel="GB/s of a worker's link", ylabel="requests a second", title="goodput of all workers")
    axes.set_ylim(0, highest * 1.25)
    axes.legend(loc="lower right" if verdict.requests_per_s else "upper left")
