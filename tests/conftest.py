"""For all tests: on CI hypothesis draws the same examples in every run, so that a red run is the change's doing.

Where there is no GPU, Triton's kernels are interpreted. Triton asks when it is first imported, by whichever test that is.
"""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
