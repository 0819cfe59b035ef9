from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvblend.api.server.keys import KeyRing, Tenant, issue
from kvblend.api.server.rates import RateLimits
from kvblend.cli import serve as module
from kvblend.cli.app import app
from kvblend.cli.key_file import add_key, rotate_key


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


@pytest.mark.parametrize("text", [None, "", "alice = 'hunter2'"])
def test_a_server_without_sound_keys_is_not_started(
    local_system: list[Any], model_folder: Path, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", "--keys-file", str(file)])
    assert (result.exit_code, local_system) == (2, [])
    assert str(file) in result.stderr
    assert "hunter2" not in result.output


@pytest.mark.usefixtures("local_system")
def test_keys_and_rates_reach_the_server(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, _ = add_key(tmp_path / "keys.toml", "alice")
    got: dict[str, Any] = {}

    async def serve(*_: object, **options: Any) -> int:
        got.update(options)
        return 0

    monkeypatch.setattr("kvblend.api.server.serve.serve", serve)
    flags = [
        "--keys-file",
        str(tmp_path / "keys.toml"),
        "--requests-per-minute-max",
        "9",
        "--requests-running-max",
        "2",
    ]
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), *flags])
    assert result.exit_code == 0, result.output
    assert tenant in got["keys"]
    assert got["rates"] == RateLimits(9, 2)


async def test_sighup_reads_the_keys_anew(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old, _ = await asyncio.to_thread(add_key, file, "alice")
    replaced = asyncio.Event()

    class Ring(KeyRing):
        def replace(self, tenants: Iterable[Tenant]) -> None:
            super().replace(tenants)
            replaced.set()

    ring = Ring([old])
    async with module.reloading(ring, file):
        for _ in range(2):
            new, _ = await asyncio.to_thread(rotate_key, file, "alice")
            replaced.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(20):
                await replaced.wait()
            assert (new in ring, old in ring) == (True, False)


async def test_keys_that_cannot_be_read_anew_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenant, _ = issue("alice")
    ring = KeyRing([tenant])
    await asyncio.to_thread((tmp_path / "keys.toml").write_text, "alice = 'hunter2'")
    await module.reload_ring(ring, tmp_path / "keys.toml")
    assert tenant in ring
    assert "stay as they were" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.usefixtures("stop_when_listening", "local_system")
@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_an_open_server_without_keys_is_warned_about(model_folder: Path, host: str, warned: bool) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", "--host", host])
    assert ("no API keys are set" in result.stderr) is warned
