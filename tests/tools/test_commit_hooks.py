"""Git's hooks refuse a long subject, and run exactly the commands of `make check`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.commit_subject import LIMIT, subject_of

ROOT = Path(__file__).resolve().parents[2]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]


def commit(tmp_path: Path, message: str) -> subprocess.CompletedProcess:
    """Call the hook as Git does."""
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message)
    command = [sys.executable, "-m", "tools.commit_subject", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_subject_of_the_limit_is_refused_and_one_character_less_is_not(tmp_path):
    assert commit(tmp_path, "s" * (LIMIT - 1) + "\n").returncode == 0
    refused = commit(tmp_path, "s" * LIMIT + "\n")
    assert refused.returncode == 1
    assert f"has {LIMIT} characters" in refused.stderr


def test_only_the_subject_counts(tmp_path):
    assert commit(tmp_path, "Short\n\n" + "b" * 200 + "\n").returncode == 0


@pytest.mark.parametrize(
    ("message", "subject"),
    [
        ("# a comment of Git's\n\n  A subject  \nmore\n", "A subject"),
        ("Wörter zählen nach Zeichen\n", "Wörter zählen nach Zeichen"),
        ("# nothing but comments\n", ""),
        ("", ""),
    ],
)
def test_the_subject_is_the_first_line_that_git_keeps(message, subject):
    assert subject_of(message) == subject


def test_hooks_run_the_commands_of_make_check():
    """Whoever changes one of the two is told here of the other."""
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert sorted(hook["entry"] for hook in HOOKS if hook.get("stages") != ["commit-msg"]) == sorted(checks)


def test_types_and_imports_wait_for_the_push():
    """They take seconds, which nobody should wait for at each commit."""
    assert {hook["id"] for hook in HOOKS if hook.get("stages") == ["pre-push"]} == {"types", "imports"}
