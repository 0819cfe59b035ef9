from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from typer.testing import CliRunner, Result

from kvblend.cli.app import app
from kvblend.cli.evaluate import PROBES_LIMIT, read_questions
from kvblend.engine import assembly
from kvblend.engine.evaluation.examiner import Examiner
from kvblend.engine.evaluation.questions import Question

ROW = {
    "method", "ratio", "recommended", "charged_ratio", "kl_mean", "kl_p99", "kl_cont_mean", "kl_recovery", "nll_delta",
    "top1", "f1", "ttft_ms_median", "ci",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose context has room for the unrelated text."""
    return save_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    texts = ("the river and the mill", "the wheel turned all night", "the water rose")
    contexts = [{"title": f"T{i}", "text": text} for i, text in enumerate(texts)]
    questions = [{"ctxs": contexts[i:] + contexts[:i], "question": f"what {i}?", "answers": ["mill"]} for i in range(3)]
    file = tmp_path / "data.json"
    file.write_text(json.dumps(questions))
    return file


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(assembly, "load_model", fail)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_a_run_keeps_its_contract(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    out, raw = tmp_path / "out.json", tmp_path / "raw.jsonl"
    files = ("--json", out, "--plot", tmp_path / "out.png", "--raw", raw)
    result = invoke("--model", tiny_folder, "--data", data, "--limit", 2, *files)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert (report["model"], report["data"], report["n"]) == (tiny_folder.name, str(data), 2)
    assert all(row.keys() >= ROW for row in report["rows"])
    found = [(row["method"], row["ratio"]) for row in report["rows"]]
    blends = [("divergence", r) for r in (0.05, 0.08, 0.15)] + [("recommended", r) for r in (0.0, 0.05, 0.08, 0.15)]
    assert found == [("full", 1.0), ("reuse", 0.0), *blends]
    assert [row["method"] for row in report["rows"] if row["recommended"]] == ["recommended"] * 4
    assert (tmp_path / "out.png").is_file()
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert [(line["question"], line["method"]) for line in lines] == [(i, name) for i in range(2) for name, _ in found]
    assert all(line["kl"] and line["kl_cont"] and "estimates" in line for line in lines)
    assert not list(tmp_path.glob("*.partial.jsonl"))
    assert "recovery" in result.stdout


def test_methods_and_ratios_can_be_chosen(tiny_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "one.json"
    data.write_text(json.dumps([{"ctxs": [{"title": "", "text": "the mill"}] * 2, "question": "q", "answers": ["a"]}]))
    chosen = ("--methods", "full,bare:query,sinks=2,residual=mean", "--ratios", "0.1,0.5")
    result = invoke("--model", tiny_folder, "--data", data, "--json", tmp_path / "o", *chosen)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "o").read_text())["rows"]
    name = "bare:query,sinks=2,residual=mean"
    assert [(row["method"], row["ratio"]) for row in rows] == [("full", 1.0), (name, 0.1), (name, 0.5)]


def untimed(file: Path) -> list[dict[str, Any]]:
    rows = json.loads(file.read_text())["rows"]
    return [{name: value for name, value in row.items() if name != "ttft_ms_median"} for row in rows]


def test_a_broken_run_goes_on_where_it_was(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", tiny_folder, "--data", data, "--methods", "reuse,query", "--ratios", "0.2", "--json")
    assert invoke(*arguments, tmp_path / "whole.json").exit_code == 0
    examine, seen = Examiner.examine, []

    def interrupted(self: Examiner, prepared: Any, index: int, runs: Any) -> Any:
        seen.append(index)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return examine(self, prepared, index, runs)

    monkeypatch.setattr(Examiner, "examine", interrupted)
    broken = invoke(*arguments, tmp_path / "out.json")
    assert broken.exit_code == 130
    assert "1 of 3 questions are done" in broken.stderr
    assert not (tmp_path / "out.json").exists()
    assert invoke(*arguments, tmp_path / "out.json").exit_code == 0
    assert seen == [0, 1, 1, 2]
    assert untimed(tmp_path / "out.json") == untimed(tmp_path / "whole.json")


def test_a_run_with_other_methods_does_not_take_over_a_broken_one(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Examiner, "examine", interrupted)
    arguments = ("--model", tiny_folder, "--data", data, "--json", tmp_path / "out.json")
    invoke(*arguments, "--methods", "reuse")
    result = invoke(*arguments, "--methods", "full")
    assert result.exit_code == 2
    assert "was begun with another model, dtype, device, methods or ratios" in result.stderr


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


def test_a_prompt_that_does_not_fit_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path) -> None:
    result = invoke("--model", tiny_folder, "--data", "probes", "--limit", 1, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "it does not fit the model's context of 2048" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rouge_score" else find(name))
    result = invoke("--data", "probes", "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "pip install 'kvblend[server,eval]'" in result.stderr


def test_probes_are_200_unless_limited() -> None:
    assert PROBES_LIMIT == 200
    found, others = read_questions("probes", None, 3)
    assert others
    assert not set(others) & set(found)
    assert len(found) == 200
    assert all(isinstance(question, Question) for question in found)
    assert read_questions("probes", 2, 3)[0] == found[:2]
    assert read_questions("probes", 2, 4)[0] != found[:2]
