"""The bytes and operations of a step, the shortest time for them, and a drawing of both as a roofline.

Bytes: weights are read once, of experts only those that are chosen, and the KV of all tokens is read or written once.
Operations: two for each weight and token, the head only once for each sequence, and the causal half of attention's scores. The
roof is the lower of two rates: memory bandwidth times operations a byte, and the peak of matrix products (Williams, Waterman
and Patterson 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.engine.floors import Machine
from bench.engine.peers.cases import Case
from pdserve.checkpoint.card import ModelCard
from pdserve.core.roofline import ModelShape


@dataclass(frozen=True, slots=True)
class Numbers:
    """Storage of weights: bytes of each, scales included. bits: those of the numbers that are multiplied, 16 or 8."""

    layer_bytes: float
    head_bytes: float
    bits: int


BF16: Final = Numbers(2.0, 2.0, 16)
INT8: Final = Numbers(1.0, 1.0, 8)
INT4: Final = Numbers(0.5 + 4 / 32, 1.0, 16)  # 32 weights share four bytes, and multiply in bfloat16
Q8_0: Final = Numbers(1.0 + 2 / 32, 1.0 + 2 / 32, 8)
Q4_1: Final = Numbers(0.5 + 4 / 32, 0.5 + 4 / 32, 8)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that one step reads, and its operations: the operations of weights and of attention's scores."""

    read_bytes: float
    weight_flops: float
    score_flops: float

    @property
    def flops(self) -> float:
        """All operations of the step."""
        return self.weight_flops + self.score_flops

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.read_bytes

    def floor_s(self, machine: Machine, bits: int) -> float:
        """Return the longer of the times for reading and for products. Attention always multiplies in bfloat16.

        bits: those of the numbers that are multiplied with weights.
        """
        products_s = self.weight_flops / machine.flops_s(bits) + self.score_flops / machine.bf16_flops_s
        return max(self.read_bytes / machine.read_bytes_s, products_s)


def work_of(case: Case, card: ModelCard, numbers: Numbers) -> Work:
    """Return the work of the case's step for a model of the card's shape."""
    shape = ModelShape.of(card.spec)
    layers, head = shape.active_layer_numbers, card.vocab_size * card.spec.hidden_size
    queries = sum(layer.attention.query_width for layer in card.spec.layers)
    context = case.cached + case.tokens
    kv_bytes = case.batch * context * card.kv_layout(16, "bfloat16").bytes_per_token
    scores = case.batch * case.tokens * (case.cached + case.tokens / 2) * queries * 2
    return Work(
        layers_read(shape, case.step_tokens) * numbers.layer_bytes + head * numbers.head_bytes + kv_bytes,
        2 * (layers * case.step_tokens + head * case.batch),
        2 * scores,
    )


def layers_read(shape: ModelShape, tokens: int) -> float:
    """Return the numbers of all layers that a step reads. Each token chooses its experts independently, and all experts are
    equally likely."""
    read = 0.0
    for layer, count in shape.layers:
        mlp = layer.mlp
        missed = (1 - mlp.experts_per_token / mlp.experts) ** tokens if mlp.experts else 0.0
        read += count * (layer.attention.numbers + mlp.numbers + mlp.experts * mlp.expert_numbers * (1 - missed))
    return read


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the roofline: an engine's time for the step of a case."""

    engine: str
    case: Case
    work: Work
    seconds: float


def plot(path: Path, title: str, machine: Machine, points: Iterable[Point]) -> None:
    """Write the roofline as a PNG file for light pages, and as a second one for dark pages, whose name ends with `-dark`.

    It needs matplotlib, which `pip install pdserve[plot]` installs.
    """
    from matplotlib import style

    found = list(points)
    for theme, target, line in (("default", path, "black"), ("dark_background", path.with_stem(f"{path.stem}-dark"), "white")):
        with style.context(theme):
            _draw(target, title, machine, found, line)


def _draw(path: Path, title: str, machine: Machine, found: list[Point], line: str) -> None:
    from matplotlib.figure import Figure

    engines, cases = list(dict.fromkeys(p.engine for p in found)), list(dict.fromkeys(p.case for p in found))
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.add_subplot()
    xs = [min(p.work.intensity for p in found) / 2, max(p.work.intensity for p in found) * 2]
    for name, bits, style in (("bfloat16", 16, "-"), ("8 bits", 8, "--")):
        peak = machine.flops_s(bits)
        ridge = peak / machine.read_bytes_s
        roof = [(xs[0], xs[0] * machine.read_bytes_s), (ridge, peak), (xs[1], peak)]
        axes.plot(*zip(*roof, strict=True), color=line, linestyle=style, linewidth=1.2)
        axes.annotate(
            f"products in {name}: {peak / 1e12:.2f} TFLOP/s", (xs[1], peak), (-4, 6), textcoords="offset points", ha="right"
        )
    slope = (xs[0] * 6, xs[0] * 6 * machine.read_bytes_s)  # above the roof, where no point can be
    axes.annotate(f"memory: {machine.read_bytes_s / 1e9:.0f} GB/s", slope, (-10, 0), textcoords="offset points", ha="right")
    for place, engine in enumerate(engines):
        for point in (p for p in found if p.engine == engine):
            mark = _MARKS[cases.index(point.case) % len(_MARKS)]
            axes.plot(point.work.intensity, point.work.flops / point.seconds, marker=mark,
                      color=f"C{place}", markersize=8, linestyle="", alpha=0.85)  # fmt: skip
    by_engine = [
        axes.plot([], [], marker="s", linestyle="", color=f"C{i}", label=engine)[0] for i, engine in enumerate(engines)
    ]
    by_case = [
        axes.plot([], [], marker=_MARKS[i % len(_MARKS)], linestyle="", color="grey", label=case.name)[0]
        for i, case in enumerate(cases)
    ]
    axes.add_artist(axes.legend(handles=by_engine, loc="upper left", title="engine"))
    axes.legend(handles=by_case, loc="lower right", title="step")
    axes.set(
        xscale="log",
        yscale="log",
        title=title,
        xlabel="operations for each byte of weights and KV",
        ylabel="operations a second",
    )
    axes.grid(True, which="both", alpha=0.2)
    figure.savefig(path, dpi=110)


_MARKS: Final = "os^vDP*X"
