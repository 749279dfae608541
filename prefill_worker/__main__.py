"""The command `python -m prefill_worker`, which runs a prefill worker without Ray."""

from pdserve.worker.process import run
from prefill_worker.main import start

run(start, "prefill")
