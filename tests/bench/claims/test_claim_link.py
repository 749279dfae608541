"""The link of a chosen speed: bytes count only once the link would have carried them, and reads follow each other on it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench.claims.measured import throttle
from bench.claims.measured.clusters import gaps_s
from kvtransfer.api import Region, TransportRead
from kvtransfer.backends.registry import prepare
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from testkit.client import Answer

US = Incarnation(7)
BLOCK_BYTES = 64


@pytest.fixture
def rate_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bytes_s"
    path.write_text("64")
    monkeypatch.setenv(throttle.RATE_FILE, str(path))
    return path


def test_reads_end_when_the_link_has_carried_them(rate_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(1) Two blocks at a block a second take 2 s, (2) the next read waits for them, (3) an unlimited one waits for nothing."""
    now = [100.0]
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now[0])
    pool = np.arange(8 * BLOCK_BYTES, dtype=np.uint8).reshape(8, BLOCK_BYTES)
    region = Region(pool.ctypes.data, 8, BLOCK_BYTES)
    transport = prepare(throttle.NAME, "127.0.0.1", allow_public=False)(WorkerId("w"), US, [region])
    transport.connect(US, transport.metadata())

    def read(source: list[int], target: list[int]) -> TransportRead:
        return transport.post_read(US, region, source, target, region)

    first, second = read([0, 1], [4, 5]), read([2], [6])
    seen = []
    for time_s in (101.9, 102.0, 102.9, 103.0):
        now[0] = time_s
        seen.append((transport.poll(first), transport.poll(second)))
    assert seen == [(False, False), (True, False), (True, False), (True, True)]
    rate_file.write_text("0")
    assert transport.poll(read([3], [7]))
    assert np.array_equal(pool[:4], pool[4:])
    transport.close()
    with pytest.raises(TransferFailed):
        read([0], [4])


def test_a_link_without_a_speed_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(throttle.RATE_FILE, raising=False)
    assert throttle.RATE_FILE not in os.environ
    with pytest.raises(ConfigError, match=throttle.RATE_FILE):
        prepare(throttle.NAME, "127.0.0.1", allow_public=False)


def test_tokens_of_one_message_make_no_gap() -> None:
    """Such a gap would be nothing, and hide the waits of those who read the stream."""
    one, other = Answer(arrivals_s=[1.0, 1.0, 1.5]), Answer(arrivals_s=[2.0, 2.25, 2.25])
    assert gaps_s([one, other]) == [0.25, 0.5]
    assert gaps_s([Answer(arrivals_s=[1.0])]) == []
