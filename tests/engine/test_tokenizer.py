"""Encoding without injection, exact incremental decoding, clear errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from model_files import SPECIAL, tokenizer_json

from kvblend.engine.config import BadModelFile
from kvblend.engine.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=False)
SIZE = BYTE_LEVEL.vocab_size
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def byte_fallback() -> Tokenizer:
    """Words with a space mark and single bytes for all else, as converted SentencePiece vocabularies have them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab"]
    return Tokenizer(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [added(i, tokens[i]) for i in range(3)],
                "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {
                    "type": "BPE",
                    "unk_token": "<unk>",
                    "fuse_unk": True,
                    "byte_fallback": True,
                    "vocab": {token: i for i, token in enumerate(tokens)},
                    "merges": [["▁", "a"], ["a", "b"]],
                },
            }
        ),
        bos_id=1,
        eos_ids=(2,),
        add_bos=True,
    )


def added(token_id: int, content: str, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def with_added(*tokens: dict[str, Any], eos_ids: tuple[int, ...] = (2,)) -> Tokenizer:
    data = json.loads(tokenizer_json())
    data["added_tokens"] += tokens
    return Tokenizer(json.dumps(data), bos_id=1, eos_ids=eos_ids, add_bos=False)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(i) for i in ids) + stream.flush()


@pytest.mark.parametrize("token", SPECIAL)
def test_a_control_token_in_a_text_is_plain(token: str) -> None:
    ids = BYTE_LEVEL.encode(f"a{token}b", special=False)
    assert not {0, 1, 2} & set(ids)
    assert BYTE_LEVEL.decode(ids) == f"a{token}b"


@pytest.mark.parametrize("token", SPECIAL)
def test_a_control_token_of_a_template_is_one_id(token: str) -> None:
    assert BYTE_LEVEL.encode(token, special=True) == [SPECIAL.index(token)]


def test_a_bracketed_token_is_control_though_not_marked_special() -> None:
    tokenizer = with_added(added(SIZE, "[TOOL]", special=False))
    assert SIZE not in tokenizer.encode("[TOOL]", special=False)
    assert tokenizer.encode("[TOOL]", special=True) == [SIZE]


def test_an_end_token_is_control_though_not_marked_special() -> None:
    tokenizer = with_added(added(SIZE, "STOP", special=False), eos_ids=(SIZE,))
    assert SIZE not in tokenizer.encode("STOP", special=False)


def test_a_begin_token_is_control_though_not_marked_special() -> None:
    data = json.loads(tokenizer_json())
    data["added_tokens"].append(added(SIZE, "<s>", special=False))
    tokenizer = Tokenizer(json.dumps(data), bos_id=SIZE, eos_ids=(2,), add_bos=True)
    assert SIZE not in tokenizer.encode("<s>", special=False)


@pytest.mark.parametrize("tag", ["<td>", "</h2>", "<s>"])
def test_a_tag_of_html_is_vocabulary_and_shown(tag: str) -> None:
    tokenizer = with_added(added(SIZE, tag, special=False))
    assert tokenizer.encode(f"{tag}a", special=False)[0] == SIZE
    assert tokenizer.decode([SIZE]) == tag


def test_padding_and_truncation_of_the_file_are_forgotten() -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    library.enable_padding(length=50)
    library.enable_truncation(max_length=2)
    tokenizer = Tokenizer(library.to_str(), bos_id=1, eos_ids=(2,), add_bos=False)
    for special in (True, False):
        assert tokenizer.encode("abcde fghij", special=special) == BYTE_LEVEL.encode("abcde fghij", special=special)


def test_an_added_word_is_vocabulary_for_documents_too() -> None:
    assert with_added(added(SIZE, "covid", special=False)).encode("covid", special=False) == [SIZE]


def test_added_words_keep_their_ids_beside_control_tokens() -> None:
    tokenizer = with_added(added(SIZE, "<ctl>"), added(SIZE + 1, "covid", special=False))
    assert tokenizer.encode("covid", special=False) == tokenizer.encode("covid", special=True) == [SIZE + 1]


def test_a_vocabulary_that_forms_control_tokens_from_text_is_cut() -> None:
    # unigram models choose among all entries, control tokens included
    entries = [["<unk>", 0.0], ["<s>", 0.0], *([c, -5.0] for c in "<s>ab")]
    data = {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>")],
        "model": {"type": "Unigram", "unk_id": 0, "vocab": entries},
    }
    tokenizer = Tokenizer(json.dumps(data), bos_id=1, eos_ids=(), add_bos=True)
    ids = tokenizer.encode("a<s>b", special=False)
    assert [tokenizer.text_of(i) for i in ids] == list("a<s>b")


def test_nothing_is_added_by_itself() -> None:
    tokenizer = Tokenizer(tokenizer_json(), bos_id=1, eos_ids=(2,), add_bos=True)
    assert tokenizer.add_bos
    assert 1 not in tokenizer.encode("a", special=True)


def test_a_begin_token_that_does_not_exist_is_not_wanted() -> None:
    assert not Tokenizer(tokenizer_json(), bos_id=None, eos_ids=(), add_bos=True).add_bos


