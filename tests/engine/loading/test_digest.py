"""The digest of a model covers every byte that it computes with, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.engine.loading import digest
from pdserve.engine.loading.digest import TensorDigests
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.runner import ModelRunner

CPU = torch.device("cpu")
CONFIG = EngineConfig(device="cpu", kv_cache_memory=1 << 20, dtype="float32")


@pytest.fixture
def copy(tiny_dir, tmp_path) -> Path:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


def digest_of(directory: Path) -> str:
    """The digest of a directory's tensors, without any layout."""
    return stream_weights(directory, ModelCard.load(directory), torch.float32, CPU).source.digest()


def added(*tensors: tuple[str, torch.Tensor]) -> str:
    digests = TensorDigests()
    with digests.adding() as adding:
        for name, tensor in tensors:
            adding.add(name, tensor)
    return digests.hexdigest()


def flip_a_bit_between_the_samples(directory: Path) -> None:
    """Change one bit that the cheap fingerprint does not read: in the middle between two of its samples."""
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    gap = (len(content) - start - 4096) // 15
    assert gap > 4096 + 2, "the samples cover the whole file"
    content[start + 7 * gap + 4096 + (gap - 4096) // 2] ^= 1
    path.write_bytes(content)


def test_one_bit_between_the_samples_is_another_model(copy, tiny_dir):
    """The fingerprint cannot see it: with that alone, two fine-tunes would exchange KV in silence."""
    flip_a_bit_between_the_samples(copy)
    assert ModelCard.load(copy).fingerprint == ModelCard.load(tiny_dir).fingerprint
    assert digest_of(copy) != digest_of(tiny_dir)


def test_a_worker_knows_the_digest_of_what_it_has_loaded(copy, tiny_dir):
    flip_a_bit_between_the_samples(copy)
    names = [ModelRunner.load(one, ModelCard.load(one), CONFIG).model_digest for one in (tiny_dir, tiny_dir, copy)]
    assert names[0] == names[1] != names[2]
    assert [len(name) for name in names] == [64] * 3


def test_other_ends_of_an_output_are_another_model(copy, tiny_dir):
    (copy / "generation_config.json").write_text('{"eos_token_id": [5]}')
    cards = [ModelCard.load(one) for one in (tiny_dir, copy)]
    assert cards[0].fingerprint == cards[1].fingerprint
    names = [ModelRunner.load(tiny_dir, card, CONFIG).model_digest for card in cards]
    assert names[0] != names[1]


def test_files_and_dtypes_of_the_engine_do_not_matter(copy, tiny_dir):
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    path.unlink()
    for index, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, copy / f"part-{index:03}.safetensors")
    assert digest_of(copy) == digest_of(tiny_dir)
    card = ModelCard.load(tiny_dir)
    for dtype in (torch.float32, torch.bfloat16):
        streamed = stream_weights(tiny_dir, card, dtype, CPU)
        streamed.held()
        assert streamed.source.digest() == digest_of(tiny_dir)


def test_every_read_tensor_is_digested_while_it_is_read(tiny_dir, monkeypatch):
    """Nothing is read a second time for the digest."""
    streamed = stream_weights(tiny_dir, ModelCard.load(tiny_dir), torch.float32, CPU)
    streamed.held()
    read: list[str] = []
    monkeypatch.setattr(digest.Adding, "add", lambda self, name, tensor: read.append(name))
    assert len(streamed.source.digest()) == 64
    assert not read


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    piece_bytes=st.integers(1, 16),
    at=st.integers(0, 200),
    data=st.data(),
)
def test_each_byte_of_each_tensor_counts(sizes, piece_bytes, at, data):
    tensors = [torch.arange(size, dtype=torch.uint8) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "PIECE_BYTES", piece_bytes)
        named = [(f"t{index}", one) for index, one in enumerate(tensors)]
        first = added(*named)
        assert added(*data.draw(st.permutations(named))) == first
        changed = [one for one in tensors if len(one)]
        if changed:
            which = data.draw(st.sampled_from(changed))
            which[at % len(which)] ^= 1
        assert (added(*named) != first) == bool(changed)


def test_names_dtypes_and_shapes_count():
    zeros = torch.zeros(2, 3)
    other = [added(("b", zeros)), added(("a", zeros.view(3, 2))), added(("a", zeros.view(torch.int32)))]
    assert len({added(("a", zeros)), *other}) == 4
