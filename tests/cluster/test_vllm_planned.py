"""`pdserve up --autoscaling` with workers that drive servers of vLLM. The servers are stand-ins, everything else is real."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdserve.rpc.v1 import inference_pb2
from testkit.client import generate_all, request
from testkit.vllm_stand_in import outputs

ROOT = Path(__file__).resolve().parents[2]
REAL = ("-m", "pdserve.cli")
PLANNER = {
    "start_s": 1,
    "smoothing_s": 2,
    "trend_s": 8,
    "memory_s": 4,
    "season_s": 0,
    "max_correction": 1,
    "downscale_delay_s": 5,
    "flip_delay_s": 5,
    "cooldown_s": 2,
}
PROMPTS = [[(7 * i + n) % 250 + 3 for i in range(200)] for n in range(4)]
EXPECTED = [outputs(prompt, 4, 512) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.ray
def test_the_planner_sizes_a_prefill_pool_of_vllm_by_how_busy_its_servers_are(run_command: type[Any], short_tmp: Path) -> None:
    """(1) Prompts keep one server busy all the time: the pool grows. (2) All answers are right. (3) The traffic ends: the pool
    shrinks to one again."""
    config = short_tmp / "pdserve.json"
    vllm = {
        "command": [sys.executable, "-m", "testkit.vllm_stand_in"],
        "args": ["--faults", json.dumps({"prefill_s": 0.2}), "--num-blocks", "4096"],
    }
    engine = {"backend": "vllm", "model": "tiny", "max_model_len": 512, "enable_prefix_caching": False, "vllm": vllm}
    settings = {
        "engine": engine,
        "prefill": {"max_replicas": 2},
        "decode": {"max_replicas": 1},
        "autoscaling": {"interval_s": 1.0, "planner": PLANNER},
    }
    config.write_text(json.dumps(settings))
    command = run_command("up", "--config", str(config), "--port", "0", "--autoscaling", program=REAL, PYTHONPATH=str(ROOT))
    command.wait_for("ready; Ctrl-C stops it")
    address = re.search(r"gRPC\S*\s+(\S+:\d+)", command.text)
    assert address is not None, command.text
    messages: list[inference_pb2.GenerateRequest] = [
        request(prompt, max_tokens=4, temperature=0.0, ignore_eos=True) for prompt in PROMPTS
    ]
    answers: list[list[int]] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers.extend(answer.ids for answer in generate_all(address[1], messages, 4))

    traffic = threading.Thread(target=load)
    traffic.start()
    try:
        command.wait_for(r"prefill 1 -> 2: ")
        command.wait_for(r"prefill-1 [^\n]*ready")
    finally:
        stop.set()
        traffic.join()
    assert answers == EXPECTED * (len(answers) // 4)
    command.wait_for(r"prefill 2 -> 1: ")
    command.signal(2)
    assert command.end() == 0
    command.assert_nothing_left()
