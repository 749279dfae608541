"""Facts about the repository itself, which would otherwise be found out by the first who installs or reads it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pdserve
import pdserve_bench

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer")
TORCH_FREE = (
    "router", "pdserve.core", "pdserve.config", "pdserve.rpc", "pdserve.text", "pdserve.checkpoint", "pdserve.observe",
    "pdserve.client", "pdserve.capacity", "pdserve.structured",
)  # fmt: skip
SCRIPT_IMPORT = re.compile(rf"^\s*from ((?:{'|'.join((*PACKAGES, 'sim', 'testkit'))})(?:\.\w+)*) import ([\w, ]+)$", re.M)
HEAVY = ("torch", "triton", "ray", "nixl", "nixl_cu12", "transformers")


def sources() -> list[Path]:
    files = [path for package in (*PACKAGES, "bench/pdserve_bench") for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in files if "rpc/v1" not in path.as_posix()]


def tracked(*folders: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def test_no_other_distribution_brings_a_package_of_ours():
    """The names are short: another project's `router` beside ours would be imported instead. Where pdserve runs from its
    folder and is not installed, nobody owns them.
    """
    owners = importlib.metadata.packages_distributions()
    wanted = dict.fromkeys(PACKAGES, "pdserve") | {"pdserve_bench": "pdserve-bench"}
    assert {package: set(owners.get(package, [name])) for package, name in wanted.items()} == {
        p: {n} for p, n in wanted.items()
    }


def test_the_stubs_are_what_the_protocol_generates():
    """In a process of its own: the compiler's native code does not bear the company of torch's and Ray's."""
    pytest.importorskip("grpc_tools", reason="generating needs a development dependency")
    command = [sys.executable, "tools/generate_protos.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", ["state_diagrams", "errors_doc"])
