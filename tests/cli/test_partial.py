from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvblend.cli.failures import BadInput
from kvblend.cli.partial import PartialResults, settings_digest, write_whole
from kvblend.engine.evaluation.methods import BASELINE, FULL
from kvblend.engine.evaluation.questions import Question
from kvblend.engine.evaluation.results import QuestionResult

QUESTIONS = [Question((("t", "x"),), f"what {i}?", ("a",)) for i in range(3)]


def partial(tmp_path: Path, settings: str = "s") -> PartialResults:
    return PartialResults(tmp_path / "out.json", settings)


def begun(tmp_path: Path, *indexes: int) -> PartialResults:
    file = partial(tmp_path)
    file.load(QUESTIONS, restart=False)
    for index in indexes:
        file.append(QUESTIONS[index], QuestionResult(index, ()))
    return file


def loaded(tmp_path: Path, questions: list[Question] = QUESTIONS, **options: Any) -> list[int]:
    return list(partial(tmp_path).load(questions, **{"restart": False, **options}))


def test_kept_results_are_found_again(tmp_path: Path) -> None:
    begun(tmp_path, 0, 2)
    assert loaded(tmp_path) == [0, 2]


def test_the_file_stands_beside_the_output(tmp_path: Path) -> None:
    assert begun(tmp_path).path == tmp_path / "out.json.partial.jsonl"


def test_results_that_were_found_stay_in_the_file(tmp_path: Path) -> None:
    begun(tmp_path, 1)
    loaded(tmp_path)
    assert loaded(tmp_path) == [1]


def test_a_result_beyond_a_smaller_limit_is_kept_for_later(tmp_path: Path) -> None:
    begun(tmp_path, 0, 2)
    assert loaded(tmp_path, QUESTIONS[:2]) == [0]
    assert loaded(tmp_path) == [0, 2]


def test_a_result_of_another_question_does_not_count(tmp_path: Path) -> None:
    begun(tmp_path, 0, 1)
    assert loaded(tmp_path, [replace(QUESTIONS[0], question="other?"), *QUESTIONS[1:]]) == [1]


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    file = begun(tmp_path, 0, 1)
    file.path.write_text(file.path.read_text()[:-9])
    again = partial(tmp_path)
    assert list(again.load(QUESTIONS, restart=False)) == [0]
    again.append(QUESTIONS[2], QuestionResult(2, ()))
    assert loaded(tmp_path) == [0, 2]


def test_other_settings_are_refused_and_change_nothing(tmp_path: Path) -> None:
    before = begun(tmp_path, 0).path.read_text()
    with pytest.raises(BadInput, match=r"was begun with another model.*--restart"):
        partial(tmp_path, "other").load(QUESTIONS, restart=False)
    assert begun(tmp_path).path.read_text() == before


def test_a_restart_forgets_everything(tmp_path: Path) -> None:
    begun(tmp_path, 0)
    assert list(partial(tmp_path, "other").load(QUESTIONS, restart=True)) == []
    assert list(partial(tmp_path, "other").load(QUESTIONS, restart=False)) == []


def test_a_finished_file_goes(tmp_path: Path) -> None:
    begun(tmp_path, 0).remove()
    assert list(tmp_path.iterdir()) == []


def test_settings_tell_runs_and_names_apart() -> None:
    digests = {
        settings_digest([FULL], dtype="a"),
        settings_digest([FULL], dtype="b"),
        settings_digest([BASELINE], dtype="a"),
    }
    assert len(digests) == 3
    assert settings_digest([FULL], dtype="a", device="c") == settings_digest([FULL], device="c", dtype="a")


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "two")]
