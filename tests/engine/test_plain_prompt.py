"""Plain prompts: where they are cut, what is added to them, what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import tokenizer_json

from kvblend.engine.layout import PromptLayout, SegmentKind
from kvblend.engine.plain_prompt import build_plain_prompt, split_ids, split_text
from kvblend.engine.prompt import PromptDocument, PromptError, chunk_ids
from kvblend.engine.tokenizer import Tokenizer

KIND = SegmentKind
SEPARATOR = " # # "
PLAIN = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
WITH_BOS = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=True)


def lay_out(prompt: str | list[int], tokenizer: Tokenizer = PLAIN, separator: str = SEPARATOR) -> PromptLayout:
    return build_plain_prompt(tokenizer, prompt, separator)


def kinds(layout: PromptLayout) -> list[SegmentKind]:
    return [segment.kind for segment in layout.segments]


def test_a_prompt_without_separators_is_all_question() -> None:
    layout = lay_out("who held the key?")
    assert kinds(layout) == [KIND.QUESTION]
    assert list(layout.token_ids) == PLAIN.encode("who held the key?", special=True)


def test_head_chunks_and_question_are_cut_at_the_separators() -> None:
    layout = lay_out("be brief # # the mill # # the river # # who?")
    assert kinds(layout) == [KIND.SYSTEM, KIND.CHUNK, KIND.CHUNK, KIND.QUESTION]
    assert [s.token_ids for _, s in layout.chunks()] == [
        chunk_ids(PLAIN, "", text) for text in ("the mill", "the river")
    ]


def test_blank_pieces_are_left_out() -> None:
    assert kinds(lay_out(" # # be brief # #   # # the mill # # who? # # ")) == [KIND.SYSTEM, KIND.CHUNK, KIND.QUESTION]


def test_an_empty_separator_cuts_nothing() -> None:
    assert kinds(lay_out("a # # b", separator="")) == [KIND.QUESTION]


def test_ids_are_cut_at_the_separators_ids_and_stay_as_they_are() -> None:
    cut = PLAIN.encode(SEPARATOR, special=False)
    pieces = [PLAIN.encode(text, special=False) for text in ("be brief", "the mill\n\n", "who?")]
    layout = lay_out([*pieces[0], *cut, *pieces[1], *cut, *pieces[2]])
    assert kinds(layout) == [KIND.SYSTEM, KIND.CHUNK, KIND.QUESTION]
    assert [list(segment.token_ids) for segment in layout.segments] == pieces


def test_a_chunk_sent_as_ids_is_the_one_sent_as_text() -> None:
    cut = PLAIN.encode(SEPARATOR, special=False)
    head, question = (PLAIN.encode(text, special=True) for text in ("be brief", "who?"))
    as_ids = lay_out([*head, *cut, *chunk_ids(PLAIN, "", "the mill"), *cut, *question])
    assert as_ids == lay_out("be brief # # the mill # # who?")


def test_no_token_is_put_before_ids() -> None:
    ids = WITH_BOS.encode("the mill", special=False)
    assert list(lay_out(ids, WITH_BOS).token_ids) == ids


@pytest.mark.parametrize("prompt", ["the mill", "be brief # # the mill # # who?"])
def test_a_text_begins_as_the_model_wants_it(prompt: str) -> None:
    assert lay_out(prompt, WITH_BOS).token_ids.count(1) == 1
    assert lay_out(prompt, WITH_BOS).token_ids[0] == 1


def test_a_text_that_brings_its_own_beginning_gets_no_second_one() -> None:
    begin = WITH_BOS.text_of(1)
    assert lay_out(f"{begin}the mill", WITH_BOS).token_ids.count(1) == 1


def test_control_tokens_are_known_in_head_and_question_but_not_in_chunks() -> None:
    mark = PLAIN.text_of(1)
    layout = lay_out(f"{mark}be brief # # the {mark} mill # # {mark}who?")
    assert [1 in segment.token_ids for segment in layout.segments] == [True, False, True]


def test_documents_stand_behind_the_head() -> None:
    layout = build_plain_prompt(PLAIN, "be brief # # the mill # # who?", SEPARATOR, [PromptDocument(text="the river")])
    assert [s.token_ids for _, s in layout.chunks()] == [
        chunk_ids(PLAIN, "", text) for text in ("the river", "the mill")
    ]


@pytest.mark.parametrize("prompt", ["", " # # ", [], [-1], [10**6], "\ud800"])
def test_what_cannot_be_a_prompt_is_named(prompt: str | list[int]) -> None:
    with pytest.raises(PromptError) as caught:
        lay_out(prompt)
    assert caught.value.param == "prompt"


def test_nothing_but_separator_ids_is_no_prompt() -> None:
    with pytest.raises(PromptError, match="nothing but separators"):
        lay_out(PLAIN.encode(SEPARATOR, special=False))


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=3))
def test_cutting_ids_is_cutting_text(ids: list[int], separator: list[int]) -> None:
    as_text = "".join(map(str, ids))
    cut = "".join(map(str, separator))
    expected = [piece for piece in (as_text.split(cut) if cut else [as_text]) if piece]
    assert ["".join(map(str, piece)) for piece in split_ids(ids, separator)] == expected


@given(st.text("ab# "))
def test_only_blanks_and_separators_are_lost(text: str) -> None:
    assert "".join(split_text(text, SEPARATOR)).replace(" ", "") == text.replace(SEPARATOR, "").replace(" ", "")
