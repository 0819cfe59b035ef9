from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("scripts/setup", "scripts/test", "scripts/demo", ".ci/run")


def bash(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def with_setup(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return bash(f". '{ROOT}/scripts/setup'; {code}", cwd)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111
    assert bash(f"bash -n {script}").returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stop_at_the_first_failure(script: str) -> None:
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text()


def test_a_failed_step_names_its_command_and_shows_its_output() -> None:
    done = with_setup("quietly 'doing it' bash -c 'echo the reason; exit 3'")
    assert done.returncode == 3
    assert "doing it: FAILED with exit code 3" in done.stderr
    assert "command: bash -c" in done.stderr
    assert "the reason" in done.stderr


def test_a_step_that_works_shows_one_line() -> None:
    done = with_setup("quietly 'doing it' bash -c 'echo noise; echo noise >&2'")
    assert done.returncode == 0
    assert done.stdout == ""
    assert [line.partition(" (")[0] for line in done.stderr.splitlines()] == ["setup: doing it: done"]


def test_a_missing_interpreter_is_named() -> None:
    done = with_setup("PYTHON=python-of-nowhere set_up dev")
    assert done.returncode == 1
    assert "python-of-nowhere" in done.stderr


def test_the_root_is_found_from_anywhere(tmp_path: Path) -> None:
    assert with_setup('echo "$KVBLEND_ROOT"', tmp_path).stdout.strip() == str(ROOT)


def test_an_unknown_kind_of_set_up_is_refused() -> None:
    done = bash("scripts/setup everything")
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_ci_runs_the_test_script(tmp_path: Path) -> None:
    """With a stand-in for scripts/test: arguments arrive, and the exit code comes back."""
    for folder in (".ci", "scripts"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "scripts" / "test").write_text('#!/usr/bin/env bash\necho "$@"\nexit 5\n')
    for script in (".ci/run", "scripts/test"):
        (tmp_path / script).chmod(0o755)
    done = bash(".ci/run --one two", tmp_path)
    assert (done.returncode, done.stdout) == (5, "--one two\n")
