"""A tiny random model of each family with its reference logits, made once for a session."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from family_models import LENGTH, Made

from pdserve.checkpoint.card import ModelCard
from testkit.random_models import reference_logits, write_random


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Callable[[str], Made]:
    """made(name): a model of `RANDOM_MODELS`."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    models: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in models:
            directory = tmp_path_factory.mktemp(name)
            model = write_random(directory, name)
            ids = random.Random(name).choices(range(512), k=LENGTH)
            models[name] = Made(directory, ModelCard.load(directory), tuple(ids), reference_logits(model, ids))
        return models[name]

    return make
