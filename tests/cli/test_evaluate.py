from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import save_llama
from typer.testing import CliRunner, Result

from kvblend.cli.app import app
from kvblend.cli.evaluate import PROBES_LIMIT, read_questions
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


def test_a_prompt_that_does_not_fit_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path) -> None:
    result = invoke("--model", tiny_folder, "--data", "probes", "--limit", 1, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "it does not fit the model's context of 2048" in result.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_takes_kept_chunks(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    forms, chosen = tmp_path / "forms", ("--methods", "recommended", "--ratios", "0.1", "--limit", 1)
    run = ("--model", tiny_folder, "--data", data, *chosen, "--keep", forms)
    first = invoke(*run, "--json", tmp_path / "a")
    assert first.exit_code == 0, first.output
    written = {path.name: path.stat().st_mtime_ns for path in forms.iterdir()}
    assert invoke(*run, "--json", tmp_path / "b").exit_code == 0
    assert {path.name: path.stat().st_mtime_ns for path in forms.iterdir()} == written
    a, b = (json.loads((tmp_path / name).read_text())["rows"][0] for name in "ab")
    assert a["kl_mean"] == b["kl_mean"]


@pytest.mark.usefixtures("nothing_loads")
def test_a_file_is_no_folder_for_kept_chunks(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    result = invoke("--model", tiny_folder, "--data", data, "--json", tmp_path / "o", "--keep", data)
    assert result.exit_code != 0
    assert "--keep is" in result.output


def test_probes_are_200_unless_limited() -> None:
    assert PROBES_LIMIT == 200
    found, others = read_questions("probes", None, 3)
    assert others
    assert not set(others) & set(found)
    assert len(found) == 200
    assert all(isinstance(question, Question) for question in found)
    assert read_questions("probes", 2, 3)[0] == found[:2]
    assert read_questions("probes", 2, 4)[0] != found[:2]


def test_a_narrow_store_has_a_column_of_its_own(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    chosen = ("--methods", "full,reuse", "--limit", 1, "--store-dtype", "int8")
    result = invoke("--model", tiny_folder, "--data", data, "--json", out, *chosen)
    assert result.exit_code == 0, result.output
    assert "KL stored" in result.stdout
    report = json.loads(out.read_text())
    assert report["config"]["store_dtype"] == "int8"
    full, reuse = report["rows"]
    assert full["kl_store_mean"] is None
    assert 0.0 < reuse["kl_store_mean"] < 1.0


@pytest.mark.usefixtures("nothing_loads")
def test_a_store_dtype_wider_than_the_compute_dtype_is_refused(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_folder, "--data", data, "--json", tmp_path / "o.json")
    result = invoke(*arguments, "--store-dtype", "float32", "--dtype", "bfloat16")
    assert result.exit_code != 0
    assert "no narrower than bfloat16" in result.output
