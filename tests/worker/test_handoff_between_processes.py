"""KV blocks in the decode worker's process equal those in the prefill worker's, bit for bit, after real NIXL reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kv_digests import digests

from decode_worker.main import start as start_decode
from kvtransfer.ticket import Ticket
from pdserve.config import MIB, EngineConfig, WorkerConfig, dump
from pdserve.core.sampling import SamplingParams
from testkit.scripted_router import ScriptedRouter

ENGINE = EngineConfig(model="tiny", dtype="bfloat16", kv_cache_memory=2 * MIB, max_model_len=512, threads=1)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
BLOCKS = 12


def test_every_block_of_a_prompt_arrives_as_it_was(tmp_path):
    with ScriptedRouter() as router:
        path = tmp_path / "prefill.yaml"
        path.write_text(dump(WorkerConfig("p", router.address, ENGINE)))
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kv_digests.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        ours = start_decode(WorkerConfig("d", router.address, ENGINE))
        try:
            prefill, decode = router.worker("p"), router.worker("d")
            prompt = [i * 7 % 256 for i in range(BLOCKS * ENGINE.block_size)]
            bound = router.bind(decode, prompt, PARAMS)
            decode.wait("Reserved", bound)
            started = prefill.wait("PrefillStarted", router.prefill(prefill, prompt, PARAMS))
            router.attach(decode, bound, started)
            decode.wait_finished(bound)
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            theirs = json.loads(child.stdout.readline())
            sent = [theirs[block] for block in Ticket.decode(started.ticket).block_tables[0]]
            assert len(set(sent)) == BLOCKS, "each block holds something of its own"
            assert set(sent) <= set(digests(ours.engine.kv.caches[0].tensor))
        finally:
            ours.stop()
            child.communicate(timeout=60)
        assert child.returncode == 0
