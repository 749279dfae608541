"""What the comparison with other engines stands on: processes that answer, fail or vanish, and what a step must do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.engine.peers import peer
from bench.engine.peers.cases import CASES, Case
from bench.engine.peers.peer import Peer, PeerFailed
from bench.engine.roofline import BF16, INT4, work_of
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve

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
