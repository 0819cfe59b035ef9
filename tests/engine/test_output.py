"""Text of an answer: stop strings, ends, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis.strategies import lists, sampled_from, text

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
