from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvblend.cli.app import app


def test_pulling_an_unknown_model_is_bad_input() -> None:
    result = CliRunner().invoke(app, ["pull", "nothing"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: model 'nothing' is not known; known: smollm2, gemma3-270m\n",
    )


def test_a_pull_that_finds_the_model_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.cli.pull.pull", lambda _model, _console: False)
    assert "nothing to do" in CliRunner().invoke(app, ["pull", "smollm2"]).stdout


def test_pulling_shows_terms_and_wants_a_yes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.cli.pull.pull", None)
    result = CliRunner().invoke(app, ["pull", "gemma3-270m"])
    assert result.exit_code == 2
    assert "ai.google.dev/gemma/terms" in result.stderr
    assert "give --accept-terms" in result.stderr


def test_accepted_terms_let_a_pull_begin(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.cli.pull.pull", lambda _model, _console: True)
    result = CliRunner().invoke(app, ["pull", "gemma3-270m", "--accept-terms"])
    assert (result.exit_code, "(Gemma Terms of Use)" in result.stdout) == (0, True)


def test_help_of_pull_lists_the_known_models() -> None:
    assert "smollm2, gemma3-270m" in CliRunner().invoke(app, ["pull", "--help"], terminal_width=200).stdout
