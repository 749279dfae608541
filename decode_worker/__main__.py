"""The command `python -m decode_worker`, which runs a decode worker without Ray."""

from decode_worker.main import start
from pdserve.worker.process import run

run(start, "decode")
