"""The layouts that flags and workers allow."""

from __future__ import annotations

import pytest

from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import inference_pb2
from pdserve_bench.search.settings import AUTO, SpaceLimits, chunks_of, first_chunk, limits_of, splits_of

LIMITS = SpaceLimits(workers=4, chunk_tokens=512, max_num_seqs=64)


def test_chunks_fit_the_memory_of_the_workers():
    assert chunks_of(AUTO, LIMITS) == (128, 256, 512)
    assert chunks_of(AUTO, SpaceLimits(4, 64, 64)) == (64,)
    assert len(chunks_of(AUTO, SpaceLimits(4, 0, 64))) == 1, "workers of a foreign engine keep their steps"
    assert chunks_of("512,64,64", LIMITS) == (64, 512)
    assert first_chunk((128, 256, 1024), LIMITS) == 256


@pytest.mark.parametrize("text", ["", "x", "0", "1024", "64,,128"])
def test_wrong_chunks_are_named(text):
    with pytest.raises(ConfigError, match="--chunks: "):
        chunks_of(text, LIMITS)


def test_splits_begin_where_the_work_is():
    assert splits_of(AUTO, 4, None) == (0, 2, 1, 3)
    assert splits_of(AUTO, 4, 0.8) == (0, 3, 2, 1)
    assert splits_of(AUTO, 1, None) == (0,)
    assert splits_of("1:3, 2:2,0:4,1:3", 4, None) == (1, 2, 0)


@pytest.mark.parametrize("text", ["", "1", "1:2", "4:0", "-1:5", "1:x", "1:3,"])
def test_wrong_splits_are_named(text):
    with pytest.raises(ConfigError, match="--splits: "):
        splits_of(text, 4, None)


def test_the_smallest_limit_of_all_workers_counts():
    state = inference_pb2.GetClusterStateResponse()
    for tokens, seqs in ((2048, 64), (512, 128)):
        worker = state.workers.add()
        worker.hello.max_num_batched_tokens, worker.hello.max_num_seqs = tokens, seqs
    assert limits_of(state) == SpaceLimits(2, 512, 64)
    with pytest.raises(ConfigError, match="no worker is linked"):
        limits_of(inference_pb2.GetClusterStateResponse())
