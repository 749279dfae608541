"""Models by Hugging Face id, downloaded by real processes from a local server of the hub's API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serving
from safetensors.numpy import load_file

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.shards import write_shards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sharded(tiny_dir, tmp_path_factory) -> Path:
    """The tiny model in several files, without our own note; beside it what must not be downloaded."""
    folder = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("hub") / "sharded")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "pdserve.json"):
        (folder / name).unlink()
    write_shards(folder, {n: t.shape for n, t in tensors.items()}, tensors.__getitem__, lambda _: None, limit=200_000)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"the same weights again")
    return folder


@pytest.fixture(scope="module")
def server(tiny_dir, sharded):
    with serving({"acme/tiny": tiny_dir, "acme/tiny-sharded": sharded}) as hub:
        yield hub


@pytest.fixture
def hub(server: Hub):
    server.status, server.error_code = 0, ""
    server.silent.clear()
    server.requests.clear()
    return server


def prepare(model: str, cache: Path, url: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m pdserve.checkpoint MODEL`: huggingface_hub reads its environment once, at import."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "XDG_CACHE_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pdserve.checkpoint", model],
        cwd=ROOT, env=os.environ | settings | env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert done.stderr.rstrip().endswith(errors[0]), done.stderr  # one line, the last
    return errors[0]


def test_a_model_is_downloaded_once_and_named_by_its_id(hub, tiny_dir, tmp_path):
    first = prepare("acme/tiny", tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert directory.name == COMMIT
    assert ModelCard.load(directory).fingerprint == ModelCard.load(tiny_dir).fingerprint
    hub.requests.clear()
    assert prepare("acme/tiny", tmp_path, hub.url).stdout == first.stdout
    assert not [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]

    # From now on the hub is away: what is there serves.
    offline = prepare("acme/tiny", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline.stdout == first.stdout, offline.stderr


def test_shards_come_with_their_index_and_nothing_else_does(hub, sharded, tmp_path):
    """The second copy of the weights that repositories keep in a folder once came along."""
    done = prepare("acme/tiny-sharded", tmp_path, hub.url)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {path.name for path in directory.glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert len(files) > 1
    card = ModelCard.load(directory)
    assert card.name == "acme/tiny-sharded"
    assert card.fingerprint == ModelCard.load(sharded).fingerprint
    assert not (directory / "pytorch_model.bin").exists()
    assert not (directory / "original").exists()


def test_an_id_that_does_not_exist_says_what_to_do(hub, tmp_path):
    line = refusal(prepare("acme/nothing", tmp_path, hub.url))
    assert f"there is no model acme/nothing at {hub.url}" in line
    assert "Give a directory" in line


@pytest.mark.quick("403-GatedRepo-*", "500-*")
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "set HF_TOKEN"),
        (401, "RepoNotFound", "HF_TOKEN"),
        (500, "", "cannot be reached"),
        (403, "", "acme/tiny"),
    ],
)
def test_a_refusing_server_says_what_to_do(hub, tmp_path, status, code, words):
    hub.status, hub.error_code = status, code
    line = refusal(prepare("acme/tiny", tmp_path, hub.url))
    assert words in line
    assert "Give a directory" in line


def test_a_server_that_is_down_says_what_to_do(tmp_path):
    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        line = refusal(prepare("acme/tiny", tmp_path, url))
    assert f"{url} cannot be reached" in line
    assert "Give a directory" in line


def test_offline_says_what_to_do(hub, tmp_path):
    line = refusal(prepare("acme/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in line
    assert hub.requests == []


def test_a_server_that_never_answers_is_given_up(hub, tmp_path):
    """The wait for the list of files once had no bound."""
    hub.silent.set()
    line = refusal(prepare("acme/tiny", tmp_path, hub.url, HF_HUB_ETAG_TIMEOUT="1"))
    assert "cannot be reached" in line


def test_a_repository_that_lacks_the_tokenizer_is_refused_by_name(hub, tiny_dir, tmp_path):
    lacking = shutil.copytree(tiny_dir, tmp_path / "lacking")
    (lacking / "tokenizer.json").unlink()
    hub.models["acme/lacking"] = lacking
    assert "lacks tokenizer.json" in refusal(prepare("acme/lacking", tmp_path, hub.url))


@pytest.mark.quick("acme/-x-")
@pytest.mark.parametrize("model", ["a..b/c", "acme/-x-", "ac me/tiny"])
def test_what_is_no_id_is_refused(hub, tmp_path, model):
    assert "is not a Hugging Face id" in refusal(prepare(model, tmp_path, hub.url))
