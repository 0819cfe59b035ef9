"""The unrelated text that chunks are computed behind: its tokens, its length, its form."""

from __future__ import annotations

from pathlib import Path

from model_files import tokenizer_json

from kvblend.engine.conditioning import PASSAGES, WARM_TOKENS_MAX, warm_ids
from kvblend.engine.loaders.gguf import open_gguf
from kvblend.engine.prompt import chunk_ids
from kvblend.engine.tokenizer import Tokenizer

# with another text or another cut every chunk that users have stored warm is lost
SMOLLM2_TOKENS = 960
TOKENIZER = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)


def test_passages_are_tokenised_as_chunks_are() -> None:
    first = chunk_ids(TOKENIZER, *PASSAGES[0])
    assert warm_ids(TOKENIZER)[: len(first)] == first[:WARM_TOKENS_MAX]


def test_a_long_text_is_cut() -> None:
    assert len(warm_ids(TOKENIZER)) == WARM_TOKENS_MAX == 900


def test_the_embedded_model_reads_a_little_more_than_is_used(smollm2_path: Path) -> None:
    with open_gguf(smollm2_path) as source:
        whole = [token for passage in PASSAGES for token in chunk_ids(source.tokenizer, *passage)]
        assert len(whole) == SMOLLM2_TOKENS
        assert warm_ids(source.tokenizer) == tuple(whole[:WARM_TOKENS_MAX])


def test_every_passage_has_a_title_and_no_two_share_one() -> None:
    titles = [title for title, _ in PASSAGES]
    assert all(title.strip() for title in titles)
    assert len(set(titles)) == len(titles)


def test_no_passage_holds_an_empty_line_of_its_own() -> None:
    assert not any("\n" in text for _, text in PASSAGES)
