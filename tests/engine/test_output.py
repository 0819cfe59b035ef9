"""Text of an answer: stop strings, ends, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis.strategies import lists, sampled_from, text

from kvblend.engine.choosing import Choice
from kvblend.engine.logprobs import TokenLogprob
from kvblend.engine.output import OutputText, Piece

EOS = 99


class Words:
    """A detokeniser whose token i is the i-th word; `tail` comes with the flush."""

    def __init__(self, words: Sequence[str], tail: str = "") -> None:
        self.words, self.tail = words, tail

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        tail, self.tail = self.tail, ""
        return tail


def run(words: Sequence[str], stop: Sequence[str] = (), limit: int = 1000, tail: str = "") -> tuple[str, bool]:
    """All text that is handed on until the end, and whether a stop ended it."""
    output, out = OutputText(Words(words, tail), {EOS}, stop, limit), ""
    for token in range(min(len(words), limit)):
        piece = output.push(token)
        out += piece.text
        if piece.stopped:
            return out, True
    return out, False


def test_text_is_handed_on_as_it_comes() -> None:
    output = OutputText(Words(["a", "", "b"]), {EOS}, (), 10)
    assert [output.push(i) for i in range(3)] == [Piece("a", False), Piece("", False), Piece("b", False)]


def test_an_end_token_stops_and_flushes_without_a_text_of_its_own() -> None:
    output = OutputText(Words(["a"], tail="…"), {EOS}, (), 10)
    output.push(0)
    assert output.push(EOS) == Piece("…", True)


def test_the_last_token_allowed_flushes() -> None:
    assert run(["a", "b"], limit=2, tail="c") == ("abc", False)


def test_a_stop_string_ends_the_answer_and_is_not_handed_on() -> None:
    assert run(["one ", "EN", "D two"], ["END"]) == ("one ", True)


def test_what_may_become_a_stop_string_is_held_until_it_cannot() -> None:
    output = OutputText(Words(["xE", "N", "Q"]), {EOS}, ["END"], 10)
    assert [output.push(i).text for i in range(3)] == ["x", "", "ENQ"]


def test_held_text_comes_with_an_end_token() -> None:
    output = OutputText(Words(["xEN"]), {EOS}, ["END"], 10)
    assert output.push(0).text == "x"
    assert output.push(EOS) == Piece("EN", True)


def test_held_text_comes_with_the_last_token() -> None:
    assert run(["xE", "N"], ["END"], limit=2) == ("xEN", False)


def test_a_stop_string_that_the_flush_completes_is_found() -> None:
    output = OutputText(Words(["xEN"], tail="D"), {EOS}, ["END"], 10)
    output.push(0)
    assert output.push(EOS) == Piece("", True)


def test_the_first_of_several_stop_strings_counts() -> None:
    assert run(["a.b!c"], ["!", "."]) == ("a", True)


def early(words: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[str, bool]:
    output, out = OutputText(Words(words), {EOS}, stop, 1000, min_tokens), ""
    for token in range(len(words)):
        piece = output.push(token)
        out += piece.text
        if piece.stopped:
            return out, True
    return out, False


def test_a_stop_string_within_the_least_length_does_not_count() -> None:
    assert early(["one END", " two", " END x"], ["END"], 2) == ("one END two ", True)


def test_a_stop_string_that_is_complete_behind_the_least_length_counts() -> None:
    assert early(["one E", "ND two"], ["END"], 1) == ("one ", True)


def test_what_was_held_from_the_least_length_is_not_searched_again() -> None:
    # "ab" is complete within the first token, which was held because "xabc" may begin there
    assert early(["xab", "d", "ab"], ["ab", "xabc"], 1) == ("xabd", True)


class Names:
    """A vocabulary of the words themselves; token 0 is the first byte of a character, 1 its rest."""

    def text_of(self, token_id: int) -> str:
        return f"<{token_id}>"

    def bytes_of(self, token_id: int, *, first: bool) -> bytes | None:
        return None if token_id == EOS else (b"\xc3", b"\xa9", b" b")[token_id][1 if first and token_id == 2 else 0 :]


def test_a_token_is_described_with_its_bytes_and_place() -> None:
    output = OutputText(Words(["", "é", " b"]), {EOS}, (), 10, vocabulary=Names())
    seen = []
    for token in (0, 1, 2, EOS):
        seen.append(output.describe(Choice(token, -1.0, ((2, -2.0),))))
        output.push(token)
    assert [(one.token, one.bytes, one.offset) for one in seen if one] == [
        ("\\xc3", b"\xc3", 0),
        ("\\xa9", b"\xa9", 0),
        (" b", b" b", 1),
        (f"<{EOS}>", None, 3),
    ]
    assert [one.top for one in seen if one][:2] == [
        (TokenLogprob(2, -2.0, "b", b"b"),),
        (TokenLogprob(2, -2.0, " b", b" b"),),
    ]


def test_a_choice_without_log_probabilities_is_not_described() -> None:
    assert OutputText(Words(["a"]), {EOS}, (), 10, vocabulary=Names()).describe(Choice(0)) is None


@given(lists(text("ab", max_size=3), min_size=1, max_size=8), lists(sampled_from(("aa", "ab", "bab", "b")), max_size=3))
def test_the_text_is_that_before_the_first_stop_however_it_is_cut(words: list[str], stops: list[str]) -> None:
    # "first" is the stop that is complete first: nobody can know of a longer one then
    seen, expected = "", None
    for word in words:
        seen += word
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            expected = seen[: min(found)]
            break
    got, stopped = run(words, stops, limit=len(words))
    assert (got, stopped) == ((seen, False) if expected is None else (expected, True))
