from pdserve.worker.process import run
from prefill_worker.main import start

run(start, "prefill")
