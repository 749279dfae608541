from decode_worker.main import start
from pdserve.worker.process import run

run(start, "decode")