def test_ids_equal_the_librarys(tiny_tokenizer: Tokenizer) -> None:
    text = "the water of the mill\n\n  Ünïcödé"
    expected = tokenizers.Tokenizer.from_str(tokenizer_json()).encode(text, add_special_tokens=False).ids
    assert tiny_tokenizer.encode(text, special=False) == expected


def test_padding_and_truncation_of_the_file_are_ignored() -> None:
    data = json.loads(tokenizer_json())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(json.dumps(data), bos_id=1, eos_ids=(2,), add_bos=False)
    assert len(tokenizer.encode("qqqq", special=False)) == 4


def test_a_lone_surrogate_is_named() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        BYTE_LEVEL.encode("ab\ud800", special=False)


def test_no_text_has_no_ids() -> None:
    assert BYTE_LEVEL.encode("", special=False) == []


def test_the_vocabulary_counts_added_tokens() -> None:
    assert with_added(added(SIZE, "covid", special=False)).vocab_size == SIZE + 1


def test_decoding_skips_control_tokens() -> None:
    assert BYTE_LEVEL.decode([1, *BYTE_LEVEL.encode("the", special=False), 2]) == "the"


@pytest.mark.parametrize("source", ["", "{}", "[]", '{"model": {"type": "Nothing"}}', '{"added_tokens": 3}'])
def test_what_is_no_tokenizer_is_refused(source: str) -> None:
    with pytest.raises(BadModelFile, match="the tokenizer cannot be read"):
        Tokenizer(source, bos_id=None, eos_ids=(), add_bos=False)


@given(TEXTS)
def test_text_comes_back(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, special=False)) == text


@given(st.lists(st.integers(0, SIZE - 1), max_size=30))
def test_streaming_any_ids_equals_decoding_them_at_once(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


FALLBACK = byte_fallback()


@given(st.lists(st.sampled_from([0, 2, *range(3 + 0x7E, 3 + 0x84), 3 + 0xC3, 3 + 0xE4, *range(259, 264)]), max_size=20))
def test_streaming_byte_tokens_equals_decoding_them_at_once(ids: list[int]) -> None:
    assert streamed(FALLBACK, ids) == FALLBACK.decode(ids)


def test_a_character_split_over_tokens_comes_whole() -> None:
    ids = BYTE_LEVEL.encode("🙂", special=False)
    assert len(ids) == 4
    stream = BYTE_LEVEL.stream()
    assert [stream.push(i) for i in ids] == ["", "", "", "🙂"]


def test_text_is_given_out_at_once() -> None:
    stream = BYTE_LEVEL.stream()
    ids = BYTE_LEVEL.encode("the mill", special=False)
    assert [stream.push(i) for i in ids] == [BYTE_LEVEL.decode([i]) for i in ids]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    stream = BYTE_LEVEL.stream()
    stream.push(BYTE_LEVEL.encode("🙂", special=False)[0])
    assert stream.flush() == "\ufffd"


def test_a_flushed_stream_starts_anew() -> None:
    stream = BYTE_LEVEL.stream()
    stream.push(BYTE_LEVEL.encode("🙂", special=False)[0])
    stream.flush()
    assert stream.flush() == ""
    assert stream.push(BYTE_LEVEL.encode("q", special=False)[0]) == "q"


def test_spaces_between_streamed_words_stay() -> None:
    assert streamed(FALLBACK, [262, 262, 260]) == "a aa"


@given(st.lists(st.integers(0, SIZE - 1), max_size=30))
def test_bytes_of_tokens_join_to_the_text(ids: list[int]) -> None:
    assert joined(BYTE_LEVEL, ids).decode("utf-8", "replace") == BYTE_LEVEL.decode(ids)


@given(st.lists(st.sampled_from([2, 3 + 0x61, 3 + 0xC3, 3 + 0xA9, *range(259, 264)]), max_size=20))
def test_bytes_of_converted_vocabularies_join_to_the_text(ids: list[int]) -> None:
    data = joined(FALLBACK, ids)
    # a run of bytes that is no text is shown as so many marks, whatever else is in it
    if "\ufffd" not in (text := FALLBACK.decode(ids)):
        assert data.decode() == text


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    out: list[bytes] = []
    for token in ids:
        data = tokenizer.bytes_of(token, first=not out)
        if data is not None:
            out.append(data)
    return b"".join(out)


def test_parts_of_a_character_are_its_bytes() -> None:
    ids = BYTE_LEVEL.encode("é", special=False)
    assert [BYTE_LEVEL.bytes_of(i, first=False) for i in ids] == [b"\xc3", b"\xa9"]
    assert FALLBACK.bytes_of(3 + 0xE4, first=True) == b"\xe4"


def test_the_blank_before_a_first_word_is_no_text() -> None:
    word = FALLBACK.id_of("▁a")
    assert word is not None
    assert [FALLBACK.bytes_of(word, first=first) for first in (True, False)] == [b"a", b" a"]


def test_a_control_token_has_no_bytes() -> None:
    assert BYTE_LEVEL.bytes_of(2, first=False) is None


def test_an_added_word_outside_the_byte_alphabet_is_its_own_text() -> None:
    assert with_added(added(SIZE, "a b", special=False)).bytes_of(SIZE, first=False) == b"a b"
