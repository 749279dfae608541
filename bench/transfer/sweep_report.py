"""The figures of the transfer sweep as data, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from bench.ratios import Ratio
from bench.transfer.ways import FLOOR, WAYS, Sample


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of a block and one count of blocks, measured by all ways."""

    block_bytes: int
    count: int
    samples: dict[str, list[Sample]]

    @property
    def nbytes(self) -> int:
        """The bytes of one read."""
        return self.block_bytes * self.count

    def rate(self, way: str) -> float:
        """Return the median rate in bytes a second."""
        return self.nbytes / statistics.median(sample.wall_s for sample in self.samples[way])

    def of_floor(self, way: str) -> float:
        """Return the median share of the floor's rate, taken round by round."""
        pairs = zip(self.samples[FLOOR], self.samples[way], strict=True)
        return statistics.median(floor.wall_s / sample.wall_s for floor, sample in pairs)

    def cpu_s_per_gb(self, way: str) -> tuple[float, float]:
        """Return the CPU seconds for each gigabyte, of the reader and of the lender: means over all rounds."""
        samples = self.samples[way]
        gigabytes = self.nbytes * len(samples) / 1e9
        return sum(one.reader_cpu_s for one in samples) / gigabytes, sum(one.lender_cpu_s for one in samples) / gigabytes


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep."""

    cells: tuple[Cell, ...]
    latency_s: dict[str, list[float]]
    """The seconds of single reads of the smallest block, by way."""
    exposed: dict[str, Ratio]
    """The delay of a computation beside a read, as a share of the read's time, by way."""

    @property
    def largest(self) -> list[Cell]:
        """The cell of each size of a block with the most blocks."""
        return [max((one for one in self.cells if one.block_bytes == size), key=lambda one: one.count) for size in self._sizes]

    @property
    def _sizes(self) -> list[int]:
        return sorted({one.block_bytes for one in self.cells})


def name_of(nbytes: int) -> str:
    """Return a size as people write it."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def tables(sweep: Sweep) -> Iterator[Table]:
    """Yield all tables."""
    rounds = len(next(iter(sweep.cells[0].samples.values())))
    rates = Table("block", "blocks", title=f"GB/s, in brackets the share of memcpy; medians of {rounds} interleaved rounds")
    cpu = Table("block", "blocks", title="CPU seconds for each GB: reader + lender")
    for way in WAYS:
        rates.add_column(way, justify="right")
        cpu.add_column(way, justify="right")
    for cell in sweep.cells:
        shares = [f"{cell.rate(way) / 1e9:.2f} ({cell.of_floor(way):.0%})" for way in WAYS]
        rates.add_row(name_of(cell.block_bytes), str(cell.count), *shares)
    for cell in sweep.largest:
        pairs = ["{:.3f} + {:.3f}".format(*cell.cpu_s_per_gb(way)) for way in WAYS]
        cpu.add_row(name_of(cell.block_bytes), str(cell.count), *pairs)
    yield rates
    yield cpu
    if sweep.latency_s:
        yield _latency(sweep.latency_s)
    if sweep.exposed:
        yield _exposed(sweep.exposed)


def _latency(times_s: dict[str, list[float]]) -> Table:
    table = Table("way", title=f"one block of 4 KiB, {len(times_s[FLOOR]):,} reads")
    for column in ("p50 us", "p99 us"):
        table.add_column(column, justify="right")
    for way, values in times_s.items():
        cuts = statistics.quantiles(values, n=100)
        table.add_row(way, f"{1e6 * cuts[49]:.1f}", f"{1e6 * cuts[98]:.1f}")
    return table


def _exposed(shares: dict[str, Ratio]) -> Table:
    table = Table("way", title="64 MiB behind a computation twice as long")
    table.add_column("exposed share (95 %)", justify="right")
    for way, share in shares.items():
        table.add_row(way, str(share))
    return table
