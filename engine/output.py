"""From sampled tokens to text: incremental detokenising, stop strings, the end of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class TextStream(Protocol):
    """Incremental detokeniser: `engine.tokenizer.TextStream` fits."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to hand on after one token; `stopped` ends the sequence."""

    text: str
    stopped: bool


class OutputText:
    """The text of one answer. A stop string is never handed on, nor is any part of it that may still become one."""

    def __init__(self, stream: TextStream, eos_ids: Collection[int], stop: Sequence[str], tokens_max: int) -> None:
        self._stream = stream
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._tokens_left = tokens_max
        self._held = ""

    def push(self, token_id: int) -> Piece:
        """Take one sampled token. The last one allowed by `tokens_max` flushes what is held."""
        self._tokens_left -= 1
        if token_id in self._eos:
            return self._cut(self._held + self._stream.flush(), last=True, stopped=True)
        text = self._held + self._stream.push(token_id)
        if self._tokens_left <= 0:
            return self._cut(text + self._stream.flush(), last=True, stopped=False)
        return self._cut(text, last=False, stopped=False)

    def _cut(self, text: str, last: bool, stopped: bool) -> Piece:
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return Piece(text[: min(found)], True)
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return Piece(text[: len(text) - keep], stopped)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
