"""Clients that check answers: the openai package, lm-eval, grpcurl and the gateway smg."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pdserve
from bench.clients.client import ClientFailed, Found, Server, output_of
from bench.deaths.cluster import free_port
from pdserve.client.blocking import Client
from pdserve.client.params import SamplingParams

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
QUESTIONS: Final = (
    ("The capital of France is", " Paris", " Rome"),
    ("Two and two is", " four", " purple"),
    ("Water is made of hydrogen and", " oxygen", " bread"),
    ("The opposite of hot is", " cold", " seven"),
)
_TASK: Final = """
task: pdserve_{kind}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
{rest}
"""
_CHOICE: Final = """doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""
_UNTIL: Final = """doc_to_target: "{{right}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
"""
_INFERENCE: Final = "pdserve.rpc.v1.Inference"


def openai(python: Path, server: Server, folder: Path) -> Found:
    """Run the checks of `scripts/openai_checks.py`."""
    told = json.loads(output_of([str(python), str(SCRIPTS / "openai_checks.py"), server.url, server.model], folder))
    if told["wrong"]:
        raise ClientFailed("; ".join(told["wrong"]))
    return Found(told["requests"], 0, ", ".join(told["done"]))


def agents(name: str, python: Path, server: Server, folder: Path) -> Found:
    """Run the checks of one framework in `scripts/agent_checks.py`."""
    told = json.loads(output_of([str(python), str(SCRIPTS / "agent_checks.py"), name, server.url, server.model], folder))
    if told["wrong"]:
        raise ClientFailed("; ".join(told["wrong"]))
    return Found(len(told["done"]), 0, ", ".join(told["done"]))


def lm_eval(python: Path, server: Server, folder: Path) -> Found:
    """Run a task of choices, by log-probabilities of prompts, and a task of texts. Compare the first task with our own
    client."""
    data = folder / "questions.jsonl"
    rows = [{"question": q, "right": right, "wrong": wrong} for q, right, wrong in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, rest in (("multiple_choice", _CHOICE), ("generate_until", _UNTIL)):
        (folder / f"{kind}.yaml").write_text(_TASK.format(kind=kind, data=data, rest=rest))
    arguments = {
        "model": server.model, "base_url": f"{server.url}/v1/completions", "tokenizer": server.tokenizer,
        "tokenizer_backend": "huggingface", "num_concurrent": 4, "max_retries": 1, "tokenized_requests": True,
    }  # fmt: skip
    command = [
        *(str(python), "-m", "lm_eval", "--model", "local-completions", "--include_path", str(folder)),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", "pdserve_multiple_choice,pdserve_generate_until", "--output_path", str(folder / "out"), "--log_samples"),
    ]
    env = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    output_of(command, folder, env=env)
    samples = _samples(folder / "out", "multiple_choice")
    worst = max(abs(got - want) for got, want in zip(_scores(samples), _own_scores(server), strict=True))
    if worst > 1e-3:
        raise ClientFailed(f"its log-likelihoods differ by {worst:.4f} from those of our own client")
    count = 2 * len(QUESTIONS) + len(_samples(folder / "out", "generate_until"))
    return Found(count, 0, f"generate; log-likelihoods equal our client's to within {worst:.1g}")


def _samples(folder: Path, kind: str) -> list[dict[str, Any]]:
    (found,) = folder.rglob(f"samples_pdserve_{kind}_*.jsonl")
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    return sorted(lines, key=lambda one: int(one["doc_id"]))


def _scores(samples: list[dict[str, Any]]) -> list[float]:
    return [float(one[0]) for sample in samples for one in sample["filtered_resps"]]


def _own_scores(server: Server) -> list[float]:
    """Return the log-likelihood of each choice after its question, by log-probabilities of prompts over gRPC."""
    scores = []
    with Client(server.grpc) as client:
        for question, *choices in QUESTIONS:
            skipped = len(client.tokenize(question))
            for choice in choices:
                told = client.generate(question + choice, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
                scores.append(sum(one.logprob for one in told.outputs[0].prompt_logprobs[skipped - 1 :]))
    return scores


def grpcurl(python: Path, server: Server, folder: Path) -> Found:
    """Look the service up by reflection, and call it."""

    def call(method: str, body: dict[str, Any] | None = None) -> str:
        data = () if body is None else ("-d", json.dumps(body))
        return output_of([str(python.with_name("grpcurl")), "-plaintext", *data, server.grpc, *method.split()], folder)

    if _INFERENCE not in call("list") or "rpc Generate" not in call(f"describe {_INFERENCE}"):
        raise ClientFailed("reflection does not show the service")
    if "SERVING" not in call("grpc.health.v1.Health/Check"):
        raise ClientFailed("the service is not healthy")
    ids = json.loads(call(f"{_INFERENCE}/Tokenize", {"text": "The sky is"}))["ids"]
    body = {"text": "The sky is", "sampling": {"max_tokens": 8, "temperature": 0}}
    parts = _objects(call(f"{_INFERENCE}/Generate", body))
    drawn = tuple(token for part in parts for token in part.get("ids", ()))
    with Client(server.grpc) as client:
        own = client.generate("The sky is", SamplingParams(max_tokens=8, temperature=0.0)).ids
        if own != drawn or client.tokenize("The sky is") != tuple(ids):
            raise ClientFailed(f"its ids {drawn} are not those of our own client, {own}")
    call(f"{_INFERENCE}/GetModelInfo", {})
    cancelled = json.loads(call(f"{_INFERENCE}/Cancel", {"request_id": "none", "cancel_token": "none"}) or "{}")
    if cancelled.get("found"):
        raise ClientFailed("a request that does not exist was cancelled")
    return Found(7, 0, f"reflection, health, ids equal those of pdserve {pdserve.__version__}'s client")


def smg(python: Path, server: Server, folder: Path) -> Found:
    """Put the gateway in front of the router's `VllmEngine`, and compare its answers over HTTP with those of the router."""
    port, metrics = free_port(), free_port()
    command = [
        *(str(python.with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"grpc://{server.grpc}", "--backend", "vllm", "--prometheus-port", str(metrics)),
    ]
    with (folder / "smg.log").open("wb") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        try:
            script = str(SCRIPTS / "smg_checks.py")
            told = json.loads(output_of([str(python), script, f"http://127.0.0.1:{port}", server.url, server.model], folder))
        finally:
            process.kill()
    if told["wrong"]:
        raise ClientFailed("; ".join(told["wrong"]))
    return Found(told["requests"], 0, f"equal the router's own: {', '.join(told['done'])}")


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that follow each other in a text."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        one, place = decoder.raw_decode(text, place)
        found.append(one)
    return found
