"""For all tests: on CI hypothesis draws the same examples in every run, so that a red run is the change's doing."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
