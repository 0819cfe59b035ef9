from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvblend.cli import serve as module
from kvblend.cli.app import app
from kvblend.engine.selectors.spec import SelectorSpec


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


@pytest.mark.usefixtures("stop_when_listening")
def test_the_flags_reach_the_settings(local_system: list[Any], model_folder: Path) -> None:
    flags = ["--recompute-ratio", "0.3", "--conditioning", "bare", "--dtype", "bfloat16", "--max-num-seqs", "3"]
    CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", "--system", "s", *flags])
    settings = local_system[0][1]
    assert (settings.recompute_ratio, settings.conditioning, settings.dtype) == (0.3, "bare", "bfloat16")
    assert (settings.max_num_seqs, settings.system) == (3, "s")


@pytest.mark.usefixtures("stop_when_listening")
def test_blend_options_reach_the_settings(local_system: list[Any], model_folder: Path) -> None:
    flags = ["--selector", "union", "--blend", "check_layers=1,3", "--blend", "sinks=2", "--residual", "ridge"]
    CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", *flags])
    wanted = SelectorSpec("union", check_layers=(1, 3), sinks=2, residual="ridge")
    assert local_system[0][1].selection == wanted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--blend", "thresholds=0.1,0.2"], "thresholds is (0.1, 0.2); it needs one entry per check layer"),
        (["--selector", "luck"], "selector is 'luck'; choose divergence"),
        (["--selector", "query", "--blend", "selector=union"], "--blend selector and --selector: give one of the two"),
    ],
)
def test_a_bad_selection_starts_nothing(
    local_system: list[Any], model_folder: Path, flags: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), *flags])
    assert (result.exit_code, local_system) == (2, [])
    assert message in result.stderr


def test_a_setting_out_of_range_starts_nothing(local_system: list[Any], model_folder: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--recompute-ratio", "-1"])
    assert result.exit_code == 2
    assert "recompute_ratio is -1" in result.stderr
    assert local_system == []


def test_ipv6_addresses_are_bracketed(capsys: pytest.CaptureFixture[str]) -> None:
    module.announce("::1", 5)
    assert capsys.readouterr().out == "listening on ws://[::1]:5/v1/responses\n"