def test_a_page_made_from_code_says_what_the_code_does(tool):
    command = [sys.executable, "-m", f"tools.{tool}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_control_plane_loads_nothing_heavy():
    """Every module of it, in a process of its own; torch alone takes seconds and hundreds of megabytes."""
    code = f"""
import importlib, pkgutil, sys
for name in {TORCH_FREE!r}:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print([name for name in {HEAVY!r} if name in sys.modules], "router.main" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[] True\n", done.stderr


PURE_ROOMS = ("pdserve.core", "pdserve.engine.schedule", "router.api", "router.core", "router.openai")
IMPURE = (
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "selectors",
    "numpy",
    "torch",
    "grpc",
    "google.protobuf",
    "starlette",
    "uvicorn",
    "ray",
)


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_brings_nothing_impure_along(room):
    """The contracts read import statements. This looks at what an import of each file of a room really loads."""
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({room!r})
for found in pkgutil.walk_packages(package.__path__, {room!r} + "."):
    importlib.import_module(found.name)
print(sorted(set({IMPURE!r}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


NEEDS_NO_RAY = ("pdserve.engine.schedule.scheduler", "kvtransfer.pull", "pdserve.worker.link", "pdserve.cluster.launch")


def test_what_decides_for_workers_needs_no_nixl_and_no_ray():
    """`pdserve.cluster.launch` loads Ray once the router starts beside it."""
    code = f"import sys, {', '.join(NEEDS_NO_RAY)}; print([n for n in ('ray', 'nixl') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_every_module_says_what_it_is():
    texts = {str(p.relative_to(ROOT)): p.read_text().strip() for p in sources() if p.name != "__main__.py"}
    assert [name for name, text in texts.items() if text and not text.startswith('"""')] == []


def test_a_script_in_a_string_imports_names_that_exist():
    """No type checker reads it, and a tool that renames a class does not see it."""
    missing = []
    for name in tracked("tests", "testkit", "sim", "pdserve", "tools"):
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            for package, names in SCRIPT_IMPORT.findall(node.value):
                module = importlib.import_module(package)
                wanted = [each.split(" as ")[0].strip() for each in names.split(",")]
                rooms = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
                unknown = [each for each in wanted if each not in rooms and not hasattr(module, each)]
                missing += [f"{name}:{node.lineno} {package}.{each}" for each in unknown]
    assert not missing


def test_no_simple_queue_is_waited_for_with_a_limit():
    """CPython 3.11's `SimpleQueue.get(timeout=...)` waits for ever when its thread is held up for longer than the timeout
    before it waits: the rest of the timeout is below zero then, and its lock takes that for no limit. `queue.Queue` does not.
    """
    texts = {name: (ROOT / name).read_text() for name in tracked() if name.endswith(".py")}
    waits = re.compile(r"SimpleQueue[\[(].*\.get\([^()]*timeout", re.DOTALL)
    assert [name for name, text in texts.items() if waits.search(text)] == []


def test_test_files_have_names_of_their_own():
    """Folders without __init__.py share one name space: two files of a name shadow each other."""
    seen: dict[str, str] = {}
    for name in tracked("tests"):
        path = Path(name)
        if path.suffix == ".py" and path.name != "conftest.py" and not (ROOT / path.parent / "__init__.py").exists():
            assert path.name not in seen, f"{name} and {seen[path.name]}"
            seen[path.name] = name


def test_the_changelog_has_this_version():
    assert re.search(rf"^## \[?{re.escape(pdserve.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_command_that_is_named_anywhere_is_a_module_of_ours():
    """Files move, and what names them in text does not move along."""
    command = re.compile(
        r"python3? -m ((?:" + "|".join((*PACKAGES, "sim", "testkit", "bench", "tools", "deploy")) + r")[a-z0-9_.]*)"
    )
    named = {module.rstrip(".") for name in tracked() for module in command.findall((ROOT / name).read_text(errors="replace"))}
    assert len(named) > 20
    stems = [ROOT / module.replace(".", "/") for module in named]
    assert [stem for stem in stems if not stem.with_suffix(".py").exists() and not stem.is_dir()] == []


def test_every_file_that_a_page_names_exists():
    """Pages name files by the end of their path, such as `native/src/draw.h`."""
    names = tracked()
    ends = {name[start:] for name in names for start in (0, *(mark.end() for mark in re.finditer("/", name)))}
    path = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cpp|proto|md|yaml))`")
    pages = [name for name in names if name.endswith(".md")]
    assert [(page, at) for page in pages for at in path.findall((ROOT / page).read_text()) if at not in ends] == []


def test_both_distributions_have_one_version():
    """`pdserve bench` reads what this version of pdserve writes, so it asks for no other."""
    texts = [tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "bench/pyproject.toml")]
    assert pdserve_bench.__version__ == pdserve.__version__
    assert f"pdserve=={pdserve.__version__}" in texts[1]["dependencies"]
    for field in ("requires-python", "license", "license-files"):
        assert texts[0][field] == texts[1][field]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "packages"), [(".", PACKAGES), ("bench", ("bench/pdserve_bench",))], ids=["pdserve", "pdserve-bench"]
)
def test_a_wheel_holds_its_packages_whole_and_nothing_else(project, packages, tmp_path):
    """Built from a copy, as building writes beside its sources."""
    pytest.importorskip("setuptools", reason="the build back end is not installed")
    names = tracked()
    for name in names:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "copy" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*build, "-w", str(tmp_path / "out"), str(tmp_path / "copy" / project)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    compiled = {name for name in held if name.startswith("pdserve/engine/native/_")} - set(names)  # none without a compiler
    expected = 5  # a library for each of four instruction sets, and that of sums
    assert len(compiled) == (expected if project == "." and shutil.which("g++") is not None else 0)
    ours = {name for name in names if name.startswith(tuple(f"{package}/" for package in packages))}
    assert held - compiled == {str(Path(name).relative_to("bench") if project == "bench" else name) for name in ours}
