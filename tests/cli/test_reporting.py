from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kvblend.actors.errors import RequestError
from kvblend.api.client import ConnectionLost, ServerBusy
from kvblend.cli.failures import BadInput, CommandError
from kvblend.cli.reporting import explain, reported
from kvblend.engine.config import BadModelFile
from kvblend.store.errors import StoreError, StoreUnusable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("b"), 2),
        (CommandError("c"), 1),
        (RequestError("invalid_request", "r"), 2),
        (RequestError("not_found", "r"), 2),
        (RequestError("overloaded", "r"), 1),
        (RequestError("internal", "r"), 1),
        (ServerBusy(429, "rate_limited", "s"), 1),
        (ConnectionLost("l"), 1),
        (BadModelFile("cut short"), 2),
        (StoreUnusable(Path("/x"), "of another version"), 2),
        (StoreError("disk full"), 1),
        (PermissionError(13, "Permission denied", "/x"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert explain(error)[1] == code


def test_a_missing_library_names_the_extra() -> None:
    assert "pip install 'kvblend[server]'" in explain(ModuleNotFoundError("x", name="torch"))[0]


def run(error: BaseException) -> int:
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        reported(command)()
    return int(caught.value.exit_code)


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ValueError("odd")) == 1
    assert capsys.readouterr().err == "error: unexpected ValueError: odd (KVBLEND_DEBUG=1 shows where)\n"


def test_ctrl_c_ends_with_130() -> None:
    assert run(KeyboardInterrupt()) == 130


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_DEBUG", "1")

    def command() -> None:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        reported(command)()
