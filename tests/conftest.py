"""For all tests: on CI hypothesis draws the same examples in every run, so that a red run is the change's doing. An example may
take any time, since other tests share the cores.

Where there is no GPU, Triton's kernels are interpreted. Triton asks when it is first imported, by whichever test that is.
Other tests share the cores, so an OpenMP thread that waits must sleep. OpenMP asks when torch is first imported.
Some tests fork. gRPC must do nothing then (see router/__init__.py). It asks when it is first imported.
Routers and workers are forked from a process that has imported their code (testkit/zygote.py).
"""

import atexit
import fnmatch
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")
settings.register_profile("ci", settings.get_profile("shared cores"), derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
QUICK_SHARE = 6
"""With the profile "quick" a property tries this part of its examples, and ten at least. `make test-all` tries all of them."""
usual = settings.get_profile("ci" if os.environ.get("CI") else "shared cores")
settings.register_profile("quick", usual, max_examples=usual.max_examples // QUICK_SHARE)
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("PDSERVE_TESTING_FORK", "1")

LONG = ("cluster", "ray")

# What is imported and collected stays to the end: the collector of garbage need not look at it, then or in each test.
gc.disable()
# The interpreter frees all objects at its end. Otherwise, extension modules report leaks.
atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    """Let the collector of garbage see only what tests make. Code that freezes and unfreezes all objects around a run only
    freezes here: a look at what is collected takes half a second, and would be taken at each such run."""
    gc.freeze()
    gc.enable()
    gc.unfreeze = lambda: None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `quick` leaves out. Run files that start processes first: they take longest, and the last file should
    be short, since it has one core busy."""
    if settings.get_current_profile_name() == "quick":
        _try_fewer_examples({item.function for item in items if isinstance(item, pytest.Function)})
    unmatched = set()
    matched = set()
    for item in items:
        for mark in item.iter_markers("quick"):
            assert isinstance(item, pytest.Function)
            patterns = [one for one in mark.args if fnmatch.fnmatchcase(item.callspec.id, one)]
            if not patterns:
                item.add_marker("slow")
            unmatched.update((item.path, item.originalname, one) for one in mark.args)
            matched.update((item.path, item.originalname, one) for one in patterns)
    if unmatched > matched and not any("::" in one for one in config.args):
        raise pytest.UsageError(f"`quick` names parameters that do not exist: {sorted(unmatched - matched)}")
    files = {item.path for item in items if any(item.get_closest_marker(mark) for mark in LONG)}
    items.sort(key=lambda item: item.path not in files)


def _try_fewer_examples(functions: set[Any]) -> None:
    few = settings().max_examples  # of the profile: what says no number has a part already, and so has a property in a test

    def fewer(given: settings) -> settings:
        if given.max_examples == few:
            return given
        return settings(given, max_examples=max(min(given.max_examples, 10), given.max_examples // QUICK_SHARE))

    machines = {machine.TestCase for f in functions if (machine := getattr(f, "_hypothesis_state_machine_class", None))}
    for machine in machines:
        machine.settings = fewer(machine.settings)
    for function in functions - {machine.runTest for machine in machines}:
        if hasattr(function, "hypothesis"):
            function._hypothesis_internal_use_settings = fewer(function._hypothesis_internal_use_settings)
