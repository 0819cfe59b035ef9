"""`kvblend doctor`: a sound model passes, a poor one fails with exit code 1, and both say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from typer.testing import CliRunner, Result

from kvblend.cli.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("doctor"), max_position_embeddings=4096)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--recompute-ratio", "2"), "--recompute-ratio is 2.0"),
        (("--gate-kl-max", "-1"), "--gate-kl-max is -1.0"),
        (("--model", "nowhere"), "'nowhere'"),
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(model: Path, flags: tuple[Any, ...], said: str) -> None:
    result = invoke("--model", model, *flags)
    assert result.exit_code == 2
    assert said in result.stderr
