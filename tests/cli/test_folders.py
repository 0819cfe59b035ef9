from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.cli.folders import cache_folder, default_store_folder, models_folder


def test_the_xdg_variable_is_honoured(cache: Path) -> None:
    assert (cache_folder(), models_folder(), default_store_folder()) == (cache, cache / "models", cache / "store")


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_an_empty_or_relative_value_is_ignored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == Path.home() / ".cache" / "kvblend"
