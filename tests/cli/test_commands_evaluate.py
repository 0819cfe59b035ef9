from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvblend.cli.app import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "best"), "'best' is not known; choose full, reuse"),
        (("--methods", "query,sinks=many"), "sinks is 'many'"),
        (("--ratios", "0.1,1.5"), "ratio is 1.5; it must lie in 0..1"),
        (("--ratios", "0.1,few"), "ratios: 'few' is not a number"),
        (("--limit", "0"), "limit is 0; at least 1 question"),
        (("--data", "nowhere.json"), "cannot read nowhere.json: No such file"),
        (("--json", "nowhere/out.json"), "--json is nowhere/out.json; the folder nowhere does not exist"),
        (("--plot", "out.gif"), "--plot is out.gif; it must end in .png"),
        (("--model", "unknown"), "model 'unknown' is neither a known name"),
    ],
)
def test_bad_input_is_one_line_before_anything_loads(
    arguments: tuple[str, str], message: str, data: Path, model_folder: Path, tmp_path: Path, nothing_loads: None
) -> None:
    given = {"--model": model_folder, "--data": data, "--json": tmp_path / "out.json", arguments[0]: arguments[1]}
    result = invoke(*(part for pair in given.items() for part in pair))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"ctxs": [{"title": "t", "text": "x"}], "question": "q"}]', "data[0].answers is missing"),
        ('[{"ctxs": [{"title": "t", "text": "x"}], "question": "q", "answers": []}]', "data[0].answers is []"),
        ("[1, 2", "is not JSON"),
        (b"\xff", "is not valid UTF-8: byte 0 is 0xff"),
    ],
)
def test_bad_data_is_named_before_anything_loads(
    content: str | bytes, message: str, model_folder: Path, tmp_path: Path, nothing_loads: None
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = invoke("--model", model_folder, "--data", file, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rouge_score" else find(name))
    result = invoke("--data", "probes", "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "pip install 'kvblend[server,eval]'" in result.stderr
