"""A member of a cluster with a folder of an operator's own on its path. The environment names the folder and the member."""

import os
import runpy
import sys

from testkit.processes import MODULE

FOLDER = "PDSERVE_TESTING_FOLDER"

if __name__ == "__main__":
    sys.path.insert(0, os.environ[FOLDER])
    runpy.run_module(os.environ[MODULE], run_name="__main__")
