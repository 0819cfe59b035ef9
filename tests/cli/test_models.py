from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.cli.failures import BadInput
from kvblend.cli.models import KNOWN_MODELS, find_known, resolve_model


def test_a_known_model_lies_in_the_cache_folder(cache: Path) -> None:
    assert find_known("smollm2").path == cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(BadInput, match="known: smollm2, gemma3-270m"):
        find_known("smollm3")


def test_a_directory_with_a_config_is_a_model(model_folder: Path) -> None:
    assert resolve_model(str(model_folder)) == ("tiny", model_folder)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "my-model.gguf"
    file.touch()
    assert resolve_model(str(file)) == ("my-model", file)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(BadInput, match=r"does not end in \.gguf"):
        resolve_model(str(file))


def test_something_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither a known name"):
        resolve_model(str(tmp_path / "nothing"))


def test_a_missing_known_model_is_pulled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[object] = []
    monkeypatch.setattr("kvblend.cli.pull.pull", lambda model, console: pulled.append(model))
    assert resolve_model("smollm2")[0] == "smollm2"
    assert pulled == [KNOWN_MODELS["smollm2"]]


def test_a_model_with_terms_is_never_pulled_by_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvblend.cli.pull.pull", None)
    with pytest.raises(BadInput, match="its terms apply, so pull it first: kvblend pull gemma3-270m"):
        resolve_model("gemma3-270m")


def test_a_model_with_terms_is_served_once_it_is_there(cache: Path) -> None:
    known = find_known("gemma3-270m")
    known.path.parent.mkdir(parents=True)
    with known.path.open("wb") as file:
        file.truncate(known.size_bytes)
    assert resolve_model("gemma3-270m") == ("gemma3-270m", known.path)


def test_terms_name_where_they_are_found() -> None:
    assert "ai.google.dev/gemma/terms" in str(KNOWN_MODELS["gemma3-270m"].terms)
    assert KNOWN_MODELS["smollm2"].terms is None
