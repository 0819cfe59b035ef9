from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvblend.cli import serve as module
from kvblend.cli.app import app
from kvblend.cli.logs import StderrHandler
from kvblend.engine.selectors.spec import SelectorSpec


@pytest.fixture
def stop_when_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = module.announce

    def announce_and_stop(host: str, port: int) -> None:
        announce(host, port)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "announce", announce_and_stop)


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
        (["--selector", "luck"], "--selector must be divergence or "),
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
    assert "error: --recompute-ratio is -1.0; it must lie in 0..1" in result.stderr
    assert local_system == []


@pytest.mark.usefixtures("stop_when_listening")
def test_a_file_the_environment_and_flags_reach_the_settings(
    local_system: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text(f"model = '{model_folder}'\nport = 0\nsinks = 1\nspan = 1\nseed = 1\n")
    (tmp_path / "l.yaml").write_text("blend_min_tokens: 9\n")
    monkeypatch.setenv("KVBLEND_CONFIG", str(tmp_path / "a.toml"))
    monkeypatch.setenv("KVBLEND_SPAN", "2")
    files = ["--lmcache-config", str(tmp_path / "l.yaml")]
    result = CliRunner().invoke(app, ["serve", "--blend", "seed=3", *files])
    assert result.exit_code == 0, result.output
    settings = local_system[0][1]
    assert (settings.sinks, settings.span, settings.seed, settings.blend_min_tokens) == (1, 2, 3, 9)


@pytest.mark.usefixtures("stop_when_listening")
def test_the_log_is_as_it_was_asked_for(local_system: list[Any], model_folder: Path) -> None:
    flags = ["--log-level", "debug", "--log-format", "json"]
    CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", *flags])
    (handler,) = [one for one in logging.getLogger().handlers if isinstance(one, StderrHandler)]
    record = logging.LogRecord("kvblend.x", logging.INFO, "f", 1, "hello", None, None)
    assert json.loads(handler.format(record))["event"] == "hello"
    assert logging.getLogger("kvblend").level == logging.DEBUG


def test_an_unknown_setting_starts_nothing(local_system: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("prot = 1\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "a.toml")])
    assert (result.exit_code, local_system) == (2, [])
    assert result.stderr == f"error: {tmp_path / 'a.toml'}, line 1: prot is not a known setting; did you mean port?\n"
