"""The checks of a server that runs already, whose command somebody else has written: it serves the model of the settings, takes
ids of tokens, and lends KV where it must. Each is found by a request, at the start, before users would find it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import httpx2

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.worker.vllm.client import GENERATE
from pdserve.worker.vllm.requests import BadAnswer, prefill_body, read_kv
from pdserve.worker.vllm.server import ServerFacts

PROMPT: Final = (1,) * 16
"""Any ids that every model has. Where its block is lent, it waits for vLLM's own time: only a reader's engine can free it, and
vLLM ends by an assertion when it reads its own."""


def check_attached(config: WorkerConfig, directory: Path, facts: ServerFacts, role: str) -> None:
    """Raise `ConfigError` unless the server can serve a worker of this role, "prefill" or "decode", with the files in
    `directory`. The answer must come within `start_timeout_s`."""
    url, named = config.engine.vllm.url, config.engine.model
    if facts.root not in (named, str(directory)) and not (Path(facts.root).is_dir() and Path(facts.root).samefile(directory)):
        raise ConfigError(f"{url} serves {facts.root!r:.200}, engine.model is {named!r}: name the same model")
    lends = role == "prefill"
    params = SamplingParams(max_tokens=2 if lends else 1, temperature=0.0, ignore_eos=True)  # one token alone needs no KV
    body = prefill_body(RequestSpec(PROMPT, params), (), ())
    try:
        with httpx2.Client(base_url=url, timeout=config.start_timeout_s, trust_env=False) as client:
            response = client.post(GENERATE, json=body)
    except httpx2.HTTPError as exc:
        raise ConfigError(f"{url} does not answer a request of one token: {exc!r}") from exc
    if response.status_code == 404:
        raise ConfigError(f"{url} has no {GENERATE}: start its vLLM with --enable-scale-out")
    if response.status_code != 200:
        raise ConfigError(f"{url} answers a request of one token with status {response.status_code}: {response.text[:200]}")
    if lends:
        try:
            read_kv(response.json(), len(PROMPT), facts.block_size)
        except (BadAnswer, ValueError) as exc:
            raise ConfigError(
                f"{url} lends no KV to decode workers: start its vLLM with --kv-transfer-config "
                f'\'{{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}\' ({exc})'
            ) from exc
