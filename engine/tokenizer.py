"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import tokenizers
from blake3 import blake3

from kvblend.engine.config import BadModelFile

_REPLACEMENT = "\ufffd"
# vocabularies for web pages hold these as tokens; they end nothing
_MARKUP = re.compile(
    r"</?(a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup|"
    r"table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
# vocabularies of bytes write each as a printable character; those that are none stand behind the first 256
_BYTE_OF = {chr(value): value for value in _PRINTABLE} | {
    chr(256 + place): value for place, value in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


class Tokenizer:
    """One model's tokenizer, from the JSON form of the `tokenizers` library.

    Two copies are kept: one that knows the control tokens, for the chat template's own text, and one that does not, for
    everything a user wrote, so that no document can end a turn. A control token is an added token that is marked
    special, begins or ends a text, or is written in angle or square brackets; other added tokens (words, runs of
    spaces, tags of HTML) are vocabulary and known to both.

    `add_bos` says whether the model wants `bos_id` before a text; nothing here adds it by itself. `digest` (32 bytes)
    is the BLAKE3 of the JSON, `vocab_size` one more than the largest token id. Raises
    BadModelFile where the JSON is not a tokenizer.
    """

    def __init__(self, source: str, *, bos_id: int | None, eos_ids: Sequence[int], add_bos: bool) -> None:
        try:
            self._marked = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises nothing narrower
            raise BadModelFile(f"the tokenizer cannot be read: {error}") from None
        # padding and truncation are settings of somebody's training run
        self._marked.no_padding()
        self._marked.no_truncation()
        added = self._marked.get_added_tokens_decoder()
        self._control = {i: t.content for i, t in added.items() if _is_control(t, i, (*eos_ids, bos_id))}
        self._plain = _copy_plain(self._marked, added, self._control)
        # whatever ends or pads a text is never shown
        self._silent = frozenset(self._control) | frozenset(eos_ids) | ({bos_id} if bos_id is not None else set())
        vocabulary = self._marked.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bytes = _byte_tokens(self._marked, vocabulary)
        self._decoder_state = _decoder_state(self._marked)
        self._texts: dict[tuple[int, bool], bytes | None] = {}
        self.digest = blake3(source.encode()).digest()
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.add_bos = add_bos and bos_id is not None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; control tokens in it are recognised only where `special`.

        ValueError where the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: a lone surrogate at character {error.start}") from None
        if not text:
            return []
        if special:
            return list(self._marked.encode(text, add_special_tokens=False).ids)
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        return self._encode_cut(text) if not self._control.keys().isdisjoint(ids) else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without control tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return str(self._marked.decode([i for i in ids if i not in self._silent], skip_special_tokens=False))

    def stream(self) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self)

    def text_of(self, token_id: int | None) -> str:
        """A token as the vocabulary writes it; empty for None or an unknown id."""
        return "" if token_id is None else self._marked.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        found = self._marked.token_to_id(token)
        return None if found is None else int(found)

    def is_silent(self, token_id: int) -> bool:
        """Whether a token has no text of its own: control, begin or end of text."""
        return token_id in self._silent

    def is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one raw byte, so that its text depends on its neighbours."""
        return token_id in self._bytes

    def bytes_of(self, token_id: int, *, first: bool) -> bytes | None:
        """What a token adds to a text, perhaps a part of a character; None where it has no text of its own.

        `first`: nothing stands before it, for which some vocabularies leave a blank out. Joined they are the text.
        """
        key = (token_id, first)
        if key not in self._texts:
            self._texts[key] = self._find_bytes(token_id, first)
        return self._texts[key]

    def _find_bytes(self, token_id: int, first: bool) -> bytes | None:
        token = self.text_of(token_id)
        if not token or self.is_silent(token_id):
            return None
        if self.is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        if b"ByteLevel" in self._decoder_state:
            parts = [_BYTE_OF.get(char) for char in token]
            known = [part for part in parts if part is not None]
            return bytes(known) if len(known) == len(parts) else token.encode()
        # behind itself, where it is not the first: decoders look at what stands before a token
        alone = self.decode([token_id])
        return (alone if first else self.decode([token_id, token_id])[len(alone) :]).encode()

    def _encode_cut(self, text: str) -> list[int]:
        """Encode text from which the vocabulary itself forms control tokens: each is cut behind its first character."""
        pattern = "|".join(re.escape(t) for t in sorted(self._control.values(), key=len, reverse=True))
        ids: list[int] = []
        start = 0
        for match in re.finditer(pattern, text):
            ids += self._plain.encode(text[start : match.start() + 1], add_special_tokens=False).ids
            start = match.start() + 1
        ids += self._plain.encode(text[start:], add_special_tokens=False).ids
        if met := self._control.keys() & set(ids):
            raise ValueError(
                f"text holds the control token {self._control[min(met)]!r}, which cannot be written plainly"
            )
        return ids


class TextStream:
    """Text of a growing list of token ids, given out as soon as it cannot change any more.

    All pushes and the final flush joined equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # decoders treat the first token of a text in their own way, so the last finished tokens stand before the new
        self._done: list[int] = []
        self._done_text = ""
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """Take one token; the text that became certain by it, often empty."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._pending()
        certain = text.rstrip(_REPLACEMENT)
        out = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text and text:
            self._done, self._ids, self._given = self._ids, [], 0
            self._done_text = self._tokenizer.decode(self._done)
        return out

    def flush(self) -> str:
        """The rest, an unfinished character as U+FFFD; the stream starts anew afterwards."""
        out = self._pending()[self._given :] if self._ids else ""
        self._done, self._done_text, self._ids, self._given = [], "", [], 0
        return out

    def _pending(self) -> str:
        return self._tokenizer.decode(self._done + self._ids)[len(self._done_text) :]


def _copy_plain(
    marked: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken], control: Collection[int]
) -> tokenizers.Tokenizer:
    """A copy that takes control tokens for text; it shares the vocabulary, which is large."""
    plain = tokenizers.Tokenizer(marked.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(marked, part) is not None:
            setattr(plain, part, getattr(marked, part))
    tokens = []
    # the library numbers added tokens in order of their coming
    for token_id in sorted(added):
        token = added[token_id]
        tokens.append(
            tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special or token_id in control,
            )
        )
    plain.add_tokens(tokens)
    plain.encode_special_tokens = True
    return plain


def _is_control(token: tokenizers.AddedToken, token_id: int, ends: Collection[int | None]) -> bool:
    content = token.content
    bracketed = len(content) > 1 and content[0] + content[-1] in ("<>", "[]")
    return token.special or token_id in ends or (bracketed and _MARKUP.fullmatch(content) is None)


def _decoder_state(tokenizer: tokenizers.Tokenizer) -> bytes:
    return b"" if tokenizer.decoder is None else bytes(tokenizer.decoder.__getstate__())


def _byte_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> frozenset[int]:
    if b"ByteFallback" not in _decoder_state(tokenizer):
        return frozenset()
    return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
