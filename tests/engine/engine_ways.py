"""Every way of computing on a CPU, as settings for `make_runner`."""

from __future__ import annotations

import pytest

from pdserve.engine.native import library

COMPILED = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
WAYS = [
    pytest.param({"dtype": "float32", "compiled": False}, id="float32"),
    pytest.param({"dtype": "bfloat16", "compiled": False}, id="bfloat16-torch"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16-compiled", marks=COMPILED),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8-compiled", marks=COMPILED),
]
