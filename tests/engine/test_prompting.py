from __future__ import annotations

import pytest

from kvblend.engine.chat import ChatTemplate
from kvblend.engine.evaluation.prompting import SYSTEM, instruction_ids, prepare_question
from kvblend.engine.evaluation.questions import BadData, Question
from kvblend.engine.layout import SegmentKind
from kvblend.engine.prompt import chunk_ids, cut_chunk_ids
from kvblend.engine.tokenizer import Tokenizer

QUESTION = Question(
    (("Mill", "The mill stood by the river."), ("", "The wheel turned.")), "What stood?", ("the mill", "x")
)


def test_the_prompt_is_instruction_documents_and_question(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    layout = prepare_question(tiny_tokenizer, chatml, QUESTION, 0, 4096).layout
    kinds = [segment.kind for segment in layout.segments]
    assert kinds == [SegmentKind.SYSTEM, SegmentKind.CHUNK, SegmentKind.CHUNK, SegmentKind.QUESTION]
    texts = [tiny_tokenizer.decode(segment.token_ids) for segment in layout.segments]
    assert SYSTEM in texts[0]
    assert texts[1:3] == ["Mill\nThe mill stood by the river.\n\n", "The wheel turned.\n\n"]
    assert texts[3].startswith("Question: What stood?")
    assert layout.segments[0].token_ids == instruction_ids(tiny_tokenizer, chatml)


def test_the_first_answer_is_the_gold_one(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    assert tiny_tokenizer.decode(prepare_question(tiny_tokenizer, chatml, QUESTION, 0, 4096).gold) == "the mill"


def test_a_long_answer_is_cut_to_32_tokens(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    long = Question(QUESTION.documents, "q", ("zq " * 50,))
    assert len(prepare_question(tiny_tokenizer, chatml, long, 0, 4096).gold) == 32


def test_a_short_document_has_the_ids_it_is_stored_under(tiny_tokenizer: Tokenizer) -> None:
    assert cut_chunk_ids(tiny_tokenizer, "Mill", "by the river", 512) == chunk_ids(
        tiny_tokenizer, "Mill", "by the river"
    )


def test_a_long_document_loses_its_end_but_not_the_empty_line(tiny_tokenizer: Tokenizer) -> None:
    whole = tiny_tokenizer.encode("Mill\n" + "zq " * 50, special=False)
    end = tiny_tokenizer.encode("\n\n", special=False)
    ids = cut_chunk_ids(tiny_tokenizer, "Mill", "zq " * 50, 20)
    assert ids == (*whole[: 20 - len(end)], *end)
    assert len(ids) == 20


def test_a_document_is_cut_at_512_tokens(tiny_tokenizer: Tokenizer) -> None:
    assert len(cut_chunk_ids(tiny_tokenizer, "", "zq " * 500, 512)) == 512


def test_a_prompt_beyond_the_context_is_refused_by_number(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    tokens = prepare_question(tiny_tokenizer, chatml, QUESTION, 0, 4096).layout.num_tokens
    prepare_question(tiny_tokenizer, chatml, QUESTION, 3, tokens + 32)
    with pytest.raises(BadData, match=rf"data\[3\] has a prompt of {tokens} tokens.*context of {tokens + 31}"):
        prepare_question(tiny_tokenizer, chatml, QUESTION, 3, tokens + 31)


def test_a_blank_document_is_named(tiny_tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    with pytest.raises(BadData, match=r"data\[2\]: document.text is blank"):
        prepare_question(tiny_tokenizer, chatml, Question((("T", " "),), "q", ("a",)), 2, 4096)
