"""The unrelated text that chunks are computed behind: its tokens, its length, its form."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_files import tokenizer_json

from kvblend.engine.conditioning import PASSAGE_TOKENS_MAX, PASSAGES, WARM_TOKENS_MAX, passages_of, warm_ids
from kvblend.engine.loaders.gguf import open_gguf
from kvblend.engine.prompt import chunk_ids, cut_chunk_ids
from kvblend.engine.tokenizer import Tokenizer

# with another text or another cut every chunk that users have stored warm is lost
SMOLLM2_TOKENS = 1735
TOKENIZER = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
SIZES = [len(cut_chunk_ids(TOKENIZER, *passage, PASSAGE_TOKENS_MAX)) for passage in PASSAGES]


def joined(count: int) -> tuple[int, ...]:
    """The ids of the first passages, each tokenised as a chunk is."""
    return tuple(
        token for passage in PASSAGES[:count] for token in cut_chunk_ids(TOKENIZER, *passage, PASSAGE_TOKENS_MAX)
    )


@pytest.mark.parametrize(("quarter", "passages"), [(SIZES[0] - 1, 0), (SIZES[0], 1), (sum(SIZES[:3]) + 1, 3)])
def test_whole_passages_fill_a_quarter_of_the_context(quarter: int, passages: int) -> None:
    assert warm_ids(TOKENIZER, 4 * quarter) == joined(passages)


def test_no_context_is_large_enough_for_more_than_2048_tokens() -> None:
    assert sum(SIZES) > WARM_TOKENS_MAX == 2048
    assert WARM_TOKENS_MAX - max(SIZES) < len(warm_ids(TOKENIZER, 1 << 30)) <= WARM_TOKENS_MAX


def test_the_embedded_model_reads_all_of_it(smollm2_path: Path) -> None:
    with open_gguf(smollm2_path) as source:
        whole = tuple(token for passage in PASSAGES for token in chunk_ids(source.tokenizer, *passage))
        assert len(whole) == SMOLLM2_TOKENS
        assert warm_ids(source.tokenizer, source.config.context_length) == whole


def test_every_passage_has_a_title_and_no_two_share_one() -> None:
    titles = [title for title, _ in PASSAGES]
    assert all(title.strip() for title in titles)
    assert len(set(titles)) == len(titles)


def test_no_passage_holds_an_empty_line_of_its_own() -> None:
    assert not any("\n" in text for _, text in PASSAGES)


def test_passages_of_a_corpus_take_the_place_of_the_shipped_ones() -> None:
    corpus = (("Mill", "by the river"), ("", "the wheel"))
    wanted = tuple(token for passage in corpus for token in chunk_ids(TOKENIZER, *passage))
    assert warm_ids(TOKENIZER, 1 << 20, corpus) == wanted


def test_a_long_passage_loses_its_end_but_not_the_empty_line_behind_it() -> None:
    ids = warm_ids(TOKENIZER, 1 << 20, (("", "zq " * 2000),))
    end = tuple(TOKENIZER.encode("\n\n", special=False))
    assert len(ids) == PASSAGE_TOKENS_MAX == 512
    assert ids[-len(end) :] == end


def test_a_text_gives_its_paragraphs_as_passages() -> None:
    assert passages_of(" one\nmill.\n\n \n two.\n") == [("", "one\nmill."), ("", "two.")]


@pytest.mark.parametrize("text", ["", " \n\n "])
def test_no_text_gives_the_shipped_passages(text: str) -> None:
    assert passages_of(text) is PASSAGES
