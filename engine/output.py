"""From sampled tokens to text: incremental detokenising, stop strings, the end of a sequence."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvblend.engine.choosing import Choice
from kvblend.engine.logprobs import TokenLogprob


class TextStream(Protocol):
    """Incremental detokeniser: `engine.tokenizer.TextStream` fits."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class Vocabulary(Protocol):
    """What single tokens are called: `engine.tokenizer.Tokenizer` fits."""

    def text_of(self, token_id: int) -> str:
        """The token as the vocabulary writes it."""
        ...

    def bytes_of(self, token_id: int, *, first: bool) -> bytes | None:
        """What the token adds to a text, None for nothing; `first`: at its very beginning."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to hand on after one token; `stopped` ends the sequence."""

    text: str
    stopped: bool


class OutputText:
    """The text of one answer. A stop string is never handed on, nor is any part of it that may still become one.

    Tokens in `end_ids` end it and have no text. Stop strings count that are complete behind the first `min_tokens`
    tokens. `vocabulary` is needed for log probabilities only.
    """

    def __init__(
        self,
        stream: TextStream,
        end_ids: Collection[int],
        stop: Sequence[str],
        tokens_max: int,
        min_tokens: int = 0,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._stream = stream
        self._ends = frozenset(end_ids)
        self._stop = tuple(stop)
        self._tokens_left = tokens_max
        self._early_left = min_tokens
        self._vocabulary = vocabulary
        self._held = ""
        # characters of what is held in which a stop string may end without counting
        self._exempt = 0
        # of the text as it comes, stop strings included; counted for log probabilities only
        self._chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._began = False

    def push(self, token_id: int) -> Piece:
        """Take one sampled token. The last one allowed by `tokens_max` flushes what is held."""
        self._tokens_left -= 1
        self._early_left -= 1
        if token_id in self._ends:
            return self._cut(self._stream.flush(), last=True, stopped=True)
        text = self._stream.push(token_id)
        if self._tokens_left <= 0:
            return self._cut(text + self._stream.flush(), last=True, stopped=False)
        return self._cut(text, last=False, stopped=False)

    def describe(self, choice: Choice) -> TokenLogprob | None:
        """The log probabilities of a token that is about to be pushed, with names and place; None where it has none."""
        if choice.logprob is None or self._vocabulary is None:
            return None
        first = not self._began
        # the bytes of a character that is not complete yet
        pending = self._decoder.getstate()[0]
        top = tuple(TokenLogprob(name, value, *self._name(name, first)) for name, value in choice.top)
        token, data = self._name(choice.token_id, first)
        self._began = self._began or data is not None
        # it stands in the same character as its first byte does
        head = (data or b"")[:1]
        offset = self._chars + len((pending + head).decode("utf-8", "replace")) - len(head)
        self._chars += len(self._decoder.decode(data or b""))
        return TokenLogprob(choice.token_id, choice.logprob, token, data, top, offset)

    def _name(self, token_id: int, first: bool) -> tuple[str, bytes | None]:
        """A token in readable form, what is no whole character as `\\xe2`; and its bytes."""
        if self._vocabulary is None:
            return "", None
        data = self._vocabulary.bytes_of(token_id, first=first)
        token = self._vocabulary.text_of(token_id) if data is None else data.decode("utf-8", "backslashreplace")
        return token, data

    def _cut(self, new: str, last: bool, stopped: bool) -> Piece:
        text = self._held + new
        if self._early_left >= 0:
            self._exempt = len(text)
        found = [at for at in (self._find(text, stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return Piece(text[: min(found)], True)
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        self._exempt = max(0, self._exempt - (len(text) - keep))
        return Piece(text[: len(text) - keep], stopped)

    def _find(self, text: str, stop: str) -> int:
        """Where a stop string begins that ends behind what is exempt."""
        return text.find(stop, max(0, self._exempt + 1 - len(stop)))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
