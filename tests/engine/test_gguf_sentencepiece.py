"""SentencePiece vocabularies from GGUF metadata: the pieces the SentencePiece library makes of the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.gguf_sentencepiece import list_merges
from kvblend.engine.loaders.gguf_tokenizer import build_tokenizer
from kvblend.engine.tokenizer import Tokenizer

BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = ["ab", "▁a", "bc", "abc", "▁ab", "aa", "aaa", "cab", "▁", "a", "b", "c"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "▁▁", "<b>", *WORDS]


def metadata(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [0.0] * (len(TOKENS) - len(WORDS)) + [-float(i) for i in range(len(WORDS))],
        "token_type": [2, 3, 3, *[6] * 256, 4, 4, *[1] * len(WORDS)],
        "add_space_prefix": False,
        "bos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def build(**changes: Any) -> Tokenizer:
    return build_tokenizer(Path("a.gguf"), metadata(**changes), (2,))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.text_of(i) for i in tokenizer.encode(text, special=False)]


# what the library said of this vocabulary
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "abc"),
        ("aaaa", "aa aa"),
        ("aaaaa", "aa aaa"),
        ("cabc ab", "c abc ▁ab"),
        ("abcabca", "abc abc a"),
        ("é", "<0xC3> <0xA9>"),
        ("a<b>b", "a <b> b"),
        ("aaa aaa", "aaa ▁a aa"),
        ("</s>a", "<0x3C> <0x2F> <0x73> <0x3E> a"),
    ],
)
def test_pieces_are_those_of_the_library(text: str, expected: str) -> None:
    assert pieces(build(), text) == expected.split(" ")


@pytest.mark.parametrize(("text", "rest"), [("a  b", ["b"]), ("a   b", ["▁", "b"]), ("a ▁b", ["b"])])
def test_runs_of_spaces_are_one_token(text: str, rest: list[str]) -> None:
    run = TOKENS.index("▁▁")
    assert build().encode(text, special=False) == [TOKENS.index("a"), run, *map(TOKENS.index, rest)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "▁ abc"),
        ("aaaa", "▁a aaa"),
        ("cabc ab", "▁ c abc ▁ab"),
        ("é", "▁ <0xC3> <0xA9>"),
        ("aaa aaa", "▁a aa ▁a aa"),
    ],
)
@pytest.mark.parametrize("said", [True, None])
def test_a_space_stands_before_a_text_where_the_file_wants_it(said: bool | None, text: str, expected: str) -> None:
    tokenizer = build(add_space_prefix=said)
    assert pieces(tokenizer, text) == expected.split(" ")
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@pytest.mark.parametrize("text", ["ab  c\n\té </s> <b>", "  a", "<s>ab"])
def test_texts_come_back(text: str) -> None:
    tokenizer = build()
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_a_control_token_is_one_id_for_templates_only() -> None:
    tokenizer = build()
    assert tokenizer.encode("</s>a", special=True) == [2, TOKENS.index("a")]
    assert 2 not in tokenizer.encode("</s>a", special=False)


def test_a_piece_that_ends_texts_is_formed_by_none() -> None:
    tokenizer = build_tokenizer(Path("a.gguf"), metadata(), (2, TOKENS.index("ab")))
    assert pieces(tokenizer, "ab") == ["a", "b"]


def test_a_begin_token_is_wanted_unless_the_file_says_no() -> None:
    assert (build().add_bos, build(add_bos_token=False).add_bos) == (True, False)


def test_merges_come_in_order_of_score() -> None:
    assert list_merges({"a": -9.0, "b": -9.0, "ab": -2.0, "abb": -1.0, "bb": -3.0}) == [
        ["a", "bb"],
        ["ab", "b"],
        ["a", "b"],
        ["b", "b"],
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": None}, "tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"scores": ["x"] * len(TOKENS)}, "tokenizer.ggml.scores"),
        ({"token_type": [1]}, "token_type"),
        ({"unknown_token_id": 9999}, "unknown token is 9999"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        build(**changes)


def test_dropped_spaces_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="remove_extra_whitespaces"):
        build(remove_extra_whitespaces=True)
