"""What the comparison with other engines stands on: processes that answer, fail or vanish, and what a step must do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from bench.clients.__main__ import CLIENTS
from bench.engine.floors import Machine, median_of
from bench.engine.peers import openvino_files, peer
from bench.engine.peers.cases import CASES, Case
from bench.engine.peers.install import RECIPES, NotInstalled
from bench.engine.peers.openvino_files import openvino_folder
from bench.engine.peers.peer import CONTENDERS, Peer, PeerFailed
from bench.engine.rates import ROUNDING, Row, products_of
from bench.engine.roofline import BF16, INT4, INT8, Work, layers_read, work_of
from bench.engine.shapes import SHAPES
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.registry import family_of
from pdserve.checkpoint.resolve import resolve
from pdserve.core.roofline import ModelShape
from pdserve.engine.native import library

SERVER = """
import os
from bench.engine.peers.protocol import serve

def timer(case):
    print("noise of a library")
    if case.batch == 13:
        raise ValueError("no room")
    if case.batch == 14:
        os._exit(3)
    return case.step_tokens / 1000

def start():
    print("more noise")
    return "engine 1.0", timer

serve(start)
"""


@pytest.fixture
def process():
    with subprocess.Popen((sys.executable, "-c", SERVER), cwd=peer.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        yield one
        one.kill()


def case(batch: int) -> Case:
    return Case("one", batch, 1, 128)


def test_answers_are_told_from_what_libraries_print(process, tmp_path):
    engine = Peer(process, tmp_path / "log")
    assert engine.version == "engine 1.0"
    assert engine.seconds(case(8)) == 0.008


def test_a_case_that_fails_says_why_and_the_next_is_answered(process, tmp_path):
    engine = Peer(process, tmp_path / "log")
    with pytest.raises(PeerFailed, match="ValueError: no room"):
        engine.seconds(case(13))
    assert engine.seconds(case(2)) == 0.002


def test_an_engine_that_vanishes_is_told_with_its_last_words(process, tmp_path):
    (tmp_path / "log").write_text("loading\nout of memory\n")
    engine = Peer(process, tmp_path / "log")
    with pytest.raises(PeerFailed, match="out of memory"):
        engine.seconds(case(14))


def test_an_engine_that_is_silent_is_given_up(process, tmp_path, monkeypatch):
    engine = Peer(process, tmp_path / "log")
    monkeypatch.setattr(peer, "CASE_LIMIT_S", 0.0)
    monkeypatch.setattr(process.stdin, "write", lambda data: None)
    with pytest.raises(PeerFailed, match="no answer in 0 s"):
        engine.seconds(case(1))


def test_one_sequence_reads_its_weights_and_many_multiply():
    card = ModelCard.load(resolve("tiny"))
    single, prompt = CASES[2], CASES[1]
    assert work_of(single, card, INT4).read_bytes < 0.6 * work_of(single, card, BF16).read_bytes
    assert work_of(single, card, INT4).flops == work_of(single, card, BF16).flops
    assert work_of(prompt, card, BF16).intensity > 50 * work_of(single, card, BF16).intensity


def test_every_engine_is_installable_and_its_weights_have_a_floor():
    clients = {one.environment for one in CLIENTS}
    assert {one.engine for one in CONTENDERS} | clients == set(RECIPES)
    assert {one.weights for one in CONTENDERS} == set(ROUNDING)
    assert all((ROUNDING[one.weights] is BF16) == one.bf16 for one in CONTENDERS)


MACHINE = Machine(
    2, read_bytes_s=1e18, bf16_flops_s=10e9, copy_bytes_s=1.0, int8_flops_s=30e9, set_bf16_flops_s=4e9, set_int8_flops_s=8e9
)


def test_products_of_a_step_take_their_own_peak_and_attention_that_of_bfloat16():
    """Products of integers were priced at twice the rate of bfloat16 on every machine."""
    work = Work(read_bytes=1.0, weight_flops=30e9, score_flops=10e9)
    assert work.floor_s(MACHINE, BF16.bits) == 4.0
    assert work.floor_s(MACHINE, INT8.bits) == 2.0


def test_a_table_tells_the_instruction_the_machine_and_what_was_reached():
    """(1) A step of bfloat16 and one of int8 are measured. (2) A peer and an engine without figures are left out."""
    card, prompt = ModelCard.load(resolve("tiny")), CASES[0]
    rows = [Row("ours", BF16, None, True), Row("ours int8", INT8, None, True), Row("none", INT4, None, True)]
    rows.append(Row("theirs", BF16, None, False))
    for row, seconds in zip((rows[0], rows[1], rows[3]), (1.0, 0.5, 1.0), strict=True):
        row.times[prompt] = [seconds * work_of(prompt, card, BF16).flops / 5e9]
    table = products_of(rows, card, MACHINE, "avx2")
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells == [
        ("ours", library.KNOWN["avx2"].bf16, "4", "10", "5 (50%)"),
        ("ours int8", library.KNOWN["avx2"].int8, "8", "30", "10 (33%)"),
    ]
    assert list(products_of(rows, card, MACHINE, library.NO_SET).columns[1].cells) == ["-", "-"]


def test_the_middle_of_rounds_is_of_each_rate():
    rounds = [replace(MACHINE, int8_flops_s=rate, set_bf16_flops_s=3 - rate) for rate in (1.0, 2.0, 3.0)]
    assert median_of(rounds) == replace(MACHINE, int8_flops_s=2.0, set_bf16_flops_s=1.0)


def test_a_conversion_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    converter = tmp_path / "python"
    converter.write_text("#!/bin/sh\necho noise; echo 'ValueError: no such architecture' >&2; exit 1\n")
    converter.chmod(0o755)
    monkeypatch.setattr(openvino_files, "default_cache_dir", lambda: tmp_path / "cache")
    with pytest.raises(NotInstalled, match="conversion to int8 failed: ValueError: no such architecture"):
        openvino_folder(tmp_path, "int8", converter)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.name.endswith(".lock")]


@pytest.mark.parametrize(
    ("name", "numbers", "beyond"),
    [("qwen2.5-0.5b", 0.49e9, "bias"), ("moe-1b", 0.93e9, "qk_norm"), ("mla-small", 0.272e9, "latent attention")],
)
def test_shapes_are_models_of_families(name, numbers, beyond):
    config = SHAPES[name]
    spec = family_of(config["architectures"][0]).read({"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, **config})
    assert spec.numbers == pytest.approx(numbers, rel=0.02)
    assert spec.beyond() == beyond


def test_a_step_reads_the_experts_that_its_tokens_choose():
    config = SHAPES["moe-1b"]
    spec = family_of(config["architectures"][0]).read({"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, **config})
    shape = ModelShape.of(spec)
    assert layers_read(shape, 1) == pytest.approx(shape.active_layer_numbers)
    assert layers_read(shape, 1000) == pytest.approx(shape.layer_numbers)
    experts = [(layers_read(shape, tokens) - layers_read(shape, 0)) / (16 * 3 * 256 * 1024) for tokens in (1, 2, 8)]
    assert experts == pytest.approx([8, 15, 64 * (1 - (7 / 8) ** 8)])
