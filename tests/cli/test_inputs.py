from __future__ import annotations

from pathlib import Path

import pytest

from kvblend.cli.failures import BadInput
from kvblend.cli.inputs import read_blend, read_condition_on, read_ratio, read_texts


def test_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(f"text {name} é", encoding="utf-8")
    assert read_texts([tmp_path / "b", tmp_path / "a"]) == ["text b é", "text a é"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ab\xff", r"not valid UTF-8: byte 2 is 0xff"), (b" \n", "is empty"), (None, "cannot read")],
)
def test_what_cannot_be_used_names_the_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "notes.md"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        read_texts([file])
    assert "notes.md" in caught.value.message


@pytest.mark.parametrize(("value", "count"), [(None, 0), ("neighbours:1", 1), ("neighbours:8", 8)])
def test_condition_on_gives_the_number_of_neighbours(value: str | None, count: int) -> None:
    assert read_condition_on(value) == count


@pytest.mark.parametrize(
    "value", ["", "neighbours", "neighbours:", "neighbours:0", "neighbours:9", "warm:1", "neighbours:²"]
)
def test_another_condition_on_is_refused_with_what_may_be_given(value: str) -> None:
    with pytest.raises(BadInput, match=r"give neighbours:K with K in 1\.\.8") as caught:
        read_condition_on(value)
    assert repr(value) in caught.value.message


def test_blend_options_are_numbers_words_and_lists() -> None:
    given = ["check_layers=1", "recompute_ratios=0.2, 0.1", "score_layers=middle", "sinks=4", "probes=0.5"]
    assert read_blend([*given, "selector=union"]) == {
        "check_layers": (1,),
        "recompute_ratios": (0.2, 0.1),
        "score_layers": "middle",
        "sinks": 4,
        "probes": 0.5,
        "selector": "union",
    }


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["luck=1"], "--blend luck=1: give NAME=VALUE; names: selector, check_layers"),
        (["sinks"], "--blend sinks: give NAME=VALUE"),
        (["sinks=1", "sinks=2"], "--blend sinks is given twice"),
    ],
)
def test_other_blend_options_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_blend(items)


@pytest.mark.parametrize(("text", "ratio"), [(None, None), ("0.2", 0.2), ("1", 1), ("auto", "auto"), ("most", "most")])
def test_a_ratio_is_a_number_or_a_word_that_others_judge(text: str | None, ratio: float | str | None) -> None:
    assert read_ratio(text) == ratio
