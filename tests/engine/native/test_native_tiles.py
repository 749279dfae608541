"""Products by tiles: the emulation and the instructions themselves against what a CPU with AMX computed.

On a CPU without AMX, the instructions run all the same: it refuses each of them, and tiles_check.cpp computes it then.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from native_builds import NATIVE, build, compiler, harness_sets
from test_native_builds import WAYS, logits_of

from pdserve.core.errors import ConfigError
from pdserve.engine.native import library

pytestmark = pytest.mark.skipif(library.EMULATED not in harness_sets(), reason="this CPU lacks avx512_bf16")

HERE = Path(__file__).parent
CASES = HERE.parent.parent / "goldens" / "tiles.npz"
"""200 products of tiles that an Intel Xeon computed: op, shape, operands, and results of each."""
FLOATS, SIGNED_AND_UNSIGNED = 0, 2  # ops that the engine uses


class Instructions:
    """The instructions of AMX, of this CPU or in its place."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.here = library.open_library(_installed_amx()).library is not None

    def __enter__(self) -> Instructions:
        if not self.here:
            self._library.tiles_trap(0)
        return self

    def __exit__(self, *_: object) -> None:
        counts = (ctypes.c_long * 6)()
        if not self.here:
            self._library.tiles_untrap(counts)
        self.counts = dict(zip(("shapes", "zeros", "loads", "stores", "products", "products of bytes"), counts, strict=True))

    def alone(self, op, rows, columns, words, *operands):
        found = np.zeros((16, 64), np.uint8)
        self._library.tiles_alone(
            op, rows, columns, words, *(array.ctypes.data_as(ctypes.c_void_p) for array in (*operands, found))
        )
        return found

    def by_header(self, emulated, op, rows, *operands):
        found = np.zeros((16, 64), np.uint8)
        self._library.tiles_run(emulated, op, rows, *(array.ctypes.data_as(ctypes.c_void_p) for array in (*operands, found)))
        return found


def _installed_amx() -> Path:
    path = library.installed("_kernels_amx")
    assert path is not None
    return path


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles") / "tiles.so"
    sources = [str(HERE / "tiles_check.cpp")]
    return Instructions(build(compiler("g++"), path, f"-I{NATIVE}", "-O1", isa="amx", sources=sources))


@pytest.fixture(scope="module")
def cases():
    stored = np.load(CASES)
    return [{name: stored[name][i] for name in stored} for i in range(len(stored["op"]))]


def parts_of(case, found):
    """The elements of a result and of what is expected, as numbers; NaN is equal to NaN."""
    dtype = np.float32 if case["op"] == FLOATS else np.int32
    shape = np.s_[: case["rows"], : 4 * case["columns"]]
    return [np.ascontiguousarray(of[shape]).view(dtype) for of in (found, case["result"])]


def same_bits(a, b):
    """No difference but the bits of what is not a number."""
    either = np.isnan(a) & np.isnan(b) if a.dtype == np.float32 else np.zeros(a.shape, bool)
    return (either | (a.view(np.uint32) == b.view(np.uint32))).all()


def test_each_instruction_gives_the_bits_that_a_cpu_with_amx_gave(instructions, cases):
    assert {int(case["op"]) for case in cases} == {0, 1, 2, 3, 4}
    assert len(cases) == 200
    with instructions:
        for case in cases:
            shape = (int(case[name]) for name in ("op", "rows", "columns", "words"))
            found = instructions.alone(*shape, *(np.ascontiguousarray(case[name]) for name in "abc"))
            assert same_bits(*parts_of(case, found)), case["kind"]


def test_emulated_tiles_and_those_of_the_cpu_give_these_bits(instructions, cases):
    """Whole words only: missing ones are 0 here, which may turn a zero's sign."""
    used = [case for case in cases if case["op"] in (FLOATS, SIGNED_AND_UNSIGNED)]
    assert len(used) == 80
    with instructions:
        for case in used:
            a, b, c = (case[name].copy() for name in "abc")
            a[:, 4 * case["words"] :] = 0
            b[case["words"] :] = 0
            for emulated in (True, False):
                found, expected = parts_of(case, instructions.by_header(emulated, int(case["op"]), int(case["rows"]), a, b, c))
                whole = case["words"] == 16
                assert same_bits(found, expected) if whole else np.array_equal(found, expected, equal_nan=True)


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """apart(emulated): a library of amx with state of its own, as if this CPU had AMX unless its tiles are emulated."""

    def take(emulated: bool) -> None:
        path = Path(shutil.copy(_installed_amx(), tmp_path / f"{emulated}.so"))
        found = library.declared(ctypes.CDLL(str(path)))
        assert found.pdserve_emulate() if emulated else True
        monkeypatch.setattr(library, "load", lambda: found)

    return take


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_whole_steps_by_the_instructions_have_the_bits_of_the_emulation(way, apart, instructions, tiny_dir, make_sheets):
    apart(emulated=True)
    expected = logits_of(tiny_dir, make_sheets, way)
    apart(emulated=False)
    with instructions:
        found = logits_of(tiny_dir, make_sheets, way)
    assert all(map(torch.equal, found, expected))
    counts = instructions.counts
    if not instructions.here:
        assert counts["products"] > 1000
        assert (counts["products of bytes"] > 1000) == (way.get("quantization") == "int8")


def test_a_kernel_that_gives_no_tiles_gets_the_next_set_and_is_told(monkeypatch):
    monkeypatch.delenv("PDSERVE_ISA", raising=False)
    next_best = next(isa for isa in harness_sets() if isa != "amx")
    opened = library.open_library

    def refused(path, *, emulated=False):
        return library.Found(None, library.PERMISSION) if path == _installed_amx() else opened(path, emulated=emulated)

    monkeypatch.setattr(library, "open_library", refused)
    found = library.find.__wrapped__()
    assert found.isa == next_best
    assert found.why.endswith("; without AMX: the kernel gives no permission to use tiles")
    monkeypatch.setenv("PDSERVE_ISA", "amx")
    with pytest.raises(ConfigError, match="PDSERVE_ISA is amx, and the kernel gives no permission to use tiles"):
        library.find.__wrapped__()
