"""Without Triton these tests are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.engine.kernels.support import triton_installed
from tests.one_thread import one_thread as one_thread


class WithoutTriton(pytest.Module):
    """A file of tests that cannot be imported here."""

    def collect(self):
        pytest.skip("the kernels need Triton: pip install 'pdserve[gpu]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent):
    return None if triton_installed() else WithoutTriton.from_parent(parent, path=module_path)
