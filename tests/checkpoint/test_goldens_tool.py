"""The tool that writes the goldens still writes those that are stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

STORED = Path(__file__).resolve().parents[1] / "goldens"


@pytest.mark.slow  # goldens and tool change together; transformers is compared with in tests/families as well
def test_the_tiny_models_goldens_are_reproduced(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the reference implementation is a development dependency")
    from tools import make_goldens

    monkeypatch.setattr(make_goldens, "GOLDENS", tmp_path)
    make_goldens.torch.set_num_threads(1)
    make_goldens.write_model("tiny")
    fresh, stored = (json.loads((folder / "tiny.json").read_text()) for folder in (tmp_path, STORED))
    del fresh["made_by"], stored["made_by"]  # another release may give the same numbers
    assert fresh == stored
    with np.load(tmp_path / "tiny.npz") as made, np.load(STORED / "tiny.npz") as kept:
        assert set(made.files) == set(kept.files)
        for name in kept.files:
            if kept[name].dtype.kind == "i":
                np.testing.assert_array_equal(made[name], kept[name], err_msg=name)
            else:
                np.testing.assert_allclose(made[name], kept[name], atol=1e-5, err_msg=name)
