from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvblend.cli import serve as module
from kvblend.cli.app import app


@pytest.fixture
def stop_when_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = module.announce

    def announce_and_stop(host: str, port: int) -> None:
        announce(host, port)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "announce", announce_and_stop)


@pytest.mark.usefixtures("stop_when_listening")
def test_it_prints_its_address_and_ends_with_0_on_sigterm(local_system: list[Any], model_folder: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("listening on ws://127.0.0.1:")
    assert result.stdout.count("\n") == 1


def test_ipv6_addresses_are_bracketed(capsys: pytest.CaptureFixture[str]) -> None:
    module.announce("::1", 5)
    assert capsys.readouterr().out == "listening on ws://[::1]:5/v1/responses\n"
