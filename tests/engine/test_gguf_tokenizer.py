"""Tokenizers from GGUF metadata against transformers', and the pre-tokenisers' own rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvblend.engine.config import BadModelFile, UnsupportedModel
from kvblend.engine.loaders.gguf_file import GGUFFile
from kvblend.engine.loaders.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from kvblend.engine.tokenizer import Tokenizer

VARIED = [
    "The quick brown fox can't jump; it'll rest.",
    "  indented\n\n\tcode = {'a': [1, 2, 3]}  # comment  \n",
    "Ünïcödé: naïve café, 东京都 and Привет, мир! 🙂👩‍👩‍👧",
    "In 1847 there were 12,345.67 of them (3/4).",
    "MiXeD CaSe HTTPServer snake_case kebab-case \r\n line",
    "a" * 50 + " " * 9 + "b",
    "x\u00a0y\u2003z\ufeff",
]
SPECIALS = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with GGUFFile(smollm2_path) as file:
        return build_tokenizer(smollm2_path, file.metadata, (2,))


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.parametrize("text", [*VARIED, SPECIALS], ids=range(len(VARIED) + 1))
def test_smollm2_ids_equal_those_of_transformers(smollm2: Tokenizer, theirs: Any, text: str) -> None:
    assert smollm2.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)


def test_smollm2_decodes_what_it_encodes(smollm2: Tokenizer) -> None:
    for text in VARIED:
        assert smollm2.decode(smollm2.encode(text, special=False)) == text


def test_smollm2_cuts_numbers_into_digits(smollm2: Tokenizer) -> None:
    assert [smollm2.text_of(i) for i in smollm2.encode("2024", special=False)] == ["2", "0", "2", "4"]


def test_smollm2_parts_spaces_from_the_digit_behind_them(smollm2: Tokenizer) -> None:
    # a digit stands alone before words are cut, so the spaces before it stay together
    both = smollm2.encode("   7", special=False)
    assert both == smollm2.encode("   ", special=False) + smollm2.encode("7", special=False)


def metadata(pre: str, **changes: Any) -> dict[str, Any]:
    letters = [*"abcdefghijklmnopqrstuvwxyz", *"0123456789", "Ġ", "Ċ", "!", "'"]
    words = ["ab", "Ġa", "12", "123", "ĠĠ"]
    tokens = [*letters, *words, "<e>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2", "12 3", "Ġ Ġ"],
    }
    return {**fields, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def pieces(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(Path("a.gguf"), metadata(pre), ())
    return [tokenizer.text_of(i) for i in tokenizer.encode(text, special=False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "12"]),
        ("smollm", ["1", "2", "3", "1", "2"]),
        ("starcoder", ["1", "2", "3", "1", "2"]),
        ("llama-bpe", ["123", "12"]),
        ("qwen2", ["1", "2", "3", "1", "2"]),
    ],
)
def test_how_many_digits_stand_together(pre: str, expected: list[str]) -> None:
    assert pieces(pre, "12312") == expected


def test_llama3_takes_whole_words_of_the_vocabulary_first() -> None:
    tokenizer = build_tokenizer(Path("a.gguf"), metadata("llama-bpe", merges=[]), ())
    assert [tokenizer.text_of(i) for i in tokenizer.encode("ab", special=False)] == ["ab"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokeniser_loses_nothing(pre: str) -> None:
    assert "".join(pieces(pre, "ab a  12!\n\na'll")) == "abĠaĠĠ12!ĊĊa'll"


def test_control_tokens_are_special() -> None:
    tokenizer = build_tokenizer(Path("a.gguf"), metadata("gpt-2"), ())
    assert tokenizer.encode("<e>", special=True) == [tokenizer.id_of("<e>")]


@pytest.mark.parametrize(
    ("flag", "pre", "wanted"), [(True, "gpt-2", True), (None, "gpt-2", False), (None, "llama3", True)]
)
def test_when_a_begin_token_is_wanted(flag: bool | None, pre: str, wanted: bool) -> None:
    changes = {"bos_token_id": 0} | ({} if flag is None else {"add_bos_token": flag})
    assert build_tokenizer(Path("a.gguf"), metadata(pre, **changes), ()).add_bos is wanted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["abc"]}, "holds 'abc'"),
        ({"merges": ["q z"]}, "cannot be read"),
        ({"bos_token_id": 4000}, "bos token is 4000"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        build_tokenizer(Path("a.gguf"), metadata("gpt-2", **changes), ())


def test_an_unknown_pre_tokeniser_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'whatever'"):
        build_tokenizer(Path("a.gguf"), metadata("whatever"), ())
