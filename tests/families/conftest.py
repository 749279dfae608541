"""A tiny random model of each family with its reference logits, made once for a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from family_models import Made, write_model

from tests.one_thread import one_thread as one_thread


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Callable[[str], Made]:
    """made(name): a model of `RANDOM_MODELS`."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    models: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in models:
            models[name] = write_model(tmp_path_factory.mktemp(name), name)
        return models[name]

    return make
