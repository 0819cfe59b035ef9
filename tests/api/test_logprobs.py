"""Log probabilities in OpenAI's shapes, for tokens that are words, parts of characters, and no text at all."""

from __future__ import annotations

from kvblend.actors.messages import TokenLogprob
from kvblend.api.server.logprobs import chat_logprobs, response_logprobs, text_logprobs

WORD = TokenLogprob(5, -0.5, "a", b"a", (TokenLogprob(5, -0.5, "a", b"a"), TokenLogprob(6, -1.5, "b", b"b")), 0)
FIRST = TokenLogprob(7, -0.25, "\\xc3", b"\xc3", (TokenLogprob(8, -0.1, "\\xa9", b"\xa9"),), 1)
END = TokenLogprob(2, -2.0, "<end>", None, (), 2)


def test_a_conversation_has_tokens_with_bytes_and_alternatives() -> None:
    a, b = ({"token": t, "logprob": p, "bytes": [ord(t)]} for t, p in (("a", -0.5), ("b", -1.5)))
    assert chat_logprobs([WORD])["content"] == [{**a, "top_logprobs": [a, b]}]


def test_a_part_of_a_character_has_its_byte_and_an_end_none() -> None:
    first, end = chat_logprobs([FIRST, END])["content"]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["bytes"]) == ("\\xc3", [0xC3], [0xA9])
    assert (end["token"], end["bytes"], end["top_logprobs"]) == ("<end>", None, [])


def test_a_plain_prompt_has_parallel_lists() -> None:
    assert text_logprobs([WORD, FIRST, END]) == {
        "tokens": ["a", "bytes:\\xc3", "<end>"],
        "token_logprobs": [-0.5, -0.25, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"bytes:\\xa9": -0.1, "bytes:\\xc3": -0.25}, {"<end>": -2.0}],
        "text_offset": [0, 1, 2],
    }


def test_of_tokens_with_one_name_the_likeliest_counts() -> None:
    top = (TokenLogprob(1, -0.5, "x", b"x"), TokenLogprob(2, -3.0, "x", b"x"))
    assert text_logprobs([TokenLogprob(1, -0.5, "x", b"x", top)])["top_logprobs"] == [{"x": -0.5}]


def test_a_response_writes_no_bytes_as_an_empty_list() -> None:
    assert [one["bytes"] for one in response_logprobs([WORD, END], extended=False)] == [[97], []]


def test_our_own_protocol_has_ids_and_places() -> None:
    word, end = response_logprobs([WORD, END], extended=True)
    assert (word["token_id"], word["offset"], end["bytes"], end["offset"]) == (5, 0, None, 2)
    assert [one["token_id"] for one in word["top_logprobs"]] == [5, 6]
